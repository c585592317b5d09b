//! Finds what a loss trains in a rendered conversation, as byte spans of its text.
//!
//! Three ways, in this order. Generation marks of the template say it. Sentinels around the contents of the trained turns show
//! where these went; both only if the text without sentinels is the plain rendering. Renderings of the turns before and with the
//! turn enclose it, only if each is a prefix of the whole. Otherwise the conversation is refused, with the cure.
//!
//! The token that stops a turn is in the span. The header of the turn, and an empty block of thoughts, are not.

use super::template::{ChatTemplate, Render, unused};
use crate::special::AddedTokens;
use perilune_data::{Error, Result};
use serde_json::{Map, Value};
use std::ops::Range;

/// The turns that a loss trains.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TrainOn {
    /// All turns of the assistant.
    #[default]
    Assistant,
    /// The last turn of the assistant.
    Last,
    /// All of the text.
    All,
}

impl TrainOn {
    pub const ALL: [(&'static str, TrainOn); 3] =
        [("assistant", TrainOn::Assistant), ("last", TrainOn::Last), ("all", TrainOn::All)];

    pub fn parse(name: &str) -> Option<TrainOn> {
        TrainOn::ALL.into_iter().find(|(known, _)| *known == name).map(|(_, on)| on)
    }
}

/// What the search for spans works on.
pub(super) struct Conversation<'a> {
    pub template: &'a ChatTemplate,
    pub messages: &'a [Value],
    pub specials: &'a Map<String, Value>,
    pub options: &'a Render,
    pub added: Option<&'a AddedTokens>,
    pub eos: Option<&'a str>,
    /// The plain rendering.
    pub text: &'a str,
}

pub(super) type Spans = Vec<Range<usize>>;

impl Conversation<'_> {
    pub fn spans(&self, on: TrainOn) -> Result<Spans> {
        if on == TrainOn::All {
            return Ok(std::iter::once(0..self.text.len()).collect());
        }
        let mut turns: Vec<usize> =
            (0..self.messages.len()).filter(|k| self.messages[*k]["role"] == "assistant").collect();
        if on == TrainOn::Last {
            turns.drain(..turns.len().saturating_sub(1));
        }
        let Some(last) = turns.last() else {
            let error = Error::argument("the messages", "have no turn whose role is \"assistant\"");
            return Err(error.hint("train_on = \"all\" trains every token"));
        };
        if let Some(marked) = self.by_marks(on)? {
            return Ok(marked);
        }
        let stops = self.stops(*last);
        match self.by_sentinels(&turns) {
            Some(found) => Ok(found.into_iter().map(|span| self.with_stop(span, &stops)).collect()),
            None => self.by_prefixes(&turns, &stops),
        }
    }

    fn render(&self, messages: &[Value], prompt: bool) -> Result<String> {
        let options = Render { add_generation_prompt: prompt, ..self.options.clone() };
        self.template.render(messages, self.specials, &options)
    }

    fn by_marks(&self, on: TrainOn) -> Result<Option<Spans>> {
        let Some(marked) = self.template.render_marked(self.messages, self.specials, self.options) else {
            return Ok(None);
        };
        let (marked, sentinels) = marked?;
        let found = regions(&marked, sentinels.open, sentinels.close, self.text);
        let mut found = found.filter(|f| !f.is_empty()).ok_or_else(|| {
            Error::argument("the chat template", "has generation marks that do not enclose parts of its text")
        })?;
        if on == TrainOn::Last {
            found.drain(..found.len() - 1);
        }
        Ok(Some(found))
    }

    /// The contents of turns by sentinels: around all of a content, or around what its ends leave, which templates may cut.
    fn by_sentinels(&self, turns: &[usize]) -> Option<Spans> {
        [false, true].into_iter().find_map(|trim| {
            let [open, close] =
                unused([self.text, self.template.source()].into_iter().chain(strings(self.messages))).ok()?;
            let mut messages = self.messages.to_vec();
            let mut marked = 0;
            for turn in turns {
                marked += mark(&mut messages[*turn], open, close, trim)?;
            }
            let text = self.template.render(&messages, self.specials, self.options).ok()?;
            regions(&text, open, close, self.text).filter(|found| found.len() == marked)
        })
    }

    /// The special tokens that stop a turn: the end of the text, and what follows a short answer that is the last turn.
    fn stops(&self, turn: usize) -> Vec<String> {
        let mut stops: Vec<String> = self.eos.map(str::to_string).into_iter().collect();
        let mut messages = self.messages[..turn].to_vec();
        messages.push(serde_json::json!({ "role": "assistant", "content": "x" }));
        let options = Render { add_generation_prompt: false, ..self.options.clone() };
        let probe = || {
            let text = self.render(&messages, false).ok()?;
            let one = Conversation { messages: &messages, text: &text, options: &options, ..*self };
            let end = one.by_sentinels(&[turn])?.pop()?.end;
            let (range, _) = self.added?.special_at(&text, end)?;
            Some(text[range].to_string())
        };
        stops.extend(probe());
        stops
    }

