//! Renders chat templates by minijinja, set as transformers sets Jinja.
//!
//! `trim_blocks`, `lstrip_blocks`, loop controls, the methods of Python's strings and dicts, `raise_exception`, `strftime_now` with
//! a fixed date, and `tojson` as `json.dumps`. A limit of instructions ends templates that loop.

use super::date::Date;
use super::marks::{self, Sentinels};
use super::python;
use minijinja::value::{Kwargs, Value as Jinja};
use minijinja::{AutoEscape, Environment, ErrorKind};
use perilune_data::{Error, Result};
use serde_json::{Map, Value};
use std::collections::HashSet;

/// Instructions of one rendering; a conversation takes some thousands.
const FUEL: u64 = 20_000_000;
const NAME: &str = "chat_template";

/// A template that has been parsed.
#[derive(Debug)]
pub struct ChatTemplate {
    source: String,
    /// Without sentinels, and with them if the template has generation marks.
    plain: Environment<'static>,
    marked: Option<(Environment<'static>, Sentinels)>,
    hash: String,
}

/// What a rendering takes beside the messages.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Render {
    /// Ends the text with the header of an answer.
    pub add_generation_prompt: bool,
    /// JSON schemas of tools; null without.
    pub tools: Value,
    /// Further variables of the template.
    pub variables: Map<String, Value>,
    /// The date of `strftime_now`.
    pub date: Date,
}

impl ChatTemplate {
    /// Parses a template.
    ///
    /// # Errors
    /// Its syntax is wrong.
    pub fn parse(source: &str) -> Result<ChatTemplate> {
        let plain = environment(marks::replace(source, None).into_owned())?;
        let marked = match marks::has_marks(source) {
            true => {
                let [open, close] = unused([source])?;
                let sentinels = Sentinels { open, close };
                Some((environment(marks::replace(source, Some(sentinels)).into_owned())?, sentinels))
            }
            false => None,
        };
        let hash = blake3::hash(source.as_bytes()).to_hex().to_string();
        Ok(ChatTemplate { source: source.to_string(), plain, marked, hash })
    }

    pub fn source(&self) -> &str {
        &self.source
    }

    /// BLAKE3 of its text.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Whether the template marks what a model generates.
    pub fn has_marks(&self) -> bool {
        self.marked.is_some()
    }

    /// Renders messages. `specials` are variables like `bos_token`.
    ///
    /// # Errors
    /// The template raises an exception, or takes too long.
    pub fn render(&self, messages: &[Value], specials: &Map<String, Value>, options: &Render) -> Result<String> {
        run(&self.plain, messages, specials, options)
    }

    /// Renders messages with sentinels where generation marks stand.
    pub(super) fn render_marked(
        &self,
        messages: &[Value],
        specials: &Map<String, Value>,
        options: &Render,
    ) -> Option<Result<(String, Sentinels)>> {
        let (environment, sentinels) = self.marked.as_ref()?;
        Some(run(environment, messages, specials, options).map(|text| (text, *sentinels)))
    }
}

/// Characters for private use that no text has.
pub(super) fn unused<'a, const N: usize>(texts: impl IntoIterator<Item = &'a str>) -> Result<[char; N]> {
    let used: HashSet<char> = texts.into_iter().flat_map(str::chars).filter(|c| *c >= '\u{e000}').collect();
    let mut free = ('\u{f0000}'..='\u{ffffd}').chain('\u{e000}'..='\u{f8ff}').filter(|c| !used.contains(c));
    let mut found = ['\0'; N];
    for one in &mut found {
        *one = free.next().ok_or_else(|| Error::argument("the messages", "use all characters for private use"))?;
    }
    Ok(found)
}

fn environment(source: String) -> Result<Environment<'static>> {
    let mut env = Environment::new();
    env.set_trim_blocks(true);
    env.set_lstrip_blocks(true);
    env.set_fuel(Some(FUEL));
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.set_formatter(|out, _, value| out.write_str(&python::text(value)).map_err(minijinja::Error::from));
    env.add_filter("tojson", |value: Jinja, options: Kwargs| python::json(&value, &python::Layout::of(&options)?));
    env.add_function("raise_exception", |message: String| -> std::result::Result<Jinja, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
    });
    env.add_template_owned(NAME, source).map_err(|e| failed(&e))?;
    Ok(env)
}

/// Begins the message of an exception of the template itself.
const RAISED: &str = "raise_exception: ";

fn failed(e: &minijinja::Error) -> Error {
    let detail = e.detail().unwrap_or_default();
    if let Some(message) = detail.strip_prefix(RAISED) {
        return Error::argument("the chat template", format!("refuses these messages: {}", escaped(message)));
    }
    let rule = match e.kind() {
        ErrorKind::OutOfFuel => format!("takes more than {FUEL} instructions"),
        kind => format!("{kind}: {}", escaped(detail)),
    };
    let line = e.line().map(|line| format!(", line {line}")).unwrap_or_default();
    Error::argument(format!("the chat template{line}"), rule)
}

/// Text of a template or a message, without control characters.
fn escaped(text: &str) -> String {
    text.chars().take(300).flat_map(|c| if c.is_control() { c.escape_debug().collect() } else { vec![c] }).collect()
}

fn run(
    env: &Environment<'static>,
    messages: &[Value],
    specials: &Map<String, Value>,
    options: &Render,
) -> Result<String> {
    let mut all = Map::new();
    all.extend(specials.clone());
    all.insert("messages".into(), messages.to_vec().into());
    all.insert("tools".into(), options.tools.clone());
    all.insert("documents".into(), Value::Null);
    all.insert("add_generation_prompt".into(), options.add_generation_prompt.into());
    all.extend(options.variables.clone());
    let date = options.date;
    let now = Jinja::from_function(move |format: String| {
        let unknown = |d| minijinja::Error::new(ErrorKind::InvalidOperation, format!("strftime_now does not know {d}"));
        date.format(&format).map_err(unknown)
    });
    let context = minijinja::context! { strftime_now => now, ..Jinja::from_serialize(&all) };
    let template = env.get_template(NAME).map_err(|e| failed(&e))?;
    template.render(context).map_err(|e| failed(&e))
}
