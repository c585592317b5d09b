//! Splits Lua text into tokens with positions, for colours, completion and the structure of a line. It never fails: an unfinished
//! string or comment is a token that is marked as open.

/// The kind of a token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Name,
    Keyword,
    Number,
    /// A string in quotes or long brackets; an `open` one extends to the end of the text.
    String {
        open: bool,
    },
    Comment,
    Symbol,
}

/// A token: bytes `start..end` of the text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Token {
    pub kind: Kind,
    pub start: usize,
    pub end: usize,
}

pub const KEYWORDS: [&str; 22] = [
    "and", "break", "do", "else", "elseif", "end", "false", "for", "function", "goto", "if", "in", "local", "nil",
    "not", "or", "repeat", "return", "then", "true", "until", "while",
];

/// Returns the tokens of a text, in order, without white space.
pub fn tokens(text: &str) -> Vec<Token> {
    let b = text.as_bytes();
    let mut out = Vec::new();
    let mut at = 0;
    while at < b.len() {
        let start = at;
        let (kind, end) = match b[at] {
            c if c.is_ascii_whitespace() => {
                at += 1;
                continue;
            }
            b'-' if b.get(at + 1) == Some(&b'-') => {
                let (end, _) = match long_bracket(b, at + 2) {
                    Some(found) => found,
                    None => (b[at..].iter().position(|c| *c == b'\n').map_or(b.len(), |n| at + n), false),
                };
                (Kind::Comment, end)
            }
            b'[' if long_bracket(b, at).is_some() => {
                let (end, open) = long_bracket(b, at).unwrap_or((b.len(), true));
                (Kind::String { open }, end)
            }
            quote @ (b'"' | b'\'') => {
                let (end, open) = quoted(b, at + 1, quote);
                (Kind::String { open }, end)
            }
            c if c.is_ascii_digit() || (c == b'.' && b.get(at + 1).is_some_and(u8::is_ascii_digit)) => {
                (Kind::Number, number(b, at))
            }
            c if is_name(c) => {
                let end = b[at..].iter().position(|c| !is_name(*c)).map_or(b.len(), |n| at + n);
                let word = &text[start..end];
                (if KEYWORDS.contains(&word) { Kind::Keyword } else { Kind::Name }, end)
            }
            _ => {
                let long = ["...", "..", "==", "~=", "<=", ">=", "//", "::", "<<", ">>"];
                let end = long
                    .iter()
                    .find(|s| text[at..].starts_with(**s))
                    .map_or_else(|| at + text[at..].chars().next().map_or(1, char::len_utf8), |s| at + s.len());
                (Kind::Symbol, end)
            }
        };
        out.push(Token { kind, start, end });
        at = end;
    }
    out
}

/// Returns whether a character may be part of a name; all of Unicode, so that a word stays one token.
fn is_name(c: u8) -> bool {
    c.is_ascii_alphanumeric() || c == b'_' || c >= 0x80
}

/// Returns the end of `[==[ … ]==]` that begins at `at`, and whether its closing bracket is missing.
fn long_bracket(b: &[u8], at: usize) -> Option<(usize, bool)> {
    if b.get(at) != Some(&b'[') {
        return None;
    }
    let level = b[at + 1..].iter().take_while(|c| **c == b'=').count();
    if b.get(at + 1 + level) != Some(&b'[') {
        return None;
    }
    let close: Vec<u8> = [b"]".as_slice(), &vec![b'='; level], b"]"].concat();
    let from = at + level + 2;
    match b[from..].windows(close.len()).position(|w| w == close) {
        Some(n) => Some((from + n + close.len(), false)),
        None => Some((b.len(), true)),
    }
}

/// Returns the end of a quoted string; a line end leaves it open.
fn quoted(b: &[u8], mut at: usize, quote: u8) -> (usize, bool) {
    while at < b.len() {
        match b[at] {
            b'\\' => at += 1,
            b'\n' => return (at, true),
            c if c == quote => return (at + 1, false),
            _ => {}
        }
        at += 1;
    }
    (b.len(), true)
}

fn number(b: &[u8], start: usize) -> usize {
    let hex = b[start] == b'0' && matches!(b.get(start + 1), Some(b'x' | b'X'));
    let mut at = start;
    while let Some(&c) = b.get(at) {
        let sign = matches!(c, b'+' | b'-') && {
            let before = b[at - usize::from(at > start)].to_ascii_lowercase();
            at > start && before == if hex { b'p' } else { b'e' }
        };
        // `1..2` is two numbers and a concatenation.
        let dots = c == b'.' && b.get(at + 1) == Some(&b'.');
        if dots || !(c.is_ascii_alphanumeric() || c == b'.' || sign) {
            break;
        }
        at += 1;
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<&str> {
        tokens(text).iter().map(|t| &text[t.start..t.end]).collect()
    }

    #[test]
    fn words_of_a_line() {
        assert_eq!(
            words("x = pl.randn({2, 3}); x"),
            ["x", "=", "pl", ".", "randn", "(", "{", "2", ",", "3", "}", ")", ";", "x"]
        );
        assert_eq!(words("a..b...c 1e-3 0xAp+2 1..2"), ["a", "..", "b", "...", "c", "1e-3", "0xAp+2", "1", "..", "2"]);
        assert_eq!(words("s = 'a\\'b' .. [==[x]]]==] -- end"), ["s", "=", "'a\\'b'", "..", "[==[x]]]==]", "-- end"]);
        assert_eq!(words("größe ~= 3"), ["größe", "~=", "3"]);
    }

    #[test]
    fn what_is_open_says_so() {
        assert_eq!(tokens("'abc").last().map(|t| t.kind), Some(Kind::String { open: true }));
        assert_eq!(tokens("[[abc").last().map(|t| t.kind), Some(Kind::String { open: true }));
        assert_eq!(tokens("'abc'").last().map(|t| t.kind), Some(Kind::String { open: false }));
        assert_eq!(tokens("--[[ a\nb").last().map(|t| (t.kind, t.end)), Some((Kind::Comment, 8)));
        for text in ["", "\\", "'\\", "[=", "0x", ".", "é", "\u{1F600}("] {
            let found = tokens(text);
            assert!(found.iter().all(|t| t.end <= text.len() && t.start < t.end), "{text}: {found:?}");
        }
    }
}
