//! Defines what encoding takes and gives: options, ids, and the bytes of the text that each token stands for.

use std::ops::Range;

/// How a text is encoded. By default special tokens in it are text, and none are added.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Encode {
    /// Special tokens in the text become their ids, as in transformers; otherwise their characters are text.
    pub parse_specials: bool,
    /// The post-processor adds its tokens (`<s>`, `[CLS]`), as `add_special_tokens=True` in transformers.
    pub add_specials: bool,
}

/// A text as tokens.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Encoding {
    pub ids: Vec<u32>,
    /// The bytes of the text that each token covers, extended to whole characters.
    pub spans: Vec<Range<usize>>,
}

impl Encoding {
    /// Appends another encoding whose text begins at byte `offset`.
    pub(crate) fn append(&mut self, other: Encoding, offset: usize) {
        self.ids.extend(other.ids);
        self.spans.extend(other.spans.into_iter().map(|s| s.start + offset..s.end + offset));
    }
}

/// Extends a span to the borders of the characters it cuts.
pub(crate) fn whole_characters(text: &str, span: Range<usize>) -> Range<usize> {
    let (mut start, mut end) = (span.start, span.end);
    while !text.is_char_boundary(start) {
        start -= 1;
    }
    while end < text.len() && !text.is_char_boundary(end) {
        end += 1;
    }
    start..end
}
