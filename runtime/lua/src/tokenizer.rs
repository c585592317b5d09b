//! Binds tokenizers and chat templates for Lua: a thin wrapper of `perilune_tokenizer`. `stdlib/data/tokenizer.lua` declares it.
//!
//! The userdata is the tokenizer itself. [`shared`] gives what other Lua states make a userdata of their own from.

use crate::args::{as_int, show};
use crate::boundary::memory_limit;
use crate::errors;
use crate::functions::host;
use crate::json;
use crate::preference::Preference;
use crate::recipe_files::{fail, fail_in_any_state, file_or_folder, input, text_arg};
use crate::table;
use crate::tensor::Tensor;
use crate::tokenize::{RenderChat, Tokenize};
use crate::workers::Portable;
use mlua::{AnyUserData, Lua, MetaMethod, Table, UserData, UserDataMethods, Value};
use perilune_core::error::did_you_mean;
use perilune_core::{HostTensor, Shape};
use perilune_tokenizer::chat::{self, Chat, ChatTemplate, Date, Render, Sample, TrainOn};
use perilune_tokenizer::{Encode, Tokenizer};
use serde_json::Value as Json;
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// A tokenizer and its chat template, parsed when it is first used. Threads share one.
pub(crate) struct SharedTokenizer {
    pub tokenizer: Tokenizer,
    template: OnceLock<ChatTemplate>,
}

struct TokenizerData(Arc<SharedTokenizer>);

/// The tokenizer behind a Lua value.
pub(crate) fn shared(value: &Value) -> Option<Arc<SharedTokenizer>> {
    Some(value.as_userdata()?.borrow::<TokenizerData>().ok()?.0.clone())
}

/// Makes a Lua value of a tokenizer.
pub(crate) fn userdata(lua: &Lua, tokenizer: Arc<SharedTokenizer>) -> mlua::Result<AnyUserData> {
    lua.create_userdata(TokenizerData(tokenizer))
}

impl Portable for SharedTokenizer {
    fn bring(self: Arc<Self>, lua: &Lua) -> mlua::Result<Value> {
        Ok(Value::UserData(userdata(lua, self)?))
    }

    fn fingerprint(&self) -> [u8; 32] {
        let template = self.template().map_or("", ChatTemplate::hash);
        perilune_data::records::hash::value(&perilune_data::records::Value::Text(
            format!("{} {template}", self.tokenizer.hash()).into(),
        ))
    }
}

impl SharedTokenizer {
    pub(crate) fn template(&self) -> perilune_data::Result<&ChatTemplate> {
        if let Some(known) = self.template.get() {
            return Ok(known);
        }
        let parsed = chat::template_of(&self.tokenizer)?;
        Ok(self.template.get_or_init(|| parsed))
    }
}

pub(crate) fn new(lua: &Lua, tokenizer: Tokenizer) -> mlua::Result<AnyUserData> {
    userdata(lua, Arc::new(SharedTokenizer { tokenizer, template: OnceLock::new() }))
}

/// `native.tokenizer(path)`: opens a tokenizer.json, or the folder that has it.
pub fn open(lua: &Lua, path: Value) -> mlua::Result<AnyUserData> {
    const OP: &str = "data.tokenizer";
    let host = host(lua)?;
    let name = text_arg(&host, lua, OP, "the path", &path)?;
    let at = file_or_folder(&host, lua, OP, &name)?;
    let observe = &mut |file: &perilune_policy::Opened| {
        let rest = file.path().strip_prefix(&at).unwrap_or(Path::new(""));
        host.policy.record_file(&Path::new(&name).join(rest).to_string_lossy(), file);
    };
    new(lua, Tokenizer::open(&*host.policy, &at, observe).map_err(|e| fail(&host, lua, OP, e))?)
}

/// `native.byte_tokenizer()`.
pub fn bytes(lua: &Lua, (): ()) -> mlua::Result<AnyUserData> {
    new(lua, Tokenizer::bytes())
}

/// `native.char_tokenizer(text)`.
pub fn chars(lua: &Lua, text: Value) -> mlua::Result<AnyUserData> {
    let text = text_arg(&host(lua)?, lua, "data.chars", "the text", &text)?;
    new(lua, Tokenizer::chars(&text))
}

/// The options of a call: each is read once, and what is left is an error with a suggestion.
struct Options<'a> {
    lua: &'a Lua,
    op: &'static str,
    given: Option<Table>,
}

