//! Splits PTX into tokens, without comments (PTX ISA, "Source Format" and "Comments").
//!
//! The rewritten module is printed from these tokens, so the assembler reads what the rewriter has read: text that hides in a comment
//! or a string for one of them does so for both.

/// A token of PTX.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Token<'a> {
    /// A word with its dots (`ld.global.f32`, `%r1`, `$L_2`, `0f3F800000`), a string with its quotes, or one punctuation mark.
    pub text: &'a str,
    /// Whether white space or a comment is in front of it.
    pub is_spaced: bool,
}

impl Token<'_> {
    /// Whether it is a word: a name, directive, opcode or number.
    pub fn is_word(&self) -> bool {
        self.text.bytes().next().is_some_and(is_word)
    }
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"_$%.".contains(&byte)
}

/// Splits a text into tokens. An error names what the rewriter does not read.
pub fn tokens(text: &str) -> Result<Vec<Token<'_>>, String> {
    let bytes = text.as_bytes();
    let (mut at, mut out, mut is_spaced) = (0, Vec::new(), true);
    while let Some(&byte) = bytes.get(at) {
        let rest = &bytes[at..];
        let start = at;
        if byte.is_ascii_whitespace() || byte == 0 {
            at += 1;
        } else if rest.starts_with(b"//") {
            at += rest.iter().position(|b| *b == b'\n').unwrap_or(rest.len());
        } else if rest.starts_with(b"/*") {
            let end = text[at + 2..].find("*/").ok_or("a comment has no end")?;
            at += end + 4;
        } else {
            at = match byte {
                b'"' => {
                    let inside = &bytes[at + 1..];
                    let end = inside.iter().position(|b| *b == b'"').ok_or("a string has no end")?;
                    if inside[..end].iter().any(|b| matches!(b, b'\\' | b'\n') || !(b' '..=b'~').contains(b)) {
                        return Err("a string has a character that is not plain".into());
                    }
                    at + end + 2
                }
                _ if is_word(byte) => word_end(bytes, at),
                b'#' | b'\\' | b'\'' | b'`' => return Err(format!("it has the character {}", char::from(byte))),
                _ if byte.is_ascii_graphic() => at + 1,
                _ => return Err("it has a character that is not ASCII".into()),
            };
            out.push(Token { text: &text[start..at], is_spaced });
            is_spaced = false;
            continue;
        }
        is_spaced = true;
    }
    Ok(out)
}

/// The end of the word at `at`. Two colons belong to it, as in `shared::cta`; one ends a label.
fn word_end(bytes: &[u8], mut at: usize) -> usize {
    loop {
        match bytes.get(at..) {
            Some([b, ..]) if is_word(*b) => at += 1,
            Some([b':', b':', b, ..]) if is_word(*b) => at += 2,
            _ => return at,
        }
    }
}

/// Prints tokens, spaced as they were.
pub fn print(tokens: &[Token]) -> String {
    let mut out = String::new();
    for (k, token) in tokens.iter().enumerate() {
        if k > 0 && token.is_spaced {
            out.push(' ');
        }
        out.push_str(token.text);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_have_dots_and_comments_are_left_out() {
        let text = "@!%p1 ld.global.L2::128B.v2.f32 {%f1,%f2}, [%rd1+-16]; // st.global\n$L_1: /* \" ; */ ret;";
        let list = tokens(text).unwrap();
        let words: Vec<&str> = list.iter().map(|t| t.text).collect();
        assert_eq!(words[..4], ["@", "!", "%p1", "ld.global.L2::128B.v2.f32"]);
        assert!(words.ends_with(&[";", "$L_1", ":", "ret", ";"]));
        assert_eq!(print(&list), "@!%p1 ld.global.L2::128B.v2.f32 {%f1,%f2}, [%rd1+-16]; $L_1: ret;");
    }

    #[test]
    fn what_could_be_read_in_two_ways_is_refused() {
        for text in ["/* open", "\"open", "\"a\\\"b\"", "# 1 \"x\"", "ret; é", "'a'"] {
            assert!(tokens(text).is_err(), "{text}");
        }
        assert_eq!(tokens("").unwrap(), []);
    }
}
