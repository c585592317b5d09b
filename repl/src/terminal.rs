//! Escapes control characters in text that a recipe, a file or a path may have chosen.
//!
//! A terminal obeys control sequences: they erase lines, rename windows, hide text or paste keys. Everything that is printed or
//! logged passes [`rendered`], which writes control characters and marks of text direction as `\u{1b}`. Newlines and tabs stay.
//! Styles of the program itself carry a token of this process, which a recipe cannot know.

use std::borrow::Cow;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io::{self, Write};
use std::sync::OnceLock;

/// What stands for the beginning of a style, `ESC [`.
fn token() -> &'static str {
    static TOKEN: OnceLock<String> = OnceLock::new();
    TOKEN.get_or_init(|| format!("\u{1b}<{:016x}>", RandomState::new().build_hasher().finish()))
}

/// Whether a terminal would obey the character instead of showing it.
fn is_obeyed(c: char) -> bool {
    let direction =
        matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    (c.is_control() && !matches!(c, '\n' | '\t')) || direction || matches!(c, '\u{2028}' | '\u{2029}')
}

/// The text with control characters written as `\u{1b}`, a carriage return as `\r`.
pub fn escaped(text: &str) -> Cow<'_, str> {
    if !text.contains(is_obeyed) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_obeyed(c) { out.extend(c.escape_default()) } else { out.push(c) }
    }
    Cow::Owned(out)
}

/// The text for one line: newlines and tabs are escaped too.
pub fn one_line(text: &str) -> String {
    escaped(text).replace('\n', "\\n").replace('\t', "\\t")
}

/// The text in a style: `code` is what stands between `ESC [` and `m`.
pub fn styled(code: &str, text: &str) -> String {
    let token = token();
    format!("{token}{code}m{text}{token}0m")
}

/// A drawing of the program's own, whose style sequences are kept; its words have to be escaped before.
pub fn drawn(text: &str) -> String {
    text.replace("\u{1b}[", token())
}

/// What is written to a terminal or a file: everything escaped but the program's own styles.
pub fn rendered(text: &str) -> Cow<'_, str> {
    if !text.contains(token()) {
        return escaped(text);
    }
    let mut parts = text.split(token());
    let mut out = escaped(parts.next().unwrap_or_default()).into_owned();
    for part in parts {
        let digits = part.bytes().take_while(|b| b.is_ascii_digit() || *b == b';').count();
        out.push_str("\u{1b}[");
        out.push_str(&part[..digits]);
        out.push_str(&escaped(&part[digits..]));
    }
    Cow::Owned(out)
}

/// JSON with control characters that JSON allows in strings escaped as `\u009b`.
pub fn json(text: &str) -> Cow<'_, str> {
    // JSON has escaped those below U+0020; outside of strings there is none.
    if !text.contains(is_obeyed) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_obeyed(c) { out.push_str(&format!("\\u{:04x}", c as u32)) } else { out.push(c) }
    }
    Cow::Owned(out)
}

/// A log whose lines are escaped; with colours, the sequences of the formatter are kept.
pub struct EscapedLog<W> {
    pub to: W,
    pub color: bool,
}

impl<W: Write> Write for EscapedLog<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        // The formatter escapes ESC in messages itself, so what is left of it is its own.
        let text = if self.color { Cow::Owned(drawn(&text)) } else { text };
        self.to.write_all(rendered(&text).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recipe_cannot_move_the_cursor() {
        assert_eq!(escaped("a\tb\n"), "a\tb\n");
        assert_eq!(
            escaped("\x1b[2J\x07\r\u{9b}31m\u{202e}\x7f\0"),
            "\\u{1b}[2J\\u{7}\\r\\u{9b}31m\\u{202e}\\u{7f}\\u{0}"
        );
        assert_eq!(one_line("a\nb\x1b"), "a\\nb\\u{1b}");
        let own = format!("{} {}", styled("1", "bold\x1b[0m"), "\x1b[8mhidden");
        assert_eq!(rendered(&own), "\x1b[1mbold\\u{1b}[0m\x1b[0m \\u{1b}[8mhidden");
        assert_eq!(rendered(&drawn("\x1b[38;2;1;2;3m#\x1b[0m")), "\x1b[38;2;1;2;3m#\x1b[0m");
    }

    #[test]
    fn json_stays_json() {
        let text = serde_json::json!({ "a": "\u{9b}\u{202e}é\u{1b}" }).to_string();
        let shown = json(&text);
        assert_eq!(shown, r#"{"a":"\u009b\u202eé\u001b"}"#);
        assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).expect("JSON")["a"], "\u{9b}\u{202e}é\u{1b}");
    }

    #[test]
    fn a_log_is_escaped() {
        let mut log = EscapedLog { to: Vec::new(), color: true };
        log.write_all("\x1b[32mINFO\x1b[0m \r\u{202e}".as_bytes()).expect("written");
        assert_eq!(log.to, "\x1b[32mINFO\x1b[0m \\r\\u{202e}".as_bytes());
    }
}