impl<'a> Options<'a> {
    fn new(lua: &'a Lua, op: &'static str, given: Value, known: &[&str]) -> mlua::Result<Options<'a>> {
        let wrong = |message| Err(errors::in_any_state(lua, op, message, None));
        let given = match given {
            Value::Nil => None,
            Value::Table(t) => Some(t),
            other => return wrong(format!("its options are {}; they must be a table", show(&other))),
        };
        if let Some(t) = &given {
            for pair in t.pairs::<Value, Value>() {
                let (key, _) = pair?;
                let name = key.as_string().map_or_else(|| show(&key), |s| s.to_string_lossy());
                if !known.contains(&name.as_str()) {
                    let near = did_you_mean(&name, known.iter().copied());
                    let near = near.map(|n| format!(" Did you mean '{n}'?")).unwrap_or_default();
                    return wrong(format!("unknown option '{name}' (options: {}).{near}", known.join(", ")));
                }
            }
        }
        Ok(Options { lua, op, given })
    }

    fn get(&self, name: &str) -> mlua::Result<Value> {
        self.given.as_ref().map_or(Ok(Value::Nil), |t| t.get(name))
    }

    fn wrong<T>(&self, name: &str, value: &Value, rule: &str) -> mlua::Result<T> {
        let message = format!("option '{name}' is {}; it must be {rule}", show(value));
        Err(errors::in_any_state(self.lua, self.op, message, None))
    }

    fn flag(&self, name: &str) -> mlua::Result<bool> {
        match self.get(name)? {
            Value::Nil => Ok(false),
            Value::Boolean(b) => Ok(b),
            other => self.wrong(name, &other, "true or false"),
        }
    }

    fn text(&self, name: &str) -> mlua::Result<Option<String>> {
        match self.get(name)? {
            Value::Nil => Ok(None),
            Value::String(s) => Ok(Some(s.to_string_lossy())),
            other => self.wrong(name, &other, "a string"),
        }
    }

    /// One of the words, the first by default.
    fn word(&self, name: &str, words: &[&'static str]) -> mlua::Result<&'static str> {
        let Some(text) = self.text(name)? else { return Ok(words[0]) };
        match words.iter().find(|w| **w == text) {
            Some(word) => Ok(word),
            None => {
                let rule = words.iter().map(|w| format!("\"{w}\"")).collect::<Vec<_>>().join(" or ");
                self.wrong(name, &self.get(name)?, &rule)
            }
        }
    }

    fn parses(&self) -> mlua::Result<bool> {
        Ok(self.word("specials", &["text", "parse"])? == "parse")
    }

    fn render(&self) -> mlua::Result<Render> {
        let tools = match self.get("tools")? {
            Value::String(text) => match serde_json::from_str(&text.to_string_lossy()) {
                Ok(json) => json,
                Err(_) => return self.wrong("tools", &Value::String(text), "a list of schemas, or the JSON of one"),
            },
            other => json::from_lua(self.lua, self.op, "option 'tools'", &other)?,
        };
        let variables = match json::from_lua(self.lua, self.op, "option 'variables'", &self.get("variables")?)? {
            Json::Null => Default::default(),
            Json::Object(map) => map,
            _ => return self.wrong("variables", &self.get("variables")?, "a table of names and values"),
        };
        let date = match self.text("date")? {
            None => Date::default(),
            Some(text) => match Date::parse(&text) {
                Some(date) => date,
                None => return self.wrong("date", &self.get("date")?, "a date like \"2026-11-26\""),
            },
        };
        Ok(Render { add_generation_prompt: self.flag("add_generation_prompt")?, tools, variables, date })
    }

    fn chat(&self) -> mlua::Result<Chat> {
        let train_on = TrainOn::parse(self.word("train_on", &["assistant", "last", "all"])?).unwrap_or_default();
        let max_tokens = match self.get("max_length")? {
            Value::Nil => None,
            other => match as_int(&other).and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0) {
                Some(n) => Some(n),
                None => return self.wrong("max_length", &other, "a number of tokens"),
            },
        };
        Ok(Chat { train_on, parse_specials: self.parses()?, max_tokens, render: self.render()? })
    }

    /// Calls `f` with the template of the option or of the tokenizer.
    fn with_template<T>(
        &self,
        of: &SharedTokenizer,
        f: impl FnOnce(&ChatTemplate) -> perilune_data::Result<T>,
    ) -> mlua::Result<T> {
        let made = match self.text("template")? {
            Some(source) => ChatTemplate::parse(&source).and_then(|template| f(&template)),
            None => of.template().and_then(f),
        };
        made.map_err(|e| fail_in_any_state(self.lua, self.op, e))
    }
}

