//! Reads special tokens: those of `tokenizer_config.json`, and where added tokens occur in a text.

use perilune_data::{Error, Result};
use rustc_hash::FxHashMap;
use serde_json::Value;
use std::ops::Range;
use std::path::Path;
use tokenizers::{AddedToken, AddedVocabulary};

/// What `tokenizer_config.json` and `chat_template.jinja` add to a vocabulary.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Config {
    pub bos_token: Option<String>,
    pub eos_token: Option<String>,
    pub pad_token: Option<String>,
    pub unk_token: Option<String>,
    /// The text of the chat template.
    pub chat_template: Option<String>,
}

impl Config {
    /// Reads the text of a `tokenizer_config.json`.
    ///
    /// # Errors
    /// It is no object of JSON, or an entry has another type.
    pub fn read(path: &Path, text: &[u8]) -> Result<Config> {
        let json: Value =
            serde_json::from_slice(text).map_err(|e| Error::malformed(path, "file", format!("is not JSON: {e}")))?;
        if !json.is_object() {
            return Err(Error::malformed(path, "file", "is not an object of JSON"));
        }
        let token = |key: &str| match &json[key] {
            Value::Null => Ok(None),
            Value::String(text) => Ok(Some(text.clone())),
            Value::Object(token) => match token.get("content") {
                Some(Value::String(text)) => Ok(Some(text.clone())),
                _ => Err(Error::malformed(path, key, "has no content that is a string")),
            },
            _ => Err(Error::malformed(path, key, "is neither a string nor an object")),
        };
        Ok(Config {
            bos_token: token("bos_token")?,
            eos_token: token("eos_token")?,
            pad_token: token("pad_token")?,
            unk_token: token("unk_token")?,
            chat_template: template(path, &json["chat_template"])?,
        })
    }
}

/// A template is a text, or a list of named ones, whose "default" is taken.
fn template(path: &Path, json: &Value) -> Result<Option<String>> {
    match json {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(text.clone())),
        Value::Array(list) => {
            let named = list.iter().find(|one| one["name"] == "default").or(list.first());
            match named.map(|one| &one["template"]) {
                Some(Value::String(text)) => Ok(Some(text.clone())),
                _ => Err(Error::malformed(path, "chat_template", "is a list without a template that is a string")),
            }
        }
        _ => Err(Error::malformed(path, "chat_template", "is neither a string nor a list")),
    }
}

/// The added tokens of a vocabulary, by their first byte.
#[derive(Debug, Default)]
pub(crate) struct AddedTokens {
    /// Content, id, whether it is special; the longest first.
    by_first: FxHashMap<u8, Vec<(String, u32, bool)>>,
    /// Whether a byte begins one of them.
    begins: Vec<bool>,
    ids: FxHashMap<u32, AddedToken>,
}

impl AddedTokens {
    pub fn of(added: &AddedVocabulary) -> AddedTokens {
        let mut all = AddedTokens { begins: vec![false; 256], ..AddedTokens::default() };
        for (id, token) in added.get_added_tokens_decoder() {
            let Some(first) = token.content.bytes().next() else { continue };
            all.begins[usize::from(first)] = true;
            all.by_first.entry(first).or_default().push((token.content.clone(), *id, token.special));
            all.ids.insert(*id, token.clone());
        }
        for list in all.by_first.values_mut() {
            list.sort_by(|a, b| b.0.len().cmp(&a.0.len()).then_with(|| a.0.cmp(&b.0)));
        }
        all
    }

    pub fn is_special(&self, id: u32) -> bool {
        self.ids.get(&id).is_some_and(|token| token.special)
    }

    /// Whether an added token occurs in a text: any of them, or those that are not special.
    pub fn occurs(&self, text: &str, specials: bool) -> bool {
        self.first(text, 0, |special| specials || !special).is_some()
    }

    /// The first and longest special token from a byte on: its range and id.
    pub fn next_special(&self, text: &str, from: usize) -> Option<(Range<usize>, u32)> {
        self.first(text, from, |special| special)
    }

    /// The special token that begins at a byte.
    pub fn special_at(&self, text: &str, at: usize) -> Option<(Range<usize>, u32)> {
        self.at(text.as_bytes(), at, &|special| special)
    }

    /// Extends the place of a token over the white space that it takes with it (`lstrip`, `rstrip`), back to `from` at most.
    pub fn with_space(&self, text: &str, id: u32, range: Range<usize>, from: usize) -> Range<usize> {
        let Some(token) = self.ids.get(&id) else { return range };
        let (before, after) = (&text[from..range.start], &text[range.end..]);
        let left = if token.lstrip { from + before.trim_end().len() } else { range.start };
        let right = if token.rstrip { text.len() - after.trim_start().len() } else { range.end };
        left..right
    }

    fn first(&self, text: &str, from: usize, wanted: impl Fn(bool) -> bool) -> Option<(Range<usize>, u32)> {
        if self.by_first.is_empty() {
            return None;
        }
        let bytes = text.as_bytes();
        (from..bytes.len()).filter(|at| self.begins[usize::from(bytes[*at])]).find_map(|at| self.at(bytes, at, &wanted))
    }

    fn at(&self, bytes: &[u8], at: usize, wanted: &dyn Fn(bool) -> bool) -> Option<(Range<usize>, u32)> {
        let list = self.by_first.get(bytes.get(at)?)?;
        let found = list.iter().find(|one| wanted(one.2) && bytes[at..].starts_with(one.0.as_bytes()))?;
        Some((at..at + found.0.len(), found.1))
    }
}
