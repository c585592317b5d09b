//! Replaces `{% generation %}` marks in a template by plain blocks, with or without a sentinel.
//!
//! transformers knows the mark by an extension of Jinja; minijinja does not. A mark becomes `{% if true %}SENTINEL{% endif %}`: a
//! block as well, so that `trim_blocks` and `lstrip_blocks` act on it, and its `-` and `+` stay where they were.

use std::borrow::Cow;

/// The sentinels of a region: where it begins and where it ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sentinels {
    pub open: char,
    pub close: char,
}

/// Whether a template has generation marks.
pub fn has_marks(template: &str) -> bool {
    let mut found = false;
    walk(template, |_, _| found = true);
    found
}

/// Replaces the marks of a template; their sentinels are left out without `sentinels`.
pub fn replace(template: &str, sentinels: Option<Sentinels>) -> Cow<'_, str> {
    let mut out = String::new();
    let mut copied = 0;
    walk(template, |range, close| {
        let tag = &template[range.clone()];
        let sign = |at: usize| {
            tag.as_bytes()
                .get(at)
                .filter(|b| matches!(b, b'-' | b'+'))
                .map_or("", |b| if *b == b'-' { "-" } else { "+" })
        };
        let sentinel = sentinels.map(|s| if close { s.close } else { s.open }.to_string()).unwrap_or_default();
        let (left, right) = (sign(2), sign(tag.len() - 3));
        out.push_str(&template[copied..range.start]);
        out.push_str(&format!("{{%{left} if true %}}{sentinel}{{% endif {right}%}}"));
        copied = range.end;
    });
    if copied == 0 {
        return Cow::Borrowed(template);
    }
    out.push_str(&template[copied..]);
    Cow::Owned(out)
}

/// Calls `each` with the range of each mark, and whether it closes.
fn walk(template: &str, mut each: impl FnMut(std::ops::Range<usize>, bool)) {
    let bytes = template.as_bytes();
    let mut at = 0;
    while let Some(found) = memchr::memchr(b'{', &bytes[at..]) {
        let start = at + found;
        match bytes.get(start + 1) {
            Some(b'#') => at = find(bytes, start + 2, b"#}"),
            Some(b'{') => at = end_of_tag(bytes, start + 2, b"}}"),
            Some(b'%') => {
                at = end_of_tag(bytes, start + 2, b"%}");
                let Some(inside) = template.get(start + 2..at.saturating_sub(2)) else { continue };
                let word = inside.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
                match word {
                    "generation" => each(start..at, false),
                    "endgeneration" => each(start..at, true),
                    "raw" => at = end_of_raw(template, at),
                    _ => {}
                }
            }
            _ => at = start + 1,
        }
    }
}

fn find(bytes: &[u8], from: usize, what: &[u8]) -> usize {
    memchr::memmem::find(bytes.get(from..).unwrap_or_default(), what).map_or(bytes.len(), |at| from + at + what.len())
}

/// The end of a tag; its end is not looked for within strings.
fn end_of_tag(bytes: &[u8], from: usize, end: &[u8]) -> usize {
    let (mut at, mut quote) = (from, None);
    while at < bytes.len() {
        match (quote, bytes[at]) {
            (Some(_), b'\\') => at += 1,
            (Some(q), byte) if byte == q => quote = None,
            (None, byte @ (b'"' | b'\'')) => quote = Some(byte),
            (None, _) if bytes[at..].starts_with(end) => return at + end.len(),
            _ => {}
        }
        at += 1;
    }
    bytes.len()
}

fn end_of_raw(template: &str, from: usize) -> usize {
    let mut at = from;
    while let Some(found) = template[at..].find("{%") {
        let end = find(template.as_bytes(), at + found, b"%}");
        let inside = template.get(at + found + 2..end.saturating_sub(2)).unwrap_or_default();
        if inside.trim_matches(['-', '+']).trim() == "endraw" {
            return end;
        }
        at += found + 2;
    }
    template.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_become_blocks_with_their_signs() {
        let some = Some(Sentinels { open: '<', close: '>' });
        let template = "a{%- generation -%} b {%endgeneration%}\n{# {% generation %} #}{{ '{% generation %}' }}{% raw %}{% generation %}{% endraw %}";
        let wanted = "a{%- if true %}<{% endif -%} b {% if true %}>{% endif %}\n{# {% generation %} #}{{ '{% generation %}' }}{% raw %}{% generation %}{% endraw %}";
        assert_eq!(replace(template, some), wanted);
        assert_eq!(
            replace("{% generation %}x{%+ endgeneration %}", None),
            "{% if true %}{% endif %}x{%+ if true %}{% endif %}"
        );
        assert!(!has_marks("{# {% generation %} #} {% raw %} {% generation %}") && has_marks(template));
    }

    #[test]
    fn broken_templates_end() {
        for text in
            ["{", "{%", "{{", "{#", "{% generation", "{{ '", "{% raw %}", "{%-%}", "{%%}", "{% raw %}{% é", "{{ \"\\"]
        {
            assert!(!has_marks(text), "{text}");
        }
    }
}
