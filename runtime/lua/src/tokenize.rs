//! Implements the stages `tokenize` and `chat` of record pipelines: functions of a record that need no Lua state.

use crate::tokenizer::SharedTokenizer;
use perilune_core::{DType, HostTensor, Shape};
use perilune_data::records::{Fingerprint, Record, RecordFn, Value, hash};
use perilune_data::{Error, Result};
use perilune_tokenizer::Encode;
use perilune_tokenizer::chat::{self, Chat, ChatTemplate};
use serde_json::Value as Json;
use std::sync::Arc;

/// Encodes a text field as token ids.
pub(crate) struct Tokenize {
    pub tokenizer: Arc<SharedTokenizer>,
    /// The field with the text, and that for the ids.
    pub from: String,
    pub to: String,
    pub encode: Encode,
    /// The id that ends a document.
    pub end: Option<u32>,
}

fn missing(name: &str) -> Error {
    Error::function(format!("the record has no field '{name}'"))
}

fn ids(ids: &[u32]) -> Value {
    let bytes = ids.iter().flat_map(|id| (*id as i32).to_le_bytes()).collect();
    Value::Array(Arc::new(HostTensor::new(DType::I32, Shape::of(&[ids.len()]), bytes)))
}

/// The message of an error of the tokenizer, as that of a function.
pub(crate) fn of_function(error: Error) -> Error {
    match error {
        Error::Argument { .. } => Error::function(error.to_string()),
        other => other,
    }
}

impl RecordFn for Tokenize {
    fn call(&self, mut record: Record, _index: u64) -> Result<Value> {
        let made = match record.get(&self.from) {
            Some(Value::Text(text)) => self.tokenizer.tokenizer.encode(text, self.encode),
            Some(other) => {
                let rule = format!("'{}' is {}, and a tokenizer needs a text", self.from, other.type_name());
                return Err(Error::function(rule));
            }
            None => return Err(missing(&self.from)),
        };
        let mut found = made.map_err(of_function)?;
        found.extend(self.end);
        record.set(&self.to, ids(&found));
        Ok(Value::Map(record))
    }

    fn place(&self) -> &str {
        "tokenize"
    }

    fn fingerprint(&self) -> Fingerprint {
        let options = format!("{:?} {:?}", self.encode, self.end);
        let tokenizer = self.tokenizer.tokenizer.hash();
        let parts = [tokenizer, &self.from, &self.to, &options].map(str::as_bytes);
        hash::stage("tokenize/1", &parts, &[])
    }
}

/// Renders a conversation by a chat template, as token ids and the mask of what the loss trains.
pub(crate) struct RenderChat {
    pub tokenizer: Arc<SharedTokenizer>,
    /// A template instead of the tokenizer's own.
    pub template: Option<ChatTemplate>,
    pub field: String,
    pub chat: Chat,
}

impl RenderChat {
    fn template(&self) -> Result<&ChatTemplate> {
        self.template.as_ref().map_or_else(|| self.tokenizer.template(), Ok)
    }
}

impl RecordFn for RenderChat {
    /// The result has the fields `ids` and `mask`.
    fn call(&self, record: Record, _index: u64) -> Result<Value> {
        let messages = match record.get(&self.field) {
            Some(Value::List(list)) => list.iter().map(json).collect::<Vec<_>>(),
            Some(other) => {
                let rule = format!("'{}' is {}; a conversation is a list of messages", self.field, other.type_name());
                return Err(Error::function(rule));
            }
            None => return Err(missing(&self.field)),
        };
        let sample = chat::encode(&self.tokenizer.tokenizer, self.template()?, &messages, &self.chat);
        let sample = sample.map_err(of_function)?;
        let mask = sample.mask.iter().map(|m| u8::from(*m)).collect();
        let mask = HostTensor::new(DType::Bool, Shape::of(&[sample.mask.len()]), mask);
        let fields = vec![("ids".into(), ids(&sample.ids)), ("mask".into(), Value::Array(Arc::new(mask)))];
        Ok(Value::Map(Record { fields }))
    }

    fn place(&self) -> &str {
        "chat"
    }

    fn fingerprint(&self) -> Fingerprint {
        let template = self.template().map_or("", ChatTemplate::hash);
        let options = format!("{:?}", self.chat);
        let parts = [self.tokenizer.tokenizer.hash(), template, &self.field, &options].map(str::as_bytes);
        hash::stage("chat/1", &parts, &[])
    }
}

/// A value as JSON.
pub(crate) fn json(value: &Value) -> Json {
    match value {
        Value::Null | Value::Bytes(_) | Value::Array(_) => Json::Null,
        Value::Bool(b) => Json::Bool(*b),
        Value::Int(i) => Json::from(*i),
        Value::Float(x) => Json::from(*x),
        Value::Text(text) => Json::String(text.to_string()),
        Value::List(list) => Json::Array(list.iter().map(json).collect()),
        Value::Map(record) => {
            Json::Object(record.fields.iter().map(|(name, value)| (name.to_string(), json(value))).collect())
        }
    }
}
