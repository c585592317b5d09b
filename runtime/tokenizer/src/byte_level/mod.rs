//! Encodes byte-level BPE without the `tokenizers` crate, where the result is the same by construction.
//!
//! The fast path takes a model whose pre-tokenizer is one of the [`scan::Pattern`]s, whose merges act on bytes, and whose
//! normaliser is none, or NFC on text that NFC does not change. Scanners replace the regular expression, and a table of words, a
//! cache of a thread and a merge without strings replace the model. Everything else is left to the crate, which the tests compare
//! it with.

mod classes;
mod merge;
mod nfc;
pub mod scan;

use merge::{Merges, Scratch};
pub(crate) use nfc::is_surely_nfc;
use rustc_hash::FxHashMap;
use scan::Pattern;
use serde_json::Value;
use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};

/// Words that the cache of a thread holds at most; it begins anew beyond.
const CACHED: usize = 1 << 16;
/// Longer words are not cached.
const CACHED_BYTES: usize = 64;

/// A byte-level BPE model.
#[derive(Debug)]
pub(crate) struct ByteLevel {
    /// Distinguishes the caches of models.
    number: u64,
    pattern: Pattern,
    pub nfc: bool,
    merges: Merges,
    /// Words that are one token.
    words: FxHashMap<Box<[u8]>, u32>,
    /// Bytes of each id; 0 for one that the model does not make.
    lens: Vec<u32>,
}

static MODELS: AtomicU64 = AtomicU64::new(1);

#[derive(Default)]
struct Cache {
    model: u64,
    words: FxHashMap<Box<[u8]>, (u32, u32)>,
    ids: Vec<u32>,
    scratch: Scratch,
}

thread_local! {
    static CACHE: RefCell<Cache> = RefCell::default();
}

