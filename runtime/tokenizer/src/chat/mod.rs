//! Renders conversations by the template of a model, encodes them, and marks the tokens that a loss trains.
//!
//! A mask belongs to targets: `mask[k]` says that the loss of predicting token k counts. A token across the border of a span is
//! not trained. Special tokens in messages are text by default, those of the template are tokens; none are added beside the
//! template.

mod date;
mod marks;
mod python;
mod spans;
mod template;

pub use date::Date;
pub use spans::TrainOn;
pub use template::{ChatTemplate, Render};

use crate::encoding::{Encode, Encoding};
use crate::tokenizer::Tokenizer;
use perilune_data::{Error, Result};
use serde_json::{Map, Value};
use spans::Conversation;
use std::ops::Range;

/// How a conversation becomes tokens.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Chat {
    pub train_on: TrainOn,
    /// Special tokens in messages become their ids, as in transformers; otherwise they are text.
    pub parse_specials: bool,
    /// Tokens beyond are dropped.
    pub max_tokens: Option<usize>,
    pub render: Render,
}

/// A conversation as tokens.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Sample {
    pub text: String,
    pub ids: Vec<u32>,
    /// Whether the loss of predicting a token counts.
    pub mask: Vec<bool>,
    /// The bytes of the text that a token covers.
    pub spans: Vec<Range<usize>>,
    /// Tokens that a border of a trained span cuts.
    pub cut: Vec<usize>,
}

/// The special tokens of a tokenizer as variables of its template.
fn variables(tokenizer: &Tokenizer) -> Map<String, Value> {
    let config = tokenizer.config();
    let all = [
        ("bos_token", &config.bos_token),
        ("eos_token", &config.eos_token),
        ("pad_token", &config.pad_token),
        ("unk_token", &config.unk_token),
    ];
    all.into_iter().filter_map(|(name, token)| Some((name.to_string(), token.clone()?.into()))).collect()
}

/// Checks that messages are objects with a role.
fn check(messages: &[Value]) -> Result<()> {
    for (k, message) in messages.iter().enumerate() {
        if !message["role"].is_string() {
            let rule = "has no role; a message is an object with role and content";
            return Err(Error::argument(format!("message {}", k + 1), rule));
        }
    }
    match messages {
        [] => Err(Error::argument("the messages", "are empty")),
        _ => Ok(()),
    }
}

/// Renders messages as text.
///
/// # Errors
/// The template refuses them.
pub fn render(tokenizer: &Tokenizer, template: &ChatTemplate, messages: &[Value], options: &Render) -> Result<String> {
    check(messages)?;
    template.render(messages, &variables(tokenizer), options)
}

/// Encodes messages, with the mask of what the loss trains.
///
/// # Errors
/// The template refuses the messages or hides where turns are, or nothing is left to train.
pub fn encode(tokenizer: &Tokenizer, template: &ChatTemplate, messages: &[Value], chat: &Chat) -> Result<Sample> {
    check(messages)?;
    let specials = variables(tokenizer);
    let literal = match chat.parse_specials {
        true => None,
        false => Literal::of(tokenizer, messages, template)?,
    };
    let shown = literal.as_ref().map_or(messages, |l| &l.messages);
    let text = template.render(shown, &specials, &chat.render)?;
    let conversation = Conversation {
        template,
        messages: shown,
        specials: &specials,
        options: &chat.render,
        added: tokenizer.added(),
        eos: tokenizer.config().eos_token.as_deref(),
        text: &text,
    };
    let spans = conversation.spans(chat.train_on)?;
    let parse = Encode { parse_specials: true, add_specials: false };
    let (text, spans, encoding) = match literal {
        None => {
            let encoding = tokenizer.encode_spans(&text, parse)?;
            (text, spans, encoding)
        }
        Some(literal) => {
            let plain = template.render(messages, &specials, &chat.render)?;
            let (text, protected, spans) = literal.restore(&text, spans);
            if text != plain {
                let rule = "changes special tokens that stand in messages";
                let error = Error::argument("the chat template", rule);
                return Err(error.hint("specials = \"parse\" treats them as tokens, as transformers does"));
            }
            let encoding = encode_literal(tokenizer, &text, &protected)?;
            (text, spans, encoding)
        }
    };
    masked(text, encoding, &spans, chat)
}

/// Makes the mask of tokens from the trained spans of their text.
fn masked(text: String, encoding: Encoding, trained: &[Range<usize>], chat: &Chat) -> Result<Sample> {
    let Encoding { mut ids, mut spans } = encoding;
    if let Some(most) = chat.max_tokens {
        ids.truncate(most);
        spans.truncate(most);
    }
    let (mut mask, mut cut) = (Vec::with_capacity(ids.len()), Vec::new());
    let mut at = 0;
    for (k, token) in spans.iter().enumerate() {
        while trained.get(at).is_some_and(|span| span.end <= token.start) {
            at += 1;
        }
        let span = trained.get(at).filter(|span| span.start < token.end);
        let whole = span.is_some_and(|span| span.start <= token.start && token.end <= span.end && !token.is_empty());
        if span.is_some() && !whole {
            cut.push(k);
        }
        mask.push(whole);
    }
    if !mask.contains(&true) {
        let error = Error::argument("the messages", "leave no token to train");
        return Err(match chat.max_tokens {
            Some(most) => error.hint(format!(
                "{most} tokens end before the trained turns begin: raise the limit, or leave the sample out"
            )),
            None => error.hint("the trained turns are empty: leave the sample out"),
        });
    }
    Ok(Sample { text, ids, mask, spans, cut })
}