/// The tokenizer that a stage of records is given.
fn given(lua: &Lua, op: &str, value: &Value) -> mlua::Result<Arc<SharedTokenizer>> {
    shared(value).ok_or_else(|| match host(lua) {
        Ok(host) => {
            let message = format!("the tokenizer is {}", show(value));
            errors::argument(&host, lua, op, message, Some("open one: data.tokenizer(\"folder\")".into()))
        }
        Err(e) => e,
    })
}

/// The function of `records:tokenize(tokenizer, options)`.
pub(crate) fn tokenize(lua: &Lua, tokenizer: &Value, options: Value) -> mlua::Result<Tokenize> {
    const OP: &str = "records:tokenize";
    let o = Options::new(lua, OP, options, &["add_specials", "end_with", "field", "specials", "to"])?;
    let tokenizer = given(lua, OP, tokenizer)?;
    let end = match o.text("end_with")? {
        None => None,
        Some(token) => match tokenizer.tokenizer.id(&token) {
            Some(id) => Some(id),
            None => return o.wrong("end_with", &o.get("end_with")?, "a token of the vocabulary"),
        },
    };
    Ok(Tokenize {
        tokenizer,
        from: o.text("field")?.unwrap_or_else(|| "text".into()),
        to: o.text("to")?.unwrap_or_else(|| "ids".into()),
        encode: Encode { parse_specials: o.parses()?, add_specials: o.flag("add_specials")? },
        end,
    })
}

/// The function of `records:chat(tokenizer, options)`.
pub(crate) fn render_chat(lua: &Lua, tokenizer: &Value, options: Value) -> mlua::Result<RenderChat> {
    const OP: &str = "records:chat";
    let known: Vec<&str> = CHAT.into_iter().chain(["field"]).collect();
    let o = Options::new(lua, OP, options, &known)?;
    let tokenizer = given(lua, OP, tokenizer)?;
    let failed = |e| fail_in_any_state(lua, OP, e);
    let template = o.text("template")?.map(|source| ChatTemplate::parse(&source)).transpose().map_err(failed)?;
    if template.is_none() {
        // A tokenizer without one is an error of this line.
        tokenizer.template().map_err(failed)?;
    }
    let field = o.text("field")?.unwrap_or_else(|| "messages".into());
    Ok(RenderChat { tokenizer, template, field, chat: o.chat()? })
}

/// The function of `records:preference(tokenizer, options)`.
pub(crate) fn preference(lua: &Lua, tokenizer: &Value, options: Value) -> mlua::Result<Preference> {
    const OP: &str = "records:preference";
    const OWN: [&str; 9] =
        ["add_specials", "chosen", "end_with", "keep", "length", "padding", "prompt", "rejected", "too_long"];
    let known: Vec<&str> = OWN.into_iter().chain(RENDER).chain(["specials"]).collect();
    let o = Options::new(lua, OP, options, &known)?;
    let tokenizer = given(lua, OP, tokenizer)?;
    let failed = |e| fail_in_any_state(lua, OP, e);
    let template = o.text("template")?.map(|source| ChatTemplate::parse(&source)).transpose().map_err(failed)?;
    let length = match o.get("length")? {
        Value::Nil => {
            let hint = "name the positions of a row: { length = 128 }";
            return Err(errors::in_any_state(lua, OP, "option 'length' is missing", Some(hint.into())));
        }
        other => match as_int(&other).and_then(|n| usize::try_from(n).ok()).filter(|n| (1..=MAX_LENGTH).contains(n)) {
            Some(n) => n,
            None => return o.wrong("length", &other, "a number of positions"),
        },
    };
    let padding = match o.get("padding")? {
        Value::Nil => 0,
        other => match as_int(&other).filter(|n| (0..=i64::from(i32::MAX)).contains(n)) {
            Some(n) => n,
            None => return o.wrong("padding", &other, "an id"),
        },
    };
    let end = match o.text("end_with")? {
        None => None,
        Some(token) => match tokenizer.tokenizer.id(&token) {
            Some(id) => Some(id),
            None => return o.wrong("end_with", &o.get("end_with")?, "a token of the vocabulary"),
        },
    };
    let keep = match o.get("keep")? {
        Value::Nil => Vec::new(),
        Value::Table(list) => list.sequence_values::<String>().collect::<mlua::Result<_>>()?,
        other => return o.wrong("keep", &other, "a list of fields"),
    };
    let mut fields = ["prompt", "chosen", "rejected"].map(String::from);
    for field in &mut fields {
        if let Some(given) = o.text(field)? {
            *field = given;
        }
    }
    let truncate = o.word("too_long", &["error", "truncate"])? == "truncate";
    let encode = Encode { parse_specials: o.parses()?, add_specials: o.flag("add_specials")? };
    let chat = Chat { train_on: TrainOn::Last, parse_specials: o.parses()?, max_tokens: None, render: o.render()? };
    Ok(Preference { tokenizer, template, fields, length, truncate, padding, end, keep, encode, chat })
}

