//! Tells text that NFC does not change by a quick look at its characters.
//!
//! NFC changes text only where a character decomposes, composes with the one before it, or is a combining mark. The ranges below
//! contain none of these; other text is left to the normaliser. A test compares each character with the crate's NFC.

/// Whether NFC surely leaves a text as it is: all of its characters are in ranges without marks and compositions.
pub(crate) fn is_surely_nfc(text: &str) -> bool {
    text.is_ascii() || text.chars().all(stable)
}

fn stable(c: char) -> bool {
    matches!(c as u32,
        0..0x300 // Latin and phonetic letters, precomposed
        | 0x400..0x483 | 0x48a..0x530 // Cyrillic
        | 0x2010..0x2028 | 0x2030..0x205f // dashes, quotes, dots
        | 0x20a0..0x20c0 // currencies
        | 0x2190..0x219a | 0x2500..0x2900 // arrows, boxes, symbols
        | 0x3000..0x302a | 0x3041..0x3097 | 0x30a1..0x30fb // CJK punctuation, kana
        | 0x4e00..0xa000 // CJK ideographs
        | 0xac00..0xd7a4 // Hangul syllables
        | 0xff01..0xff5f // full-width forms
        | 0x1f300..0x1f650) // emoji
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::{NormalizedString, Normalizer, normalizers::NFC};

    #[test]
    fn characters_that_look_stable_are() {
        let all: Vec<char> = (0..0x11_0000).filter_map(char::from_u32).filter(|c| stable(*c)).collect();
        assert!(all.len() > 30_000);
        // All in one text, so that neighbours could compose, and each after every kind of base.
        for text in [all.iter().collect::<String>(), all.iter().flat_map(|c| ['a', *c, 'か', *c, '가', *c]).collect()]
        {
            let mut normal = NormalizedString::from(text.as_str());
            NFC.normalize(&mut normal).expect("normalised");
            assert!(normal.get() == text, "NFC changes a character that looks stable");
        }
    }
}
