//! Implements the stage `preference` of record pipelines: pairs of a preferred and a rejected answer to one prompt, as two rows of tokens.
//!
//! Both rows have the same tokens in front of the answer: texts are encoded apart from it, and conversations are compared. So the
//! probabilities of the two answers differ by the answers alone.

use crate::tokenize::{json, of_function};
use crate::tokenizer::SharedTokenizer;
use perilune_core::{DType, HostTensor, Shape};
use perilune_data::records::stages::IGNORED;
use perilune_data::records::{Fingerprint, Record, RecordFn, Value, hash};
use perilune_data::{Error, Result};
use perilune_tokenizer::Encode;
use perilune_tokenizer::chat::{self, Chat, ChatTemplate};
use serde_json::{Value as Json, json};
use std::sync::Arc;

/// Encodes the fields of a pair.
pub(crate) struct Preference {
    pub tokenizer: Arc<SharedTokenizer>,
    /// A template instead of the tokenizer's own; for conversations.
    pub template: Option<ChatTemplate>,
    /// The fields: prompt, chosen, rejected.
    pub fields: [String; 3],
    /// Positions of a row.
    pub length: usize,
    /// Whether an answer that is too long is cut at its end.
    pub truncate: bool,
    pub padding: i64,
    /// The id that ends an answer of text.
    pub end: Option<u32>,
    /// Fields that stay.
    pub keep: Vec<String>,
    pub encode: Encode,
    pub chat: Chat,
}

/// The tokens of a row, and which of them are the answer's.
struct Row {
    ids: Vec<u32>,
    mask: Vec<bool>,
}

impl Preference {
    fn field<'a>(&self, record: &'a Record, k: usize) -> Option<&'a Value> {
        record.get(&self.fields[k]).filter(|value| **value != Value::Null)
    }

    /// A row of two texts.
    fn of_texts(&self, prompt: &str, answer: &str) -> Result<Row> {
        let encode = |text: &str, how: Encode| self.tokenizer.tokenizer.encode(text, how).map_err(of_function);
        let mut ids = encode(prompt, self.encode)?;
        let first = ids.len();
        ids.extend(encode(answer, Encode { add_specials: false, ..self.encode })?);
        ids.extend(self.end);
        let mask = (0..ids.len()).map(|k| k >= first).collect();
        Ok(Row { ids, mask })
    }

    /// A row of a conversation, whose last answer is trained.
    fn of_messages(&self, prompt: Option<&Value>, answer: &Value) -> Result<Row> {
        let mut messages: Vec<Json> = match prompt {
            Some(Value::List(list)) => list.iter().map(json).collect(),
            _ => Vec::new(),
        };
        match answer {
            Value::List(list) => messages.extend(list.iter().map(json)),
            Value::Text(text) => messages.push(json!({ "role": "assistant", "content": &**text })),
            _ => {}
        }
        let template = self.template.as_ref().map_or_else(|| self.tokenizer.template(), Ok)?;
        let sample = chat::encode(&self.tokenizer.tokenizer, template, &messages, &self.chat).map_err(of_function)?;
        Ok(Row { ids: sample.ids, mask: sample.mask })
    }

    fn row(&self, prompt: Option<&Value>, answer: &Value, name: &str) -> Result<Row> {
        let rule = |what: &str| {
            Error::function(what.to_string()).hint(
                "give texts for all three, or lists of messages { role =, content = }; a prompt may be left out of conversations",
            )
        };
        match (prompt, answer) {
            (Some(Value::Text(prompt)), Value::Text(answer)) => self.of_texts(prompt, answer),
            (None, Value::Text(_)) => Err(rule(&format!("the record has no field '{}'", self.fields[0]))),
            (None | Some(Value::List(_)), Value::List(_)) | (Some(Value::List(_)), Value::Text(_)) => {
                self.of_messages(prompt, answer)
            }
            (Some(prompt), Value::Text(_) | Value::List(_)) => Err(rule(&format!(
                "'{}' is {} and '{name}' {}",
                self.fields[0],
                prompt.type_name(),
                answer.type_name()
            ))),
            (_, other) => Err(rule(&format!("'{name}' is {}", other.type_name()))),
        }
    }

    /// Cuts a row to what `length` positions and their targets hold.
    fn fitted(&self, mut row: Row, name: &str) -> Result<Row> {
        let (room, found) = (self.length + 1, row.ids.len());
        if found > room && !self.truncate {
            let rule = format!("the prompt with '{name}' has {found} tokens, and a row holds {room}");
            return Err(Error::function(rule).hint("use a larger length, or too_long = \"truncate\""));
        }
        row.ids.truncate(room);
        row.mask.truncate(room);
        // Nothing predicts the first token.
        if !row.mask.iter().skip(1).any(|m| *m) {
            let rule = format!("no token of '{name}' is left to train: the prompt has {} tokens", first(&row.mask));
            return Err(Error::function(rule).hint("use a larger length, or filter such records"));
        }
        Ok(row)
    }
}

