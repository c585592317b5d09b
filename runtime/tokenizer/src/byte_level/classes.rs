//! Classifies characters for pre-token scanners: letters (`\p{L}`), numbers (`\p{N}`), white space (`\s`), all others.
//!
//! The ranges come from `regex-syntax`, the crate that defines the classes of the regular expressions which a scanner replaces.
//! A table of 256-character pages, shared where they are equal, takes about 40 kB.

use regex_syntax::hir::{Class, HirKind};
use std::sync::LazyLock;

/// The class of a character.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kind {
    Other = 0,
    Letter = 1,
    Number = 2,
    /// White space but the two below.
    Space = 3,
    /// Carriage return and line feed.
    Newline = 4,
}

impl Kind {
    pub fn is_space(self) -> bool {
        matches!(self, Kind::Space | Kind::Newline)
    }
}

#[derive(Debug)]
pub struct Classes {
    pages: Vec<u16>,
    kinds: Vec<[Kind; 256]>,
    /// The first page again, for ASCII.
    pub ascii: [Kind; 128],
}

/// The classes of all characters.
pub static CLASSES: LazyLock<Classes> = LazyLock::new(Classes::new);

impl Classes {
    fn new() -> Classes {
        let mut all = vec![Kind::Other; 0x11_0000];
        for (pattern, kind) in [(r"\p{L}", Kind::Letter), (r"\p{N}", Kind::Number), (r"\s", Kind::Space)] {
            for (first, last) in ranges(pattern) {
                all[first as usize..=last as usize].fill(kind);
            }
        }
        all['\r' as usize] = Kind::Newline;
        all['\n' as usize] = Kind::Newline;
        let (mut pages, mut kinds): (Vec<u16>, Vec<[Kind; 256]>) = (Vec::new(), Vec::new());
        for page in all.chunks_exact(256) {
            let mut one = [Kind::Other; 256];
            one.copy_from_slice(page);
            let at = kinds.iter().position(|k| *k == one).unwrap_or_else(|| {
                kinds.push(one);
                kinds.len() - 1
            });
            pages.push(at as u16);
        }
        let mut ascii = [Kind::Other; 128];
        ascii.copy_from_slice(&all[..128]);
        Classes { pages, kinds, ascii }
    }

    pub fn of(&self, c: char) -> Kind {
        let code = c as usize;
        self.kinds[usize::from(self.pages[code >> 8])][code & 255]
    }
}

/// The ranges of a class of `regex-syntax`; empty for a pattern that is none.
fn ranges(pattern: &str) -> Vec<(char, char)> {
    let parsed = regex_syntax::parse(pattern).map(|hir| hir.into_kind());
    match parsed {
        Ok(HirKind::Class(Class::Unicode(class))) => class.iter().map(|r| (r.start(), r.end())).collect(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_those_of_the_standard_library_for_known_characters() {
        let known =
            [('a', Kind::Letter), ('Ω', Kind::Letter), ('漢', Kind::Letter), ('7', Kind::Number), ('Ⅷ', Kind::Number)];
        for (c, kind) in known {
            assert_eq!(CLASSES.of(c), kind, "{c}");
        }
        for (c, kind) in [
            ('\n', Kind::Newline),
            ('\u{a0}', Kind::Space),
            ('\u{85}', Kind::Space),
            ('!', Kind::Other),
            ('\u{301}', Kind::Other),
        ] {
            assert_eq!(CLASSES.of(c), kind, "{c:?}");
        }
        for c in (0..0x11_0000).filter_map(char::from_u32) {
            assert_eq!(CLASSES.of(c).is_space(), c.is_whitespace(), "{c:?}");
        }
    }
}
