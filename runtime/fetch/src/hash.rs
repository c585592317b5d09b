//! Parses content hashes (`sha256:HEX`, `blake3:HEX`) and computes them in a stream.

use crate::error::{Error, Result};
use sha2::Digest;
use std::fmt;

/// A hash function of content.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Algorithm {
    #[default]
    Sha256,
    Blake3,
}

impl Algorithm {
    pub const ALL: [Algorithm; 2] = [Algorithm::Sha256, Algorithm::Blake3];

    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Sha256 => "sha256",
            Algorithm::Blake3 => "blake3",
        }
    }
}

/// The hash of a file's content.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct ContentHash {
    algorithm: &'static str,
    hex: String,
}

impl ContentHash {
    /// Parses `sha256:` or `blake3:` with 64 hexadecimal digits.
    ///
    /// # Errors
    /// Another algorithm, or not 64 hexadecimal digits.
    pub fn parse(text: &str) -> Result<ContentHash> {
        let rule = "write sha256: or blake3: and 64 hexadecimal digits; `perilune fetch ADDRESS` prints the hash";
        let wrong = |why: String| Error::new(format!("the hash {text:?} {why}")).hint(rule);
        let Some((name, hex)) = text.split_once(':') else { return Err(wrong("names no algorithm".into())) };
        let known = Algorithm::ALL.into_iter().find(|a| a.name() == name);
        let algorithm = known.ok_or_else(|| wrong(format!("has the unknown algorithm {name:?}")))?;
        let digits = hex.chars().all(|c| c.is_ascii_hexdigit());
        if hex.len() != 64 || !digits {
            let count = hex.chars().count();
            return Err(wrong(if digits {
                format!("has {count} digits")
            } else {
                "has other characters than digits".into()
            }));
        }
        Ok(ContentHash { algorithm: algorithm.name(), hex: hex.to_ascii_lowercase() })
    }

    pub fn algorithm(&self) -> Algorithm {
        Algorithm::ALL.into_iter().find(|a| a.name() == self.algorithm).unwrap_or_default()
    }

    /// The digits, in lower case.
    pub fn hex(&self) -> &str {
        &self.hex
    }
}

impl fmt::Display for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.algorithm, self.hex)
    }
}

/// Computes a hash of bytes as they come.
pub(crate) enum Hasher {
    Sha256(Box<sha2::Sha256>),
    Blake3(Box<blake3::Hasher>),
}

impl Hasher {
    pub fn new(algorithm: Algorithm) -> Hasher {
        match algorithm {
            Algorithm::Sha256 => Hasher::Sha256(Box::default()),
            Algorithm::Blake3 => Hasher::Blake3(Box::default()),
        }
    }

    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            Hasher::Sha256(h) => h.update(bytes),
            Hasher::Blake3(h) => drop(h.update(bytes)),
        }
    }

    pub fn finish(self) -> ContentHash {
        match self {
            Hasher::Sha256(h) => ContentHash { algorithm: "sha256", hex: hex(&h.finalize()) },
            Hasher::Blake3(h) => ContentHash { algorithm: "blake3", hex: h.finalize().to_hex().to_string() },
        }
    }
}

/// The lower-case hexadecimal digits of bytes.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_digests() {
        // FIPS 180-2, appendix B.1, and the test vectors of BLAKE3 for no input.
        let of = |algorithm, bytes: &[u8]| {
            let mut hasher = Hasher::new(algorithm);
            hasher.update(bytes);
            hasher.finish().to_string()
        };
        let abc = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(of(Algorithm::Sha256, b"abc"), abc);
        assert_eq!(
            ContentHash::parse(&abc.to_uppercase().replace("SHA", "sha")).map(|h| h.to_string()),
            Ok(abc.into())
        );
        let empty = "blake3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262";
        assert_eq!(of(Algorithm::Blake3, b""), empty);
    }

    #[test]
    fn malformed_hashes_name_the_rule() {
        for (text, why) in [
            ("", "no algorithm"),
            ("md5:00", "unknown algorithm"),
            ("sha256:00", "2 digits"),
            ("sha256:é", "other characters"),
        ] {
            let e = ContentHash::parse(text).expect_err("malformed");
            assert!(e.message.contains(why), "{e}");
            assert!(e.hint.is_some_and(|h| h.contains("perilune fetch")));
        }
    }
}
