//! Completes names in scope, fields and methods of a path, options of a known function, file names in strings.
//!
//! No part of a line is run: paths are followed by raw reads, through `__index` tables, and by the fields that the `perilune`
//! module loads on first read. For a field that a table makes again at each read (`run.batch`), its `__names` lists the fields.
//! The result of a call is assumed to be a tensor.

use super::Console;
use super::lexer::{Kind, Token, tokens};
use crate::args::signature;
use crate::loader::FIELDS;
use crate::tensor::Tensor;
use mlua::{Function, Lua, Table, Value};
use perilune_core::ops::{self, Ty};
use std::collections::BTreeSet;

/// Candidates for the text from byte `start` of the line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Completion {
    pub start: usize,
    pub words: Vec<String>,
    /// Whether the text is a file name, which the prompt completes.
    pub file: bool,
}

const TENSOR_FIELDS: [&str; 5] = ["device", "dtype", "grad", "shape", "trainable"];
const TENSOR_METHODS: [&str; 12] =
    ["assign", "backward", "dim", "free", "full", "is_evaluated", "is_state", "item", "numel", "size", "tolist", "eq"];

/// Parses `a.b:c`, and nothing else.
pub fn is_path(text: &str) -> bool {
    let list = tokens(text);
    !list.is_empty()
        && list.iter().enumerate().all(|(k, t)| match k % 2 {
            0 => matches!(t.kind, Kind::Name),
            _ => matches!(&text[t.start..t.end], "." | ":"),
        })
        && list.len() % 2 == 1
}

/// Returns a field of a table: its own, of its `__index` table, or one that it loads.
pub fn member(lua: &Lua, t: &Table, name: &str) -> Option<Value> {
    let mut at = t.clone();
    for _ in 0..8 {
        let v: Value = at.raw_get(name).ok()?;
        if !v.is_nil() {
            return Some(v);
        }
        if is_module(lua, &at) {
            return FIELDS.contains(&name).then(|| at.get::<Value>(name).ok()).flatten();
        }
        at = behind(&at)?;
    }
    None
}

/// Returns the names of a table's fields, including those of its `__index` tables.
pub fn members(lua: &Lua, t: &Table) -> Vec<String> {
    let mut out = BTreeSet::new();
    let mut at = Some(t.clone());
    for _ in 0..8 {
        let Some(table) = at else { break };
        let names =
            table.pairs::<Value, Value>().flatten().filter_map(|(k, _)| k.as_string().map(|s| s.to_string_lossy()));
        out.extend(names.filter(|n| !n.starts_with("__")));
        // Fields that are computed when they are read.
        let made = table.metatable().and_then(|m| m.raw_get::<Option<Vec<String>>>("__made").ok().flatten());
        out.extend(made.unwrap_or_default());
        if is_module(lua, &table) {
            out.extend(FIELDS.map(str::to_string));
        }
        at = behind(&table);
    }
    out.into_iter().collect()
}

/// Returns whether the table is the `perilune` module, which loads its parts on first use.
fn is_module(lua: &Lua, t: &Table) -> bool {
    let find = || lua.named_registry_value::<Table>("perilune.loaded").ok()?.raw_get::<Table>("perilune").ok();
    find().is_some_and(|pl| pl == *t)
}

/// Returns the table for missing fields: its `__index`, or its `__methods`.
fn behind(t: &Table) -> Option<Table> {
    let meta = t.metatable()?;
    ["__index", "__methods"].iter().find_map(|key| match meta.raw_get::<Value>(*key) {
        Ok(Value::Table(t)) => Some(t),
        _ => None,
    })
}

fn tensor_words(only_methods: bool) -> Vec<String> {
    let methods = ops::all().iter().filter(|o| !o.sig.is_empty() && signature(o).is_method).map(|o| o.name);
    let fields = TENSOR_FIELDS.iter().filter(|_| !only_methods);
    let mut out: Vec<String> = methods.chain(TENSOR_METHODS).chain(fields.copied()).map(str::to_string).collect();
    out.sort();
    out.dedup();
    out
}

impl Console {
    /// Returns the value of a path without running anything.
    pub(super) fn resolve(&self, path: &str) -> Option<Value> {
        let list = tokens(path);
        let mut parts = list.iter().filter(|t| t.kind != Kind::Symbol).map(|t| (t.kind, &path[t.start..t.end]));
        let mut at = self.named(parts.next()?.1)?;
        for (kind, part) in parts {
            at = match &at {
                Value::Table(t) if kind == Kind::Number => t.raw_get(part.parse::<i64>().ok()?).ok()?,
                Value::Table(t) if kind != Kind::Name => member(&self.lua, t, part.trim_matches(['"', '\'']))?,
                Value::Table(t) => member(&self.lua, t, part)?,
                Value::UserData(u) if u.is::<Tensor>() => self.method(part)?,
                _ => return None,
            };
        }
        Some(at)
    }

