//! Escapes control characters in text from recipes, files and paths.
//!
//! A terminal executes control sequences, which can erase lines, rename windows, hide text or paste keys. All printed or logged
//! text passes [`rendered`], which writes control characters and marks of text direction as `\u{1b}`. Newlines and tabs stay.
//! Styles of the program itself are marked by a random token of this process, which a recipe cannot guess.

use std::borrow::Cow;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io::{self, Write};
use std::sync::OnceLock;

/// Returns the token that represents the start of a style, `ESC [`.
fn token() -> &'static str {
    static TOKEN: OnceLock<String> = OnceLock::new();
    TOKEN.get_or_init(|| format!("\u{1b}<{:016x}>", RandomState::new().build_hasher().finish()))
}

/// Returns whether a terminal would execute the character instead of displaying it.
fn is_obeyed(c: char) -> bool {
    let direction =
        matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    (c.is_control() && !matches!(c, '\n' | '\t')) || direction || matches!(c, '\u{2028}' | '\u{2029}')
}

/// Escapes control characters as `\u{1b}`, and a carriage return as `\r`.
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

/// Escapes a text for one line, including newlines and tabs.
pub fn one_line(text: &str) -> String {
    escaped(text).replace('\n', "\\n").replace('\t', "\\t")
}

/// Formats a text in a style; `code` is the text between `ESC [` and `m`.
pub fn styled(code: &str, text: &str) -> String {
    let token = token();
    format!("{token}{code}m{text}{token}0m")
}

/// Cuts a styled text to so many lines, each of at most so many characters, and says how much is left out.
pub fn shortened(text: &str, most_lines: usize, most_chars: usize) -> String {
    let mut lines = text.split_inclusive('\n');
    let mut out = String::new();
    for line in lines.by_ref().take(most_lines) {
        let body = line.trim_end_matches('\n');
        let Some((end, _)) = body.char_indices().nth(most_chars) else {
            out.push_str(line);
            continue;
        };
        // A style is neither cut in two nor left open.
        let mut kept = &body[..end];
        if let Some(at) = kept.rfind('\u{1b}').filter(|at| end - at < token().len() + 4) {
            kept = &kept[..at];
        }
        let reset = if kept.contains(token()) { format!("{}0m", token()) } else { String::new() };
        let more = body.len() - kept.len();
        out.push_str(&format!("{kept}{reset} … ({more} bytes more)\n"));
    }
    match lines.count() {
        0 => out,
        more => out + &format!("… {more} lines more\n"),
    }
}

/// Marks the style sequences of a drawing made by the program, so that they are kept. Its words must be escaped before.
pub fn drawn(text: &str) -> String {
    text.replace("\u{1b}[", token())
}

/// Renders text for a terminal or a file: escapes everything except the program's own styles.
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

/// Escapes control characters that JSON allows in strings as `\u009b`.
pub fn json(text: &str) -> Cow<'_, str> {
    // JSON already escapes those below U+0020, and has none outside of strings.
    if !text.contains(is_obeyed) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_obeyed(c) { out.push_str(&format!("\\u{:04x}", c as u32)) } else { out.push(c) }
    }
    Cow::Owned(out)
}

/// A log writer that escapes lines; with colours, the sequences of the formatter are kept.
pub struct EscapedLog<W> {
    pub to: W,
    pub color: bool,
}

impl<W: Write> Write for EscapedLog<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        // The formatter escapes ESC in messages, so the remaining ones are its own.
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
    fn a_long_text_is_cut_by_lines_and_characters() {
        assert_eq!(shortened("ab\ncd", 2, 2), "ab\ncd");
        assert_eq!(shortened("aäbc\n", 2, 2), "aä … (2 bytes more)\n");
        assert_eq!(shortened("a\nb\nc\nd", 2, 2), "a\nb\n… 2 lines more\n");
        let (line, reset) = (styled("31", "abcdef") + "\n", format!("{}0m", token()));
        let start = token().chars().count() + 3;
        // In the token at the end, within the text, and in the token at the start.
        for (chars, kept) in [(start + 8, Some(6)), (start + 2, Some(2)), (4, None)] {
            let shown = shortened(&line, 1, chars);
            let begins =
                kept.map_or(String::new(), |n| line[..line.find("abcdef").unwrap_or(0) + n].to_string() + &reset);
            assert!(shown.starts_with(&format!("{begins} … (")), "{chars}: {shown:?}");
            assert!(!rendered(&shown).contains("\\u{1b}"), "{chars}: {shown:?}");
        }
    }

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
