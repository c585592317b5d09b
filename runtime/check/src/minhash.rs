//! Computes MinHash signatures, and the keys of their bands for locality-sensitive hashing.
//!
//! A signature has 80 minima in 16 bands of 5. Two texts whose sets of grams have the Jaccard similarity `J` agree in a minimum with
//! probability `J`, so they share a band with probability `1 - (1 - J^5)^16`: 99.8 % at 0.8, 40 % at 0.5, 4 % at 0.3
//! (docs/adr/185-near-duplicates-by-16-bands-of-5.md).
//!
//! A hash is `(gram ^ b) * a` on 32 bits with odd `a`: a permutation, in one multiplication a lane. The loop over lanes is written for the
//! autovectorizer. The target's SSE2 has neither that multiplication nor an unsigned minimum, so the loop is compiled for AVX2 and AVX-512
//! too, and chosen at run time. All of them have the same results.

/// Bands of a signature.
pub const BANDS: usize = 16;
/// Minima of a band.
pub const ROWS: usize = 5;
/// Minima of a signature.
pub const MINIMA: usize = BANDS * ROWS;
/// Minima that are computed together: a multiple of the lanes of a vector.
const BLOCK: usize = 16;

/// The hash of each band of a signature.
pub type Bands = [u32; BANDS];

/// Mixes the bits of a counter (SplitMix64).
pub(crate) const fn mix(counter: u64) -> u64 {
    let z = counter.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Factors and masks of the hashes. They are constants, so that signatures of all releases are equal.
const FACTORS: ([u32; MINIMA], [u32; MINIMA]) = {
    let (mut a, mut b, mut k) = ([0; MINIMA], [0; MINIMA], 0);
    while k < MINIMA {
        let word = mix(0x5045_5249 + k as u64 * 0x1_0001);
        (a[k], b[k]) = (word as u32 | 1, (word >> 32) as u32);
        k += 1;
    }
    (a, b)
};

#[inline(always)]
fn minima_of(grams: &[u32], out: &mut [u32; MINIMA]) {
    let (factors, masks) = (FACTORS.0.as_chunks::<BLOCK>().0, FACTORS.1.as_chunks::<BLOCK>().0);
    for (block, (a, b)) in out.as_chunks_mut::<BLOCK>().0.iter_mut().zip(factors.iter().zip(masks)) {
        let mut least = [u32::MAX; BLOCK];
        for gram in grams {
            for lane in 0..BLOCK {
                least[lane] = least[lane].min((gram ^ b[lane]).wrapping_mul(a[lane]));
            }
        }
        *block = least;
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::MINIMA;

    #[target_feature(enable = "avx2")]
    pub fn avx2(grams: &[u32], out: &mut [u32; MINIMA]) {
        super::minima_of(grams, out);
    }

    #[target_feature(enable = "avx512f")]
    pub fn avx512(grams: &[u32], out: &mut [u32; MINIMA]) {
        super::minima_of(grams, out);
    }
}

/// Computes the minimum of each hash over the grams of a text.
pub fn minima(grams: &[u32], out: &mut [u32; MINIMA]) {
    #[cfg(target_arch = "x86_64")]
    {
        if std::arch::is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has the instructions that the function is compiled for.
            #[allow(unsafe_code)]
            return unsafe { x86::avx512(grams, out) };
        }
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
            #[allow(unsafe_code)]
            return unsafe { x86::avx2(grams, out) };
        }
    }
    minima_of(grams, out);
}

/// Hashes the minima of each band.
pub fn bands(minima: &[u32; MINIMA]) -> Bands {
    let mut out = [0; BANDS];
    for (band, (key, rows)) in (0u64..).zip(out.iter_mut().zip(minima.as_chunks::<ROWS>().0)) {
        let word = rows.iter().fold(band, |word, row| mix(word ^ u64::from(*row)));
        *key = (word >> 32) as u32;
    }
    out
}

/// The probability that texts of a Jaccard similarity share a band.
pub fn found(similarity: f64) -> f64 {
    1.0 - (1.0 - similarity.powi(ROWS as i32)).powi(BANDS as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An independent generator (xorshift).
    struct Draw(u64);

    impl Draw {
        fn next(&mut self) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0
        }
    }

    #[test]
    fn vector_loops_equal_the_definition() {
        let mut draw = Draw(7);
        for len in [0, 1, 2, 15, 16, 17, 500] {
            let grams: Vec<u32> = (0..len).map(|_| draw.next() as u32).collect();
            let (mut got, mut plain) = ([0; MINIMA], [0; MINIMA]);
            minima(&grams, &mut got);
            minima_of(&grams, &mut plain);
            assert_eq!(got, plain);
            for k in 0..MINIMA {
                let hash = |gram: &u32| (gram ^ FACTORS.1[k]).wrapping_mul(FACTORS.0[k]);
                assert_eq!(got[k], grams.iter().map(hash).min().unwrap_or(u32::MAX));
            }
        }
    }

    /// The share of pairs that share a band, over random sets of a known similarity, is that of the formula.
    #[test]
    fn bands_find_what_the_formula_says() {
        let mut draw = Draw(3);
        for (common, own) in [(160, 20), (120, 40), (100, 50), (60, 70)] {
            let similarity = f64::from(common) / f64::from(common + 2 * own);
            let (mut hits, mut equal, trials) = (0u32, 0usize, 2000u32);
            for _ in 0..trials {
                let shared: Vec<u32> = (0..common).map(|_| draw.next() as u32).collect();
                let signature = |draw: &mut Draw| {
                    let mut grams = shared.clone();
                    grams.extend((0..own).map(|_| draw.next() as u32));
                    let mut out = [0; MINIMA];
                    minima(&grams, &mut out);
                    out
                };
                let (a, b) = (signature(&mut draw), signature(&mut draw));
                equal += a.iter().zip(&b).filter(|(a, b)| a == b).count();
                hits += u32::from(bands(&a).iter().zip(bands(&b)).any(|(a, b)| *a == b));
            }
            let (share, expected) = (f64::from(hits) / f64::from(trials), found(similarity));
            let spread = 5.0 * (expected * (1.0 - expected) / f64::from(trials)).sqrt() + 1e-3;
            assert!((share - expected).abs() < spread, "J {similarity:.3}: {share} of pairs, expected {expected}");
            let agreed = equal as f64 / (f64::from(trials) * MINIMA as f64);
            assert!((agreed - similarity).abs() < 0.01, "J {similarity:.3}: {agreed} of minima agree");
        }
    }
}