    /// Returns the value of a name at the prompt: a local at a breakpoint, or a global.
    fn named(&self, name: &str) -> Option<Value> {
        if let Some(frame) = &self.frame
            && frame.borrow_mut().fetch().is_ok()
            && frame.borrow().has(name)
        {
            let found = frame.borrow().get(name).ok();
            let _ = frame.borrow().clear();
            return found;
        }
        let tables = [self.base.clone(), self.lua.globals()];
        let found = tables.iter().find_map(|t| t.raw_get::<Value>(name).ok().filter(|v| !v.is_nil()));
        found.or_else(|| super::scope::part(&self.lua, name).map(Value::Table))
    }

    /// Returns the fields of a value that is computed when the last name of a path is read.
    fn made(&self, path: &str) -> Option<Vec<String>> {
        let (owner, name) = path.rsplit_once('.')?;
        let Value::Table(owner) = self.resolve(owner)? else { return None };
        let names: Function = owner.metatable()?.raw_get::<Table>("__names").ok()?.raw_get(name).ok()?;
        // Reading it may draw random numbers, which must not change those of the line being typed.
        let rng = self.host.engine.borrow().recorder.graph.rng;
        let found = names.call::<Vec<String>>(owner).ok();
        self.host.engine.borrow_mut().recorder.graph.rng = rng;
        found.map(|mut names| {
            names.sort();
            names
        })
    }

    /// Returns the module function of a tensor's method.
    fn method(&self, name: &str) -> Option<Value> {
        let pl: Table = self.base.raw_get("pl").ok()?;
        pl.raw_get::<Value>(name).ok().filter(|v| !v.is_nil())
    }

    /// Returns the completions at byte `pos` of a line.
    pub fn complete(&self, line: &str, pos: usize) -> Completion {
        let text = &line[..pos];
        let list = tokens(text);
        let word = |t: &Token| &text[t.start..t.end];
        if let Some(last) = list.last()
            && last.end == text.len()
        {
            match last.kind {
                Kind::String { open: true } if !word(last).starts_with('[') => return self.in_string(text, &list),
                Kind::String { .. } | Kind::Comment | Kind::Number => return Completion::default(),
                _ => {}
            }
        }
        // The word being typed, perhaps empty, and the text before it.
        let (start, before) = match list.split_last() {
            Some((last, before)) if last.end == text.len() && matches!(last.kind, Kind::Name | Kind::Keyword) => {
                (last.start, before)
            }
            _ => (text.len(), &list[..]),
        };
        let typed = &text[start..];
        let mut words = match before.last().map(word) {
            Some(dot @ ("." | ":")) => self.after(text, &before[..before.len() - 1], dot == ":"),
            Some("{" | ",") if !self.options(text, before).is_empty() => {
                self.options(text, before).into_iter().map(|name| format!("{name} = ")).collect()
            }
            // Offer nothing for an empty word.
            _ if typed.is_empty() => Vec::new(),
            _ => self.names(),
        };
        words.retain(|w| w.starts_with(typed));
        Completion { start, words, file: false }
    }

    fn names(&self) -> Vec<String> {
        let mut out: BTreeSet<String> = super::lexer::KEYWORDS.iter().map(|k| k.to_string()).collect();
        for table in [self.base.clone(), self.lua.globals()] {
            let keys = table.pairs::<Value, Value>().flatten();
            out.extend(keys.filter_map(|(k, _)| k.as_string().map(|s| s.to_string_lossy())));
        }
        out.extend(self.locals());
        out.extend(super::scope::PARTS.map(str::to_string));
        out.retain(|n| !n.starts_with("__"));
        out.into_iter().collect()
    }

    /// Returns fields or methods for the `.` or `:` that follows `before`.
    fn after(&self, text: &str, before: &[Token], methods: bool) -> Vec<String> {
        let Some(path) = path_before(text, before) else {
            // A call or an index, as in `x:softmax(-1):`.
            let closes = before.last().is_some_and(|t| matches!(&text[t.start..t.end], ")" | "]"));
            return if closes { tensor_words(methods) } else { Vec::new() };
        };
        match self.resolve(&path) {
            Some(Value::Table(t)) => {
                let mut out = members(&self.lua, &t);
                if methods {
                    out.retain(|n| member(&self.lua, &t, n).is_some_and(|v| v.is_function()));
                }
                out
            }
            Some(Value::UserData(u)) if u.is::<Tensor>() => tensor_words(methods),
            Some(Value::String(_)) if methods => {
                let string: Option<Table> = self.lua.globals().raw_get("string").ok();
                string.map(|t| members(&self.lua, &t)).unwrap_or_default()
            }
            // An element of a value that is not a table.
            None if path.ends_with(']') => tensor_words(methods),
            None => match (self.made(&path), path.rsplit_once('.')) {
                (Some(_), _) if methods => Vec::new(),
                (Some(names), _) => names,
                (None, Some((batch, field)))
                    if self.made(batch).is_some_and(|names| names.iter().any(|n| n == field)) =>
                {
                    tensor_words(methods)
                }
                _ => Vec::new(),
            },
            _ => Vec::new(),
        }
    }

