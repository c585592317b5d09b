//! Memory that begins at a cache line.

/// A cache line.
#[repr(align(64))]
#[derive(Clone, Copy)]
struct Line([f32; 16]);

pub struct Block(Vec<Line>);

impl Block {
    /// At least `n` numbers, in whole lines.
    pub fn new(n: usize) -> Block {
        Block(vec![Line([0.0; 16]); n.div_ceil(16)])
    }

    pub fn numbers_mut(&mut self) -> impl Iterator<Item = &mut f32> + '_ {
        self.0.iter_mut().flat_map(|line| &mut line.0)
    }

    /// Valid until the block is used again.
    pub fn address(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }

    /// The bits of the numbers; those of all NaN are equal.
    pub fn bits(&self) -> Vec<u32> {
        let bits = |x: f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
        self.0.iter().flat_map(|line| line.0).map(bits).collect()
    }
}
