//! Generates random numbers with Philox 4x32-10, the counter-based generator of every random op.
//!
//! The result is a pure function of (counter, key), without state, so any element can be generated anywhere, in any
//! order. Callers define the meaning of the counter's four words. After Salmon, Moraes, Dror and Shaw, "Parallel random
//! numbers: as easy as 1, 2, 3", SC 2011; the tests are the known answers of their Random123 library.

/// Four random words for `counter` under `key`.
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
    const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
    let (mut c, mut k) = (counter, key);
    for round in 0..10 {
        if round > 0 {
            k = [k[0].wrapping_add(WEYL[0]), k[1].wrapping_add(WEYL[1])];
        }
        let (p0, p1) = (u64::from(MULTIPLIERS[0]) * u64::from(c[0]), u64::from(MULTIPLIERS[1]) * u64::from(c[2]));
        c = [(p1 >> 32) as u32 ^ c[1] ^ k[0], p1 as u32, (p0 >> 32) as u32 ^ c[3] ^ k[1], p0 as u32];
    }
    c
}

/// The uniform number in [0, 1) that `element` of a random tensor draws: 24 bits of a group of four shared words.
pub fn uniform(seed: u64, counter: u64, element: u64) -> f32 {
    let group = element / 4;
    let words = [group as u32, (group >> 32) as u32, counter as u32, (counter >> 32) as u32];
    let bits = philox4x32(words, [seed as u32, (seed >> 32) as u32])[(element % 4) as usize];
    (bits >> 8) as f32 * (1.0 / 16_777_216.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers_of_random123() {
        assert_eq!(philox4x32([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox4x32([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox4x32([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }
}