    /// Returns the function whose call is open at the end of `before`, and whether the innermost open bracket is a table in it.
    fn call(&self, text: &str, before: &[Token]) -> Option<(String, Option<Function>, bool)> {
        let word = |t: &Token| &text[t.start..t.end];
        let mut depth = 0;
        let mut table = false;
        for (k, t) in before.iter().enumerate().rev() {
            match word(t) {
                ")" | "]" | "}" if t.kind == Kind::Symbol => depth += 1,
                "(" | "[" | "{" if t.kind == Kind::Symbol && depth > 0 => depth -= 1,
                "{" if t.kind == Kind::Symbol && !table => {
                    table = true;
                    // `optim.schedule { … }` is a call too.
                    if let Some(path) = path_before(text, &before[..k]) {
                        return Some(self.function(path, true));
                    }
                }
                "(" if t.kind == Kind::Symbol => {
                    let path = match path_before(text, &before[..k]) {
                        Some(path) => path,
                        // The name after `):`, as in `x:sum():softmax(`.
                        None => before[..k].last().filter(|t| t.kind == Kind::Name).map(|t| word(t).to_string())?,
                    };
                    return Some(self.function(path, table));
                }
                "{" | "[" if t.kind == Kind::Symbol => return None,
                _ => {}
            }
        }
        None
    }

    fn function(&self, path: String, table: bool) -> (String, Option<Function>, bool) {
        let found = match self.resolve(&path) {
            Some(Value::Function(f)) => Some(f),
            _ => None,
        };
        (path, found, table)
    }

    /// Returns option names, if an options table of a known function is open and a name is expected.
    fn options(&self, text: &str, before: &[Token]) -> Vec<String> {
        let Some((path, found, true)) = self.call(text, before) else { return Vec::new() };
        // A table as first argument is a shape or a list, unless the function takes only options.
        let open = before.iter().rposition(|t| &text[t.start..t.end] == "{").unwrap_or(0);
        let first = open > 0 && &text[before[open - 1].start..before[open - 1].end] == "(";
        let last = path.rsplit(['.', ':']).next().unwrap_or_default();
        let native = found.as_ref().is_none_or(|f| f.info().what == "C");
        match ops::by_name(last).filter(|o| native && !o.sig.is_empty()) {
            Some(op) => {
                let sig = signature(op);
                let method = path.contains(':') || path == last;
                if first && sig.params[..sig.positional].get(usize::from(method)).is_some_and(|p| !p.optional) {
                    return Vec::new();
                }
                sig.params[sig.positional..].iter().map(|p| p.name.to_string()).collect()
            }
            None => found.map(|f| super::help::options_of(&f, last, first)).unwrap_or_default(),
        }
    }

    /// Completes an open string: words of an option or argument with fixed words, else file names.
    fn in_string(&self, text: &str, list: &[Token]) -> Completion {
        let Some((open, before)) = list.split_last() else { return Completion::default() };
        let start = open.start + 1;
        let typed = &text[start..];
        let word = |t: &Token| &text[t.start..t.end];
        let mut words = Vec::new();
        if let Some((path, _, _)) = self.call(text, before)
            && let Some(op) = ops::by_name(path.rsplit(['.', ':']).next().unwrap_or_default())
        {
            let name = match before {
                [.., name, equals] if word(equals) == "=" => Some(word(name)),
                _ => None,
            };
            let sig = signature(op);
            words = match sig.params.iter().find(|p| Some(p.name) == name).map(|p| &p.ty) {
                Some(Ty::Str(list) | Ty::IntsOr(list)) => list.iter().map(|w| w.to_string()).collect(),
                Some(Ty::DType) => perilune_core::DType::ALL.map(|d| d.name().to_string()).to_vec(),
                _ => Vec::new(),
            };
        }
        if let [.., require] = before
            && word(require) == "require"
        {
            words = crate::loader::public_modules().map(String::from).collect();
            words.push("perilune".into());
        }
        let file = words.is_empty();
        words.retain(|w| w.starts_with(typed));
        Completion { start, words, file }
    }
}

/// Returns the path at the end of `before`: `run.model[1].weight`.
fn path_before(text: &str, before: &[Token]) -> Option<String> {
    let word = |t: &Token| &text[t.start..t.end];
    let mut k = before.len();
    loop {
        // `[1]`, `["weight"]`.
        while let [.., open, index, close] = &before[..k]
            && (word(open), word(close)) == ("[", "]")
            && matches!(index.kind, Kind::Number | Kind::String { open: false })
        {
            k -= 3;
        }
        if k == 0 || before[k - 1].kind != Kind::Name {
            return None;
        }
        k -= 1;
        match k.checked_sub(1).map(|d| word(&before[d])) {
            Some("." | ":") => k -= 1,
            _ => break,
        }
    }
    // `f().x` is not a path.
    Some(before[k..].iter().map(word).collect())
}
