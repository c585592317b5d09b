//! Makes files from others by random changes.

/// SplitMix64 (Steele, Lea and Flood 2014).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `n`; 0 if `n` is 0.
    fn below(&mut self, n: usize) -> usize {
        (self.next() % (n as u64).max(1)) as usize
    }
}

/// Numbers at which arithmetic on sizes changes behaviour.
const NUMBERS: [u64; 12] =
    [0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFF_FFFF, 0xFFFF_FFFF, 1 << 40, 1 << 62, i64::MAX as u64, u64::MAX];

/// Changes a file of the corpus in a few places.
pub fn made(corpus: &[Vec<u8>], words: &[&[u8]], random: &mut Random) -> Vec<u8> {
    let mut bytes = corpus[random.below(corpus.len())].clone();
    for _ in 0..=random.below(4) {
        change(&mut bytes, corpus, words, random);
    }
    bytes
}

fn change(bytes: &mut Vec<u8>, corpus: &[Vec<u8>], words: &[&[u8]], random: &mut Random) {
    // Headers and footers decide most.
    let at = match random.below(3) {
        0 => random.below(bytes.len().min(64)),
        1 => bytes.len().saturating_sub(1 + random.below(bytes.len().min(64))),
        _ => random.below(bytes.len()),
    };
    let end = (at + 1 + random.below(32)).min(bytes.len());
    match random.below(11) {
        0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
        1 if at < bytes.len() => bytes[at] = random.next() as u8,
        2 | 3 => {
            let (number, width) = (NUMBERS[random.below(NUMBERS.len())], [1, 2, 4, 8][random.below(4)]);
            let (low, high) = (number.to_le_bytes(), (number << (64 - 8 * width)).to_be_bytes());
            let new = if random.below(2) == 0 { &low[..width] } else { &high[..width] };
            if let Some(old) = bytes.get_mut(at..at + width) {
                old.copy_from_slice(new);
            }
        }
        4 => bytes.truncate(at),
        5 if at < end => drop(bytes.drain(at..end)),
        6 if at < end => {
            let part = bytes[at..end].to_vec();
            let to = random.below(bytes.len() + 1);
            drop(bytes.splice(to..to, part));
        }
        7 => {
            let new: Vec<u8> = (0..=random.below(8)).map(|_| random.next() as u8).collect();
            drop(bytes.splice(at..at, new));
        }
        8 if !words.is_empty() => drop(bytes.splice(at..at, words[random.below(words.len())].iter().copied())),
        9 => {
            let other = &corpus[random.below(corpus.len())];
            let from = random.below(other.len());
            bytes.truncate(at);
            bytes.extend_from_slice(&other[from..]);
        }
        _ => {
            // A number of a text becomes another one.
            let is_digit = |b: &u8| b.is_ascii_digit();
            if let Some(first) = bytes.get(at..).and_then(|rest| rest.iter().position(is_digit)).map(|k| at + k) {
                let last = first + bytes[first..].iter().take_while(|b| is_digit(b)).count();
                let number = NUMBERS[random.below(NUMBERS.len())].to_string();
                drop(bytes.splice(first..last, number.into_bytes()));
            }
        }
    }
}
