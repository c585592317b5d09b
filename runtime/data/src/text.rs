//! Reads plain text for character models, and maps characters to ids and back.
//!
//! The vocabulary is the sorted set of a text's characters (Unicode scalar values), so the same text always gives the
//! same ids. Text is unchanged except for a byte order mark, which is dropped. Not supported:
//! sub-word tokenizers.

use crate::csv::check_code_dtype;
use crate::error::{Error, Result, quote};
use crate::gzip_text;
use perilune_core::host_tensor::push_i64;
use perilune_core::{DType, HostTensor, Shape};
use perilune_policy::Opened;
use std::io::Read;

/// The default limit of unpacked text in bytes for `read`.
pub const MAX_BYTES: u64 = 1 << 32;

/// Reads a UTF-8 file, plain or gzipped, of at most `max_bytes` of text: by default [`MAX_BYTES`], of a compressed file 25 times its
/// size, or 32 MiB if that is more.
pub fn read(file: Opened, max_bytes: Option<u64>) -> Result<String> {
    let mut bytes = Vec::new();
    let gzip_text::Text { path, mut source, .. } = gzip_text::open(file, max_bytes, MAX_BYTES, gzip_text::PROSE)?;
    source.read_to_end(&mut bytes).map_err(|e| gzip_text::read_error(&path, e))?;
    if bytes.starts_with(b"\xef\xbb\xbf") {
        bytes.drain(..3);
    }
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        let line = 1 + e.as_bytes()[..at].iter().filter(|&&b| b == b'\n').count() as u64;
        let rule = format!("byte {at} of the text ({:#04x}) is not UTF-8", e.as_bytes()[at]);
        Error::line(&path, line, "", rule).hint("save the file as UTF-8 (iconv -f latin1 -t utf-8)")
    })
}

/// Characters and their ids, the positions in sorted order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Vocabulary {
    chars: Vec<char>,
}

impl Vocabulary {
    /// Collects the characters of `text`. A vocabulary stored as the text of its characters gives the same vocabulary.
    pub fn of(text: &str) -> Vocabulary {
        // A bitmap of all scalar values takes 136 KB and is faster than sorting a book.
        let mut seen = vec![0u64; (char::MAX as usize + 64) / 64];
        for c in text.chars() {
            seen[c as usize / 64] |= 1 << (c as usize % 64);
        }
        let bits = |word: usize| (0..64u32).map(move |bit| (word as u32) * 64 + bit);
        let set = |code: &u32| seen[*code as usize / 64] >> (code % 64) & 1 == 1;
        let words = seen.iter().enumerate().filter(|(_, w)| **w != 0).map(|(i, _)| i);
        Vocabulary { chars: words.flat_map(bits).filter(set).filter_map(char::from_u32).collect() }
    }

    pub fn len(&self) -> usize {
        self.chars.len()
    }

    pub fn is_empty(&self) -> bool {
        self.chars.is_empty()
    }

    /// Returns all characters in the order of their ids; `Vocabulary::of` inverts it.
    pub fn chars(&self) -> String {
        self.chars.iter().collect()
    }

    pub fn id(&self, c: char) -> Option<usize> {
        self.chars.binary_search(&c).ok()
    }

    /// Encodes `text` as ids, shape {characters}; `dtype` is i64, i32 or u8.
    pub fn encode(&self, text: &str, dtype: DType) -> Result<HostTensor> {
        let fits = check_code_dtype(dtype, self.len());
        fits.map_err(|rule| Error::argument(format!("vocabulary of {} characters", self.len()), rule))?;
        let mut ascii = [None; 128];
        for (c, slot) in (0u8..).zip(&mut ascii) {
            *slot = self.id(char::from(c));
        }
        let mut bytes = Vec::with_capacity(text.len() * dtype.size());
        let mut count = 0;
        for c in text.chars() {
            let id = match ascii.get(c as usize) {
                Some(id) => *id,
                None => self.id(c),
            };
            let Some(id) = id else {
                return Err(self.unknown(text, count, c));
            };
            push_i64(dtype, id as i64, &mut bytes);
            count += 1;
        }
        let shape = Shape::new(&[count]).map_err(|e| Error::argument("text", e.message))?;
        Ok(HostTensor::new(dtype, shape, bytes))
    }