/// The number of tokens in front of the answer.
fn first(mask: &[bool]) -> usize {
    mask.iter().position(|m| *m).unwrap_or(mask.len())
}

impl RecordFn for Preference {
    /// The result has `x` (2, length) and `y` (2, length), the row of the chosen answer first, and the fields that stay.
    fn call(&self, record: Record, _index: u64) -> Result<Value> {
        let prompt = self.field(&record, 0);
        let mut rows = Vec::with_capacity(2);
        for k in [1, 2] {
            let name = &self.fields[k];
            let answer = self.field(&record, k).ok_or_else(|| {
                Error::function(format!("the record has no field '{name}'"))
                    .hint("name the fields: { prompt = \"question\", chosen = \"good\", rejected = \"bad\" }")
            })?;
            rows.push(self.row(prompt, answer, name)?);
        }
        if rows[0].ids[..first(&rows[0].mask)] != rows[1].ids[..first(&rows[1].mask)] {
            let rule = format!("the tokens before '{}' differ from those before '{}'", self.fields[1], self.fields[2]);
            return Err(Error::function(rule).hint(
                "both conversations need the same turns before their last answer, and a template that renders them alike",
            ));
        }
        if rows[0].ids == rows[1].ids {
            let rule = format!("'{}' and '{}' have the same tokens", self.fields[1], self.fields[2]);
            return Err(Error::function(rule).hint("filter such records: they have no preference"));
        }
        let (mut x, mut y) = (Vec::with_capacity(2 * self.length), Vec::with_capacity(2 * self.length));
        for (row, name) in rows.into_iter().zip(&self.fields[1..]) {
            let row = self.fitted(row, name)?;
            for k in 0..self.length {
                x.push(row.ids.get(k).map_or(self.padding, |id| i64::from(*id)));
                y.push(match row.mask.get(k + 1) {
                    Some(true) => i64::from(row.ids[k + 1]),
                    _ => IGNORED,
                });
            }
        }
        let array = |values: &[i64], dtype| {
            Value::Array(Arc::new(HostTensor::from_i64(Shape::of(&[2, self.length]), values).cast(dtype)))
        };
        let mut out = Record { fields: vec![("x".into(), array(&x, DType::I32)), ("y".into(), array(&y, DType::I64))] };
        for name in &self.keep {
            match record.get(name) {
                Some(value) if out.get(name).is_none() => out.fields.push((name.as_str().into(), value.clone())),
                Some(_) => {
                    return Err(Error::function(format!(
                        "the field '{name}' cannot stay: preference makes one of that name"
                    )));
                }
                None => {
                    return Err(Error::function(format!(
                        "the record has no field '{name}', which option 'keep' names"
                    )));
                }
            }
        }
        Ok(Value::Map(out))
    }

    fn place(&self) -> &str {
        "preference"
    }

    fn fingerprint(&self) -> Fingerprint {
        let template = match &self.template {
            Some(template) => template.hash(),
            None => self.tokenizer.template().map_or("", ChatTemplate::hash),
        };
        let options = format!(
            "{:?} {} {} {} {:?} {:?} {:?} {:?}",
            self.fields, self.length, self.truncate, self.padding, self.end, self.keep, self.encode, self.chat
        );
        let parts = [self.tokenizer.tokenizer.hash(), template, &options].map(str::as_bytes);
        hash::stage("preference/1", &parts, &[])
    }
}