/// The most positions of a row of a preference.
const MAX_LENGTH: usize = 1 << 20;

const RENDER: [&str; 5] = ["add_generation_prompt", "date", "template", "tools", "variables"];
const CHAT: [&str; 8] =
    ["add_generation_prompt", "date", "max_length", "specials", "template", "tools", "train_on", "variables"];

fn messages(lua: &Lua, op: &str, value: &Value) -> mlua::Result<Vec<Json>> {
    match json::from_lua(lua, op, "a message", value)? {
        Json::Array(list) => Ok(list),
        _ => {
            let message = format!("the messages are {}", show(value));
            let hint = "a conversation is a list: { { role = \"user\", content = \"…\" }, … }";
            Err(errors::in_any_state(lua, op, message, Some(hint.into())))
        }
    }
}

/// Makes a list of numbers.
fn list(lua: &Lua, op: &str, ids: &[u32]) -> mlua::Result<Table> {
    memory_limit::need(lua, (op.to_string(), ids.len() as f64 * 16.0))?;
    lua.create_sequence_from(ids.iter().copied())
}

fn string(lua: &Lua, op: &str, what: &str, value: &Value) -> mlua::Result<String> {
    match value {
        Value::String(s) => Ok(s.to_string_lossy()),
        other => Err(errors::in_any_state(lua, op, format!("{what} is {}; it must be a string", show(other)), None)),
    }
}

fn encode(lua: &Lua, this: &TokenizerData, (text, options): (Value, Value)) -> mlua::Result<Value> {
    const OP: &str = "tokenizer:encode";
    let o = Options::new(lua, OP, options, &["add_specials", "specials", "tensor"])?;
    let text = string(lua, OP, "the text", &text)?;
    let encode = Encode { parse_specials: o.parses()?, add_specials: o.flag("add_specials")? };
    let ids = this.0.tokenizer.encode(&text, encode).map_err(|e| fail_in_any_state(lua, OP, e))?;
    if o.flag("tensor")? {
        let ids: Vec<i64> = ids.into_iter().map(i64::from).collect();
        let Ok(host) = host(lua) else {
            return o.wrong("tensor", &o.get("tensor")?, "false in a worker, which has no device");
        };
        let t = input(&host, lua, HostTensor::from_i64(Shape::of(&[ids.len()]), &ids))?;
        return Ok(Value::UserData(lua.create_userdata(t)?));
    }
    Ok(Value::Table(list(lua, OP, &ids)?))
}

fn decode(lua: &Lua, this: &TokenizerData, (ids, options): (Value, Value)) -> mlua::Result<String> {
    const OP: &str = "tokenizer:decode";
    let o = Options::new(lua, OP, options, &["skip_specials"])?;
    let wrong = |message: String| errors::in_any_state(lua, OP, message, None);
    let id = |i: i64| u32::try_from(i).map_err(|_| wrong(format!("id {i} is no token: ids count from 0")));
    let found: Vec<u32> = match &ids {
        Value::UserData(u) if u.is::<Tensor>() => {
            let t = table::read(lua, &*u.borrow::<Tensor>()?)?;
            if t.dtype.is_float() {
                return Err(wrong(format!("the ids are {}; ids are integers", t.dtype)));
            }
            (0..t.numel()).map(|k| id(t.get_f64(k) as i64)).collect::<mlua::Result<_>>()?
        }
        Value::Table(list) => {
            let one = |v: mlua::Result<Value>| {
                let v = v?;
                id(as_int(&v).ok_or_else(|| wrong(format!("an id is {}; ids are integers", show(&v))))?)
            };
            list.sequence_values::<Value>().map(one).collect::<mlua::Result<_>>()?
        }
        other => return Err(wrong(format!("the ids are {}; they must be a list or a tensor", show(other)))),
    };
    this.0.tokenizer.decode(&found, o.flag("skip_specials")?).map_err(|e| fail_in_any_state(lua, OP, e))
}

