//! Splits text into pre-tokens as the regular expressions of GPT-2, Llama 3 and Qwen 2 do, by hand-written scanners.
//!
//! A scanner takes the alternatives of its expression in their order. What an alternative that backtracks would take is computed
//! directly: `\s+(?!\S)` takes a run of white space without its last character, unless the run ends the text; `\s*[\r\n]+` takes
//! a run of white space up to its last line break. Every character belongs to an alternative, so the pre-tokens cover the text.

use super::classes::{CLASSES, Classes, Kind};

/// An expression that has a scanner.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pattern {
    Gpt2,
    Llama3,
    Qwen2,
}

pub const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
pub const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
pub const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

impl Pattern {
    pub const ALL: [(&'static str, Pattern); 3] =
        [("gpt2", Pattern::Gpt2), ("llama3", Pattern::Llama3), ("qwen2", Pattern::Qwen2)];

    pub fn parse(name: &str) -> Option<Pattern> {
        Pattern::ALL.into_iter().find(|(known, _)| *known == name).map(|(_, pattern)| pattern)
    }

    /// The pattern of an expression as it stands in `tokenizer.json`.
    pub fn of(expression: &str) -> Option<Pattern> {
        Pattern::ALL.into_iter().map(|(_, pattern)| pattern).find(|p| p.expression() == expression)
    }

    pub fn expression(self) -> &'static str {
        match self {
            Pattern::Gpt2 => GPT2,
            Pattern::Llama3 => LLAMA3,
            Pattern::Qwen2 => QWEN2,
        }
    }
}

/// A position in a text, with the classes at hand.
struct Scanner<'a> {
    text: &'a str,
    bytes: &'a [u8],
    classes: &'static Classes,
}

impl Scanner<'_> {
    /// The class and the length in bytes of the character at a position; `None` at the end.
    #[inline(always)]
    fn at(&self, at: usize) -> Option<(Kind, usize)> {
        let byte = *self.bytes.get(at)?;
        if byte < 128 {
            return Some((self.classes.ascii[usize::from(byte)], 1));
        }
        self.text.get(at..)?.chars().next().map(|c| (self.classes.of(c), c.len_utf8()))
    }

    #[inline(always)]
    fn kind(&self, at: usize) -> Option<Kind> {
        self.at(at).map(|(kind, _)| kind)
    }

    /// The end of the run of characters of a class from a position on.
    #[inline(always)]
    fn run(&self, mut at: usize, kind: Kind) -> usize {
        while let Some((found, len)) = self.at(at) {
            if found != kind {
                break;
            }
            at += len;
        }
        at
    }

    /// The end of `'s|'t|'re|'ve|'m|'ll|'d` at an apostrophe, in the order of the expression.
    fn contraction(&self, at: usize, any_case: bool) -> Option<usize> {
        let fold = |byte: u8| if any_case { byte.to_ascii_lowercase() } else { byte };
        let first = fold(*self.bytes.get(at + 1)?);
        match (first, self.bytes.get(at + 2).map(|b| fold(*b))) {
            (b's' | b't' | b'm' | b'd', _) => Some(at + 2),
            (b'r' | b'v', Some(b'e')) | (b'l', Some(b'l')) => Some(at + 3),
            // The long s folds to s: the expression ignores case as Unicode does.
            (0xc5, Some(_)) if any_case && self.bytes[at + 2] == 0xbf => Some(at + 3),
            _ => None,
        }
    }

    /// The end of a run of white space: `\s+(?!\S)|\s+`.
    fn space(&self, at: usize) -> usize {
        let (mut end, mut last) = (at, at);
        while let Some((kind, len)) = self.at(end) {
            if !kind.is_space() {
                return if last > at { last } else { end };
            }
            last = end;
            end += len;
        }
        end
    }

    fn gpt2(&self, at: usize, kind: Kind) -> usize {
        let byte = self.bytes[at];
        if byte == b'\''
            && let Some(end) = self.contraction(at, false)
        {
            return end;
        }
        let (first, kind) = match byte {
            b' ' => match self.kind(at + 1) {
                Some(kind) if !kind.is_space() => (at + 1, kind),
                _ => return self.space(at),
            },
            _ => (at, kind),
        };
        if kind.is_space() { self.space(at) } else { self.run(first, kind) }
    }

    /// Llama 3 takes up to three numbers (`numbers`), Qwen 2 one.
    fn llama3(&self, at: usize, kind: Kind, len: usize, numbers: usize) -> usize {
        let byte = self.bytes[at];
        if byte == b'\''
            && let Some(end) = self.contraction(at, true)
        {
            return end;
        }
        match kind {
            Kind::Letter => return self.run(at + len, Kind::Letter),
            Kind::Number => {
                let mut end = at + len;
                for _ in 1..numbers {
                    match self.at(end) {
                        Some((Kind::Number, len)) => end += len,
                        _ => break,
                    }
                }
                return end;
            }
            Kind::Space | Kind::Other if self.kind(at + len) == Some(Kind::Letter) => {
                return self.run(at + len, Kind::Letter);
            }
            _ => {}
        }
        let punctuation = match byte {
            b' ' if self.kind(at + 1) == Some(Kind::Other) => Some(at + 1),
            _ if kind == Kind::Other => Some(at),
            _ => None,
        };
        if let Some(first) = punctuation {
            let end = self.run(first, Kind::Other);
            return self.run(end, Kind::Newline);
        }
        // A run of white space, up to its last line break if it has one.
        let (mut end, mut after_break) = (at, None);
        while let Some((kind, len)) = self.at(end).filter(|(kind, _)| kind.is_space()) {
            end += len;
            if kind == Kind::Newline {
                after_break = Some(end);
            }
        }
        after_break.unwrap_or_else(|| self.space(at))
    }
}

/// Calls `each` with the pre-tokens of a text, in order.
#[inline(always)]
pub fn split<'a>(pattern: Pattern, text: &'a str, mut each: impl FnMut(&'a [u8])) {
    let scanner = Scanner { text, bytes: text.as_bytes(), classes: &CLASSES };
    let mut at = 0;
    while let Some((kind, len)) = scanner.at(at) {
        let end = match pattern {
            Pattern::Gpt2 => scanner.gpt2(at, kind),
            Pattern::Llama3 => scanner.llama3(at, kind, len, 3),
            Pattern::Qwen2 => scanner.llama3(at, kind, len, 1),
        };
        each(&scanner.bytes[at..end]);
        at = end;
    }
}
