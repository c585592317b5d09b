//! Normalizes texts, and cuts them into character 5-grams and words.
//!
//! Normalization lowers letters, replaces runs of white space by one space and trims. Punctuation, digits and accents stay: texts that differ in
//! them are different samples. The fields of a record are separated by U+001F.

use crate::minhash::mix;

/// Characters of a gram.
pub const GRAM: usize = 5;
/// Separates the texts of a record.
pub const SEPARATOR: char = '\u{1f}';
/// The base of the rolling hash of grams.
const BASE: u64 = 0x9E37_79B9_7F4A_7C15;

/// Appends the normal form of a text.
pub fn append(text: &str, out: &mut String) {
    let start = out.len();
    let mut space = false;
    for c in text.chars() {
        if c.is_whitespace() || c == SEPARATOR {
            space = true;
            continue;
        }
        if space && out.len() > start {
            out.push(' ');
        }
        space = false;
        match c.is_ascii() {
            true => out.push(c.to_ascii_lowercase()),
            false => out.extend(c.to_lowercase()),
        }
    }
}

/// Returns the normal form of a text.
pub fn normal(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    append(text, &mut out);
    out
}

/// Hashes the character 5-grams of a normalized text, in its order; a shorter text is one gram.
pub fn grams(text: &str, out: &mut Vec<u32>) {
    out.clear();
    const FIRST: u64 = BASE.wrapping_pow(GRAM as u32);
    // A sum of code points with powers of the base, from which the oldest is subtracted.
    let (mut window, mut hash, mut count) = ([0u64; GRAM], 0u64, 0usize);
    for c in text.chars() {
        let (code, at) = (u64::from(c) + 1, count % GRAM);
        hash = hash.wrapping_mul(BASE).wrapping_add(code).wrapping_sub(window[at].wrapping_mul(FIRST));
        window[at] = code;
        count += 1;
        if count >= GRAM {
            out.push((mix(hash) >> 32) as u32);
        }
    }
    if (1..GRAM).contains(&count) {
        out.push((mix(hash) >> 32) as u32);
    }
}

/// Returns the set of a text's grams, sorted.
pub fn gram_set(text: &str) -> Vec<u32> {
    let mut out = Vec::new();
    grams(text, &mut out);
    out.sort_unstable();
    out.dedup();
    out
}

/// Computes the Jaccard similarity of two sorted sets.
pub fn jaccard(a: &[u32], b: &[u32]) -> f64 {
    let (mut i, mut j, mut common) = (0, 0, 0usize);
    while let (Some(x), Some(y)) = (a.get(i), b.get(j)) {
        common += usize::from(x == y);
        (i, j) = (i + usize::from(x <= y), j + usize::from(y <= x));
    }
    let all = a.len() + b.len() - common;
    if all == 0 { 1.0 } else { common as f64 / all as f64 }
}

/// Calls `f` with the hash of each run of `size` words in each part of a normalized text: the number of the part, and the hash. Words are runs of
/// letters and digits; no run crosses from one part to the next.
pub fn word_runs(text: &str, size: usize, mut f: impl FnMut(usize, u64)) {
    let size = size.max(1);
    let mut words: Vec<u64> = Vec::new();
    let oldest = BASE.wrapping_pow(u32::try_from(size).unwrap_or(u32::MAX));
    for (part, text) in text.split(SEPARATOR).enumerate() {
        words.clear();
        let mut hash = 0u64;
        for word in text.split(|c: char| !c.is_alphanumeric()).filter(|w| !w.is_empty()) {
            let code =
                word.bytes().fold(0xCBF2_9CE4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01B3));
            hash = hash.wrapping_mul(BASE).wrapping_add(code);
            if let Some(first) = words.len().checked_sub(size).and_then(|at| words.get(at)) {
                hash = hash.wrapping_sub(first.wrapping_mul(oldest));
            }
            words.push(code);
            if words.len() >= size {
                f(part, mix(hash));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn texts_are_normalized() {
        assert_eq!(normal("  Ab\n\t c "), "ab c");
        assert_eq!(normal("ÄÖ\u{a0}ẞ"), "äö ß");
        assert_eq!(normal(" \n"), "");
    }

    #[test]
    fn grams_are_those_of_the_characters() {
        for text in ["", "a", "abcd", "abcde", "abcdef", "abcabcabcabc", "日本語のテキスト", "añb\u{1f600}cdé"]
        {
            let chars: Vec<char> = text.chars().collect();
            let mut hashes = Vec::new();
            grams(text, &mut hashes);
            let expected = if chars.is_empty() { 0 } else { chars.len().saturating_sub(GRAM - 1).max(1) };
            assert_eq!(hashes.len(), expected, "{text}");
            // Equal grams have equal hashes, different ones different hashes.
            let by_text: HashSet<&[char]> = chars.windows(GRAM).collect();
            assert_eq!(gram_set(text).len(), by_text.len().max(usize::from(!chars.is_empty())), "{text}");
        }
        let (mut inside, mut alone) = (Vec::new(), Vec::new());
        grams("xyzhello", &mut inside);
        grams("hello", &mut alone);
        assert_eq!(inside.last(), alone.last());
    }

    #[test]
    fn similarity_is_that_of_sets() {
        assert_eq!(jaccard(&[1, 2, 3], &[2, 3, 4]), 0.5);
        assert_eq!(jaccard(&[], &[]), 1.0);
        assert_eq!(jaccard(&[], &[1]), 0.0);
    }

    #[test]
    fn runs_of_words_stay_within_a_part() {
        let runs = |text: &str| {
            let mut out = Vec::new();
            word_runs(text, 3, |part, hash| out.push((part, hash)));
            out
        };
        assert_eq!(runs("a b"), []);
        let found = runs("a b c, d\u{1f}a b c");
        assert_eq!(found.iter().map(|f| f.0).collect::<Vec<_>>(), [0, 0, 1]);
        assert_eq!(found[0].1, found[2].1);
        assert_ne!(found[0].1, found[1].1);
        assert_eq!(runs("zz b c d")[1].1, found[1].1);
    }
}