fn chat(lua: &Lua, this: &TokenizerData, (value, options): (Value, Value)) -> mlua::Result<Table> {
    const OP: &str = "tokenizer:chat";
    let o = Options::new(lua, OP, options, &CHAT)?;
    let chat = o.chat()?;
    let messages = messages(lua, OP, &value)?;
    let tokenizer = &this.0.tokenizer;
    let sample = o.with_template(&this.0, |template| chat::encode(tokenizer, template, &messages, &chat))?;
    memory_limit::need(lua, (OP.to_string(), sample.ids.len() as f64 * 16.0))?;
    let made = lua.create_table()?;
    made.raw_set("ids", list(lua, OP, &sample.ids)?)?;
    made.raw_set("mask", lua.create_sequence_from(sample.mask.iter().map(|m| u8::from(*m)))?)?;
    remember(lua, &made, view(tokenizer, &sample))?;
    Ok(made)
}

fn render(lua: &Lua, this: &TokenizerData, (value, options): (Value, Value)) -> mlua::Result<String> {
    const OP: &str = "tokenizer:render";
    let o = Options::new(lua, OP, options, &RENDER)?;
    let options = o.render()?;
    let messages = messages(lua, OP, &value)?;
    o.with_template(&this.0, |template| chat::render(&this.0.tokenizer, template, &messages, &options))
}

impl UserData for TokenizerData {
    fn add_methods<M: UserDataMethods<Self>>(methods: &mut M) {
        let methods = &mut crate::boundary::Methods(methods);
        methods.add_method("size", |_, this, ()| Ok(this.0.tokenizer.size()));
        methods.add_method("id", |lua, this, token: Value| {
            let token = string(lua, "tokenizer:id", "the token", &token)?;
            Ok(this.0.tokenizer.id(&token))
        });
        methods.add_method("token", |_, this, id: u32| Ok(this.0.tokenizer.token(id)));
        methods.add_method("encode", encode);
        methods.add_method("decode", decode);
        methods.add_method("chat", chat);
        methods.add_method("render", render);
        methods.add_meta_method(MetaMethod::ToString, |_, this, ()| {
            Ok(format!("tokenizer of {} tokens", this.0.tokenizer.size()))
        });
    }
}

/// How a part of a sample is shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Style {
    /// The loss of predicting it counts.
    pub trained: bool,
    pub special: bool,
    /// The border of a trained span cuts the token.
    pub cut: bool,
}

/// A part of a sample: its text and its style.
pub type Segment = (String, Style);

/// A sample for display.
struct View(Vec<Segment>);

impl UserData for View {}

fn view(tokenizer: &Tokenizer, sample: &Sample) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    let mut shown = 0;
    for (k, span) in sample.spans.iter().enumerate() {
        let style = Style {
            trained: sample.mask[k],
            special: tokenizer.is_special(sample.ids[k]),
            cut: sample.cut.binary_search(&k).is_ok(),
        };
        // Tokens that share a character show it once.
        let text = &sample.text[span.start.max(shown)..span.end.max(shown)];
        shown = shown.max(span.end);
        match segments.last_mut() {
            Some((before, known)) if *known == style => before.push_str(text),
            _ => segments.push((text.to_string(), style)),
        }
    }
    segments
}

/// The key of the weak table of samples and how they are shown.
const VIEWS: &str = "perilune.samples";

/// Remembers how a sample is shown. Samples are plain tables, so that they may cross to other Lua states.
fn remember(lua: &Lua, sample: &Table, view: Vec<Segment>) -> mlua::Result<()> {
    let views: Table = match lua.named_registry_value(VIEWS)? {
        Value::Table(views) => views,
        _ => {
            let (views, meta) = (lua.create_table()?, lua.create_table()?);
            meta.raw_set("__mode", "k")?;
            views.set_metatable(Some(meta))?;
            lua.set_named_registry_value(VIEWS, &views)?;
            views
        }
    };
    views.raw_set(sample, lua.create_userdata(View(view))?)
}

/// The parts of a value that is a sample.
pub(crate) fn segments(lua: &Lua, value: &Value) -> Option<Vec<Segment>> {
    let views: Table = lua.named_registry_value(VIEWS).ok()?;
    let view: AnyUserData = views.raw_get(value.as_table()?).ok()?;
    Some(view.borrow::<View>().ok()?.0.clone())
}

/// A sample as text without colours: trained parts in brackets, special tokens in angle ones.
pub(crate) fn bracketed(segments: &[Segment]) -> String {
    let (mut out, mut open) = (String::new(), false);
    for (text, style) in segments {
        if style.trained != open {
            out.push(if open { ']' } else { '[' });
            open = style.trained;
        }
        if style.special {
            out.extend(["⟨", text.as_str(), "⟩"]);
        } else {
            out.push_str(text);
        }
    }
    if open {
        out.push(']');
    }
    out
}