    /// Decodes `ids` of any shape, in row-major order.
    pub fn decode(&self, ids: &HostTensor) -> Result<String> {
        if !ids.dtype.is_int() {
            return Err(Error::argument("ids to decode", format!("are i64, i32 or u8, not {}", ids.dtype)));
        }
        let mut out = String::with_capacity(ids.numel());
        for i in 0..ids.numel() {
            let id = ids.get_i64(i);
            match usize::try_from(id).ok().and_then(|id| self.chars.get(id)) {
                Some(&c) => out.push(c),
                None => {
                    let rule =
                        format!("element {i} is {id}, but the vocabulary has ids 0 to {}", self.len() as i64 - 1);
                    return Err(Error::argument("ids to decode", rule));
                }
            }
        }
        Ok(out)
    }

    fn unknown(&self, text: &str, at: usize, c: char) -> Error {
        let line = 1 + text.chars().take(at).filter(|&c| c == '\n').count();
        let rule = format!(
            "character {at} (line {line}) is {}, which is not in the vocabulary of {} characters",
            quote(&c.to_string()),
            self.len()
        );
        Error::argument("text to encode", rule).hint("build the vocabulary from a text that has it, or leave it out")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::named::open;
    use std::path::Path;

    #[test]
    fn ids_round_trip() -> Result<()> {
        let text = "héllo, wörld\n日本\u{10ffff}";
        let v = Vocabulary::of(text);
        assert_eq!(v.chars(), "\n ,dhlorwéö日本\u{10ffff}");
        assert_eq!(Vocabulary::of(&v.chars()), v);
        for dtype in [DType::I64, DType::I32, DType::U8] {
            let ids = v.encode(text, dtype)?;
            assert_eq!(ids.shape.dims(), &[text.chars().count()]);
            assert_eq!(v.decode(&ids)?, text);
        }
        assert_eq!(Vocabulary::of("cabac").encode("abc", DType::I64)?.to_i64(), [0, 1, 2]);
        assert!(Vocabulary::of("").is_empty());
        Ok(())
    }

    #[test]
    fn what_does_not_fit_is_named() -> Result<()> {
        let v = Vocabulary::of("ab\n");
        let message = v.encode("ab\nax", DType::I64).map_err(|e| e.to_string()).expect_err("unknown");
        assert!(message.contains("character 4 (line 2) is 'x'") && message.contains("of 3"), "{message}");
        let message = v.decode(&HostTensor::from_i64(Shape::of(&[2]), &[0, 3])).map_err(|e| e.to_string());
        assert!(message.is_err_and(|m| m.contains("element 1 is 3") && m.contains("0 to 2")));
        assert!(v.decode(&HostTensor::from_i64(Shape::of(&[1]), &[-1])).is_err());
        assert!(v.decode(&HostTensor::from_f32(Shape::of(&[1]), &[0.0])).is_err());
        assert!(v.encode("a", DType::F32).is_err());
        let many = Vocabulary::of(&(0..300u32).filter_map(char::from_u32).collect::<String>());
        assert!(many.encode("a", DType::U8).is_err() && many.encode("a", DType::I32).is_ok());
        Ok(())
    }

    #[test]
    fn files() -> Result<()> {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("t.txt");
        std::fs::write(&path, "\u{feff}a\r\nü").expect("write");
        assert_eq!(read(open(&path)?, None)?, "a\r\nü");
        std::fs::write(&path, b"ab\ncd\xfc").expect("write");
        let message = read(open(&path)?, None).map_err(|e| e.to_string()).expect_err("latin1");
        assert!(message.contains("t.txt:2: byte 5 of the text (0xfc)"), "{message}");
        let alice = read(open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/data/alice.txt"))?, None)?;
        let v = Vocabulary::of(&alice);
        assert_eq!((alice.len(), v.len()), (148_379, 70));
        assert_eq!(v.decode(&v.encode(&alice, DType::U8)?)?, alice);
        Ok(())
    }
}