/// The byte for each character of the byte-level alphabet of GPT-2: printable bytes are themselves, the others follow from U+0100.
pub(crate) fn byte_of(c: char) -> Option<u8> {
    match c as u32 {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => Some(code as u8),
        code @ 0x100..=0x120 => Some((code - 0x100) as u8),
        code @ 0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}

fn bytes_of(token: &str) -> Option<Vec<u8>> {
    token.chars().map(byte_of).collect()
}

impl ByteLevel {
    /// Makes the model that a `tokenizer.json` describes, or `None` if the fast path does not cover it.
    pub fn of(json: &Value) -> Option<ByteLevel> {
        let nfc = match &json["normalizer"] {
            Value::Null => false,
            one if one["type"] == "NFC" => true,
            _ => return None,
        };
        let pattern = pattern_of(&json["pre_tokenizer"])?;
        let model = &json["model"];
        let unset = |name: &str| match &model[name] {
            Value::Null | Value::Bool(false) => true,
            Value::String(text) => text.is_empty(),
            _ => false,
        };
        let plain = ["dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"].map(unset);
        if model["type"] != "BPE" || plain.contains(&false) {
            return None;
        }
        let mut vocab: FxHashMap<&str, u32> = FxHashMap::default();
        let (mut bytes, mut seen, mut most) = (vec![None; 256], rustc_hash::FxHashSet::default(), 0);
        for (token, id) in model["vocab"].as_object()? {
            let id = u32::try_from(id.as_u64()?).ok()?;
            // Two tokens of one id would make a merge ambiguous.
            if !seen.insert(id) {
                return None;
            }
            most = most.max(id);
            vocab.insert(token, id);
            if let Some([byte]) = bytes_of(token).as_deref() {
                bytes[usize::from(*byte)] = Some(id);
            }
        }
        let bytes: Vec<u32> = bytes.into_iter().collect::<Option<_>>()?;
        if most as usize > 64 * vocab.len() {
            return None;
        }
        let mut pairs = FxHashMap::default();
        for (rank, merge) in model["merges"].as_array()?.iter().enumerate() {
            let (a, b) = match merge {
                Value::String(line) => line.split_once(' ')?,
                Value::Array(two) => match two.as_slice() {
                    [a, b] => (a.as_str()?, b.as_str()?),
                    _ => return None,
                },
                _ => return None,
            };
            let merged = *vocab.get(format!("{a}{b}").as_str())?;
            pairs.insert(Merges::pair(*vocab.get(a)?, *vocab.get(b)?), (rank as u32, merged));
        }
        let merges = Merges::new(bytes, pairs);
        let (mut words, mut lens) = (FxHashMap::default(), vec![0; most as usize + 1]);
        let ignore_merges = model["ignore_merges"] == true;
        let (mut scratch, mut made) = (Scratch::default(), Vec::new());
        for (token, id) in &vocab {
            let Some(word) = bytes_of(token).filter(|w| !w.is_empty()) else { continue };
            lens[*id as usize] = word.len() as u32;
            made.clear();
            if !ignore_merges {
                merges.merge(&word, &mut scratch, &mut made);
            }
            if ignore_merges || made == [*id] {
                words.insert(word.into_boxed_slice(), *id);
            }
        }
        let number = MODELS.fetch_add(1, Ordering::Relaxed);
        Some(ByteLevel { number, pattern, nfc, merges, words, lens })
    }

    /// Appends the ids of a text without added tokens.
    pub fn encode(&self, text: &str, to: &mut Vec<u32>) {
        CACHE.with_borrow_mut(|cache| {
            if cache.model != self.number {
                *cache = Cache { model: self.number, ..Cache::default() };
            }
            match self.pattern {
                Pattern::Gpt2 => scan::split(Pattern::Gpt2, text, |word| self.word(word, cache, to)),
                Pattern::Llama3 => scan::split(Pattern::Llama3, text, |word| self.word(word, cache, to)),
                Pattern::Qwen2 => scan::split(Pattern::Qwen2, text, |word| self.word(word, cache, to)),
            }
        });
    }

    #[inline(always)]
    fn word(&self, word: &[u8], cache: &mut Cache, to: &mut Vec<u32>) {
        match self.words.get(word) {
            Some(id) => to.push(*id),
            None => self.merged(word, cache, to),
        }
    }

    fn merged(&self, word: &[u8], cache: &mut Cache, to: &mut Vec<u32>) {
        if let Some((first, count)) = cache.words.get(word) {
            to.extend_from_slice(&cache.ids[*first as usize..(*first + *count) as usize]);
            return;
        }
        let before = to.len();
        self.merges.merge(word, &mut cache.scratch, to);
        if word.len() <= CACHED_BYTES {
            if cache.words.len() >= CACHED {
                cache.words.clear();
                cache.ids.clear();
            }
            let first = cache.ids.len() as u32;
            cache.ids.extend_from_slice(&to[before..]);
            cache.words.insert(word.into(), (first, (to.len() - before) as u32));
        }
    }

    /// Bytes that an id of [`ByteLevel::encode`] stands for.
    pub fn len_of(&self, id: u32) -> usize {
        self.lens.get(id as usize).map_or(0, |len| *len as usize)
    }
}

/// The pattern of a pre-tokenizer: ByteLevel with its own expression, or a Split by a known one and ByteLevel without.
fn pattern_of(pre: &Value) -> Option<Pattern> {
    let byte_level = |one: &Value, regex: bool| {
        // `use_regex` is true by default.
        one["type"] == "ByteLevel"
            && one["add_prefix_space"] == false
            && one["use_regex"].as_bool().unwrap_or(true) == regex
    };
    if byte_level(pre, true) {
        return Some(Pattern::Gpt2);
    }
    match pre["pretokenizers"].as_array().filter(|_| pre["type"] == "Sequence").map(Vec::as_slice) {
        Some([split, last]) if byte_level(last, false) => {
            let whole = split["type"] == "Split" && split["behavior"] == "Isolated" && split["invert"] == false;
            Pattern::of(split["pattern"]["Regex"].as_str().filter(|_| whole)?)
        }
        Some([one]) if byte_level(one, true) => Some(Pattern::Gpt2),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_has_each_byte_once() {
        let mut seen = [false; 256];
        for byte in (0..0x200).filter_map(char::from_u32).filter_map(byte_of) {
            assert!(!std::mem::replace(&mut seen[usize::from(byte)], true), "{byte}");
        }
        assert_eq!(seen, [true; 256]);
        assert_eq!((byte_of('Ġ'), byte_of('Ċ'), byte_of('a')), (Some(b' '), Some(b'\n'), Some(b'a')));
    }
}