/// Messages whose special tokens are replaced by characters that stand for them while the template renders.
struct Literal {
    messages: Vec<Value>,
    /// The character for each token.
    tokens: Vec<(char, String)>,
}

impl Literal {
    /// `None` if no message has a special token.
    fn of(tokenizer: &Tokenizer, messages: &[Value], template: &ChatTemplate) -> Result<Option<Literal>> {
        let Some(added) = tokenizer.added() else { return Ok(None) };
        let strings = spans::strings(messages);
        if !strings.iter().any(|text| added.next_special(text, 0).is_some()) {
            return Ok(None);
        }
        if !tokenizer.encodes_parts() {
            let error =
                Error::argument("a message", "has a special token, and this tokenizer encodes texts as a whole only");
            return Err(error.hint("specials = \"parse\" treats it as a token, as transformers does"));
        }
        let mut found: Vec<String> = Vec::new();
        for text in &strings {
            let mut at = 0;
            while let Some((range, _)) = added.next_special(text, at) {
                at = range.end;
                if !found.iter().any(|t| *t == text[range.clone()]) {
                    found.push(text[range].to_string());
                }
            }
        }
        let free = template::unused::<256>(strings.into_iter().chain([template.source()]))?;
        if found.len() > free.len() {
            return Err(Error::argument("the messages", format!("have more than {} special tokens", free.len())));
        }
        // From the end, so that other sentinels, from the beginning, differ.
        let tokens: Vec<(char, String)> = free.into_iter().rev().zip(found).collect();
        let mut literal = Literal { messages: messages.to_vec(), tokens };
        let mut all = std::mem::take(&mut literal.messages);
        all.iter_mut().for_each(|message| literal.hide(message, added));
        literal.messages = all;
        Ok(Some(literal))
    }

    fn hide(&self, value: &mut Value, added: &crate::special::AddedTokens) {
        match value {
            Value::String(text) => {
                let (mut out, mut copied) = (String::new(), 0);
                while let Some((range, _)) = added.next_special(text, copied) {
                    out.push_str(&text[copied..range.start]);
                    out.extend(self.tokens.iter().find(|(_, t)| *t == text[range.clone()]).map(|(c, _)| *c));
                    copied = range.end;
                }
                out.push_str(&text[copied..]);
                *text = out;
            }
            Value::Array(list) => list.iter_mut().for_each(|v| self.hide(v, added)),
            Value::Object(map) => map.values_mut().for_each(|v| self.hide(v, added)),
            _ => {}
        }
    }

    /// The text with the tokens in their places, the ranges where they are text, and the spans in it.
    fn restore(&self, text: &str, spans: Vec<Range<usize>>) -> (String, Vec<Range<usize>>, Vec<Range<usize>>) {
        let (mut out, mut protected) = (String::new(), Vec::new());
        // Where each byte of `text` went; spans begin and end at characters.
        let mut moved = Vec::with_capacity(text.len() + 1);
        for c in text.chars() {
            moved.extend(std::iter::repeat_n(out.len(), c.len_utf8()));
            match self.tokens.iter().find(|(hidden, _)| *hidden == c) {
                Some((_, token)) => {
                    protected.push(out.len()..out.len() + token.len());
                    out.push_str(token);
                }
                None => out.push(c),
            }
        }
        moved.push(out.len());
        let spans = spans.into_iter().map(|s| moved[s.start]..moved[s.end]).collect();
        (out, protected, spans)
    }
}

/// Encodes a text whose special tokens are tokens, but text where a message has them.
fn encode_literal(tokenizer: &Tokenizer, text: &str, protected: &[Range<usize>]) -> Result<Encoding> {
    let Some(added) = tokenizer.added() else { return tokenizer.encode_spans(text, Encode::default()) };
    let mut all = Encoding::default();
    let (mut done, mut from) = (0, 0);
    while let Some((range, id)) = added.next_special(text, from) {
        if let Some(inside) = protected.iter().find(|p| p.start < range.end && range.start < p.end) {
            from = if inside.start > range.start { inside.start } else { inside.end }.max(range.start + 1);
            while !text.is_char_boundary(from) {
                from += 1;
            }
            continue;
        }
        let range = added.with_space(text, id, range, done);
        from = range.end;
        all.append(tokenizer.encode_spans(&text[done..range.start], Encode::default())?, done);
        all.ids.push(id);
        done = range.end;
        all.spans.push(range);
    }
    all.append(tokenizer.encode_spans(&text[done..], Encode::default())?, done);
    Ok(all)
}

/// The template of a tokenizer.
///
/// # Errors
/// It has none, or its syntax is wrong.
pub fn template_of(tokenizer: &Tokenizer) -> Result<ChatTemplate> {
    match &tokenizer.config().chat_template {
        Some(source) => ChatTemplate::parse(source),
        None => {
            let error = Error::argument("this tokenizer", "has no chat template");
            Err(error.hint("name a folder with tokenizer_config.json or chat_template.jinja, or give template = \"…\""))
        }
    }
}
