//! Generates pseudo-random test data by PCG-XSH-RR 64/32 (O'Neill, pcg-random.org), independent of the runtime's Philox.

/// A stream of pseudo-random numbers, the same on every machine.
#[derive(Clone, Debug)]
pub struct Pcg {
    state: u64,
}

impl Pcg {
    pub fn new(seed: u64) -> Pcg {
        let mut rng = Pcg { state: seed.wrapping_add(0x9e37_79b9_7f4a_7c15) };
        rng.next_u32();
        rng.next_u32();
        rng
    }

    /// Creates a stream named by words. The same words give the same numbers, independent of other streams.
    pub fn named(words: &[&str]) -> Pcg {
        let mut h = 0xcbf2_9ce4_8422_2325u64;
        for w in words {
            for b in w.bytes().chain([0xff]) {
                h = (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3);
            }
        }
        Pcg::new(h)
    }

    pub fn next_u32(&mut self) -> u32 {
        let old = self.state;
        self.state = old.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let x = (((old >> 18) ^ old) >> 27) as u32;
        x.rotate_right((old >> 59) as u32)
    }

    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f64 {
        let bits = (u64::from(self.next_u32()) << 21) ^ u64::from(self.next_u32() >> 11);
        (bits & ((1 << 53) - 1)) as f64 / (1u64 << 53) as f64
    }

    pub fn uniform(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.unit()
    }

    pub fn normal(&mut self) -> f64 {
        let (u, v) = (1.0 - self.unit(), self.unit());
        (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    }

    /// Uniform in 0..n; 0 if n is 0.
    pub fn below(&mut self, n: usize) -> usize {
        if n == 0 { 0 } else { self.next_u32() as usize % n }
    }

    pub fn range(&mut self, low: i64, high: i64) -> i64 {
        low + self.below((high - low) as usize) as i64
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }
}
