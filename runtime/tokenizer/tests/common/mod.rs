//! Makes vocabularies and texts for tests: trained on a book, and random and adversarial strings from a seed.

use perilune_tokenizer::train::{Train, Trained, train};
use perilune_tokenizer::{Config, Tokenizer};
use std::path::Path;

pub const BOOK: &str = include_str!("../../../../recipes/data/alice.txt");

pub fn trained(options: &Train) -> Trained {
    let paragraphs = BOOK.split("\n\n").map(|text| Ok(text.to_string()));
    train(paragraphs, options).expect("a vocabulary")
}

#[allow(dead_code)]
pub fn load(json: &str) -> Tokenizer {
    Tokenizer::from_json(Path::new("tokenizer.json"), json.as_bytes(), Config::default()).expect("a tokenizer")
}

/// The number of random texts: `PERILUNE_FUZZ_COUNT`, or 400.
#[allow(dead_code)]
pub fn count() -> u64 {
    std::env::var("PERILUNE_FUZZ_COUNT").ok().and_then(|n| n.parse().ok()).unwrap_or(400)
}

/// SplitMix64.
#[allow(dead_code)]
pub struct Random(pub u64);

#[allow(dead_code)]
impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// A text of pieces where scanners can go wrong: contractions, runs of spaces and breaks, digits, marks, specials.
    pub fn text(&mut self, specials: &[&str]) -> String {
        const PIECES: [&str; 40] = [
            " ",
            "  ",
            "   ",
            "\n",
            "\r\n",
            "\n\n",
            "\t",
            " \n ",
            "\u{a0}",
            "\u{3000}",
            "\u{85}",
            "'",
            "'s",
            "'S",
            "'ll",
            "'LL",
            "'re",
            "'Ve",
            "'ſ",
            "'t",
            "don't",
            "1",
            "12",
            "1234567",
            "Ⅷ",
            "½",
            "٣",
            "é",
            "e\u{301}",
            "\u{301}",
            "漢字",
            "かな",
            "🙂",
            "👩\u{200d}👧",
            "<|",
            "...",
            "!?",
            "_",
            "ﬁ",
            "\u{200b}",
        ];
        let mut text = String::new();
        for _ in 0..self.below(24) {
            match self.below(10) {
                0..=3 => text.push_str(PIECES[self.below(PIECES.len())]),
                4 | 5 => {
                    let start = self.below(BOOK.len() - 40);
                    let start = (start..).find(|at| BOOK.is_char_boundary(*at)).unwrap_or(0);
                    let len = self.below(30);
                    text.extend(BOOK[start..].chars().take(len));
                }
                6 => text.extend((0..1 + self.below(6)).map(|_| (b'a' + self.below(4) as u8) as char)),
                7 => text.extend(char::from_u32(self.below(0x11_0000) as u32)),
                8 => text.extend(char::from_u32(self.below(0x3000) as u32)),
                _ => match specials {
                    [] => text.extend(std::iter::repeat_n('a', self.below(300))),
                    _ => text.push_str(specials[self.below(specials.len())]),
                },
            }
        }
        text
    }
}