    /// Extends a span to the stop token that follows it, after white space at most.
    fn with_stop(&self, span: Range<usize>, stops: &[String]) -> Range<usize> {
        let rest = &self.text[span.end..];
        let blank = rest.len() - rest.trim_start().len();
        let stop = stops.iter().filter(|s| rest[blank..].starts_with(s.as_str())).map(String::len).max();
        span.start..stop.map_or(span.end, |len| span.end + blank + len)
    }

    fn by_prefixes(&self, turns: &[usize], stops: &[String]) -> Result<Spans> {
        let refuse = |turn: usize| {
            let rule = format!("rewrites turn {} when others follow or precede it", turn + 1);
            let cure =
                "train_on = \"last\", or generation marks in the template ({% generation %} … {% endgeneration %})";
            Error::argument("the chat template", rule).hint(cure)
        };
        let one = |turn: usize| -> Option<Range<usize>> {
            let before = self.render(&self.messages[..turn], true).ok()?;
            let without = self.render(&self.messages[..turn], false).ok()?;
            let with = self.render(&self.messages[..=turn], false).ok()?;
            if !self.text.starts_with(&with) || !with.starts_with(&before) {
                return None;
            }
            let part = &with[before.len()..];
            let content = self.messages[turn]["content"].as_str().map(str::trim).unwrap_or_default();
            let calls = !self.messages[turn]["tool_calls"].is_null();
            let start = match content {
                // The turn without its header, which the prompt for an answer is.
                _ if calls || content.is_empty() => (before.len() > without.len()).then_some(0)?,
                _ => {
                    let at = part.find(content)?;
                    (part.rfind(content) == Some(at)).then_some(at)?
                }
            };
            let end = if calls || content.is_empty() { part.trim_end().len() } else { start + content.len() };
            (end > start).then(|| self.with_stop(before.len() + start..before.len() + end, stops))
        };
        turns.iter().map(|turn| one(*turn).ok_or_else(|| refuse(*turn))).collect()
    }
}

/// All strings of messages, keys included.
pub(super) fn strings(values: &[Value]) -> Vec<&str> {
    let mut found = Vec::new();
    let mut open: Vec<&Value> = values.iter().collect();
    while let Some(value) = open.pop() {
        match value {
            Value::String(text) => found.push(text.as_str()),
            Value::Array(list) => open.extend(list),
            Value::Object(map) => {
                found.extend(map.keys().map(String::as_str));
                open.extend(map.values());
            }
            _ => {}
        }
    }
    found
}

/// Puts sentinels around the content of a message: a text, or parts with texts. Gives their number; `None` for a message whose
/// turn is more than its content.
fn mark(message: &mut Value, open: char, close: char, trim: bool) -> Option<usize> {
    if !message["tool_calls"].is_null() {
        return None;
    }
    let wrap = |text: &str| {
        let inner = if trim { text.trim() } else { text };
        (!inner.is_empty()).then(|| {
            let at = text.len() - if trim { text.trim_start().len() } else { text.len() };
            format!("{}{open}{inner}{close}{}", &text[..at], &text[at + inner.len()..])
        })
    };
    match message.get_mut("content")? {
        Value::String(text) => {
            *text = wrap(text)?;
            Some(1)
        }
        Value::Array(parts) => {
            let mut marked = 0;
            for part in parts {
                if let Some(Value::String(text)) = part.get_mut("text") {
                    *text = wrap(text)?;
                    marked += 1;
                }
            }
            (marked > 0).then_some(marked)
        }
        _ => None,
    }
}

/// The regions between sentinels, as spans of the text without them; `None` unless they alternate and that text is `plain`.
fn regions(marked: &str, open: char, close: char, plain: &str) -> Option<Spans> {
    let (mut spans, mut start, mut at) = (Vec::new(), None, 0);
    let mut rest = plain;
    for part in marked.split_inclusive([open, close]) {
        let sentinel = part.chars().next_back().filter(|c| *c == open || *c == close);
        let text = &part[..part.len() - sentinel.map_or(0, char::len_utf8)];
        rest = rest.strip_prefix(text)?;
        at += text.len();
        match (sentinel, start) {
            (Some(c), None) if c == open => start = Some(at),
            (Some(c), Some(from)) if c == close => {
                spans.push(from..at);
                start = None;
            }
            (None, None) => {}
            _ => return None,
        }
    }
    rest.is_empty().then_some(spans)
}
