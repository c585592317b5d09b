//! Implements `?x` and `help(x)`: signature, doc and an example. Those of ops are in the registry; functions of the standard
//! library and of the user's files are documented by the comments above them; the module's other functions by the editor stubs.

use super::Console;
use super::lexer::{Kind, tokens};
use crate::args::{self, signature};
use crate::reference;
use crate::tensor::Tensor;
use mlua::{Function, Lua, Table, Value};
use perilune_core::error::did_you_mean;
use perilune_core::ops::{self, Op};
use std::fmt::Write;

impl Console {
    /// Returns the help for a name, a path (`run.model`), a method (`x:softmax`) or the value of any other expression.
    pub fn describe(&self, text: &str) -> String {
        let text = text.trim().trim_end_matches('?').trim();
        let found = if super::complete::is_path(text) { self.resolve(text) } else { None };
        describe(&self.lua, text, found)
    }
}

/// `help(x)`, where x is a name in quotes, a function, a tensor, a module or any table.
pub fn help(lua: &Lua, what: Value) -> mlua::Result<String> {
    Ok(match &what {
        Value::Nil => {
            "help(x) or ?x: signature, doc and example of a function, a method, a module; ?pl.softmax, ?x:softmax, \
                       ?pl.nn.Linear. :help lists the prompt's commands"
                .into()
        }
        Value::String(s) => {
            let name = s.to_string_lossy();
            let loaded: Table = lua.named_registry_value("perilune.loaded")?;
            let mut at: Value = loaded.raw_get("perilune")?;
            for part in name.trim_start_matches("pl.").split(['.', ':']) {
                at = match &at {
                    Value::Table(t) if !part.is_empty() => super::complete::member(lua, t, part).unwrap_or(Value::Nil),
                    _ => Value::Nil,
                };
            }
            describe(lua, &name, (!at.is_nil()).then_some(at))
        }
        other => describe(lua, "", Some(other.clone())),
    })
}

fn describe(lua: &Lua, text: &str, found: Option<Value>) -> String {
    let last = text.rsplit(['.', ':']).next().unwrap_or(text).trim();
    let op = ops::by_name(last).filter(|o| !o.sig.is_empty());
    match &found {
        Some(Value::Function(f)) => {
            let name = if last.is_empty() { native_name(lua, f) } else { Some(last.to_string()) };
            let op = name.as_deref().and_then(ops::by_name).filter(|o| !o.sig.is_empty());
            let own = library_name(lua, f);
            match (op, function(f)) {
                (_, Some(text)) => of_library(own.as_deref(), text),
                (Some(op), None) => of_op(op),
                _ => match name.as_deref().and_then(of_stub) {
                    Some(text) => of_library(name.as_deref(), text),
                    None => super::value::function(f),
                },
            }
        }
        Some(Value::UserData(u)) if u.is::<Tensor>() => match u.borrow::<Tensor>() {
            Ok(t) => format!(
                "{}\n  fields: shape, dtype, device, grad, trainable\n  methods: x:sum(), x:softmax(-1), x:tolist() …; x:<Tab> lists them, ?x:softmax says more",
                super::value::head(&t)
            ),
            Err(_) => "a tensor".into(),
        },
        Some(Value::Table(t)) => of_table(lua, text, t),
        Some(v) => super::value::tostring(lua, v).map(|s| format!("{} {s}", v.type_name())).unwrap_or_default(),
        None => match (op, of_stub(last)) {
            (Some(op), _) => of_op(op),
            (None, Some(text)) => of_library(Some(last), text),
            _ => {
                let names = ops::all().iter().filter(|o| !o.sig.is_empty()).map(|o| o.name);
                let near = did_you_mean(last, names).map(|n| format!(". Did you mean {n}?")).unwrap_or_default();
                format!("there is no help on '{text}'{near}")
            }
        },
    }
}

/// Returns the name of a function of the `perilune` module.
fn native_name(lua: &Lua, f: &Function) -> Option<String> {
    let loaded: Table = lua.named_registry_value("perilune.loaded").ok()?;
    let pl: Table = loaded.raw_get("perilune").ok()?;
    pl.pairs::<String, Value>().flatten().find(|(_, v)| matches!(v, Value::Function(g) if g == f)).map(|(name, _)| name)
}

/// Returns the qualified name of a library function, such as `nn.Linear` or `augment.text.swap`.
fn library_name(lua: &Lua, f: &Function) -> Option<String> {
    let loaded: Table = lua.named_registry_value("perilune.loaded").ok()?;
    let pl: Table = loaded.raw_get("perilune").ok()?;
    let named = |t: Table| {
        t.pairs::<String, Value>()
            .flatten()
            .find(|(_, v)| matches!(v, Value::Function(g) if g == f))
            .map(|(name, _)| name)
    };
    for module in crate::loader::FIELDS {
        // A part that has not been loaded cannot contain the function.
        let Ok(Value::Table(t)) = pl.raw_get::<Value>(module) else { continue };
        if let Some(name) = named(t.clone()) {
            return Some(format!("{module}.{name}"));
        }
        for (part, inner) in t.pairs::<String, Value>().flatten() {
            let Value::Table(inner) = inner else { continue };
            if let Some(name) = named(inner) {
                return Some(format!("{module}.{part}.{name}"));
            }
        }
    }
    named(pl)
}

/// Formats the help of a function under the name known to the user, with an example.
fn of_library(name: Option<&str>, text: String) -> String {
    let head = text.lines().next().unwrap_or_default();
    // `Run:step(n)` already has the form of a method.
    let method = head.split_once('(').map(|h| h.0.trim().replace(':', "."));
    let Some(example) = name.into_iter().chain(method.as_deref()).find_map(super::examples::library) else {
        return text;
    };
    let mut out = text.clone();
    if let Some(short) = name.and_then(|n| n.rsplit('.').next())
        && !head.contains(&format!("{short}("))
    {
        let arguments = head.find('(').map_or("()", |k| &head[k..]);
        out = text.replacen(head, &format!("{short}{arguments}"), 1);
    }
    format!("{out}\n  example: {example}")
}

fn of_op(op: &'static Op) -> String {
    let sig = signature(op);
    let mut out = args::usage(op);
    if sig.is_method {
        let rest: Vec<String> = sig.params[1..sig.positional]
            .iter()
            .map(|p| if p.optional { format!("[{}]", p.name) } else { p.name.to_string() })
            .collect();
        let _ = write!(out, "   or   {}:{}({})", sig.params[0].name, op.name, rest.join(", "));
    }
    let _ = write!(out, "\n  {}", op.doc.replace('\n', "\n  "));
    for p in &sig.params[sig.positional..] {
        let default = p.default_text.map(|d| format!(", default {d}")).unwrap_or_default();
        let _ = write!(out, "\n    {}: {}{default}", p.name, args::want(&p.ty));
    }
    if let Some(example) = example(op) {
        let _ = write!(out, "\n  example: {example}");
    }
    out
}

/// Formats a call with one of the op's test inputs, as Lua.
pub fn example(op: &'static Op) -> Option<String> {
    op.samples.iter().find_map(|s| of_sample(op, s))
}

fn of_sample(op: &'static Op, text: &str) -> Option<String> {
    let sig = signature(op);
    let (mut positional, mut named) = (Vec::new(), Vec::new());
    for (k, part) in split(text).into_iter().enumerate() {
        let (name, value) = match part.split_once('=') {
            Some((name, value)) if name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') => (Some(name), value),
            _ => (None, part),
        };
        let at = match name {
            Some(name) => sig.params.iter().position(|p| p.name == name)?,
            None => k,
        };
        let value = of_argument(value)?;
        if at < sig.positional && at == positional.len() {
            positional.push(value);
        } else {
            named.push(format!("{} = {value}", sig.params.get(at)?.name));
        }
    }
    // A named argument cannot replace a positional one in Lua.
    if named.iter().any(|n| sig.params[..sig.positional].iter().any(|p| n.starts_with(&format!("{} =", p.name)))) {
        return None;
    }
    if !named.is_empty() {
        positional.push(format!("{{ {} }}", named.join(", ")));
    }
    Some(format!("pl.{}({})", op.name, positional.join(", ")))
}

/// Splits a sample at its outermost commas.
fn split(text: &str) -> Vec<&str> {
    let (mut out, mut depth, mut start, mut quoted) = (Vec::new(), 0, 0, false);
    for (k, c) in text.char_indices() {
        match c {
            '\'' => quoted = !quoted,
            '(' | '[' if !quoted => depth += 1,
            ')' | ']' if !quoted => depth -= 1,
            ',' if depth == 0 && !quoted => {
                out.push(text[start..k].trim());
                start = k + 1;
            }
            _ => {}
        }
    }
    out.push(text[start..].trim());
    out.retain(|p| !p.is_empty());
    out
}

fn of_argument(text: &str) -> Option<String> {
    if let Some(inside) = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')) {
        let parts: Option<Vec<String>> = split(inside).into_iter().map(of_argument).collect();
        return Some(format!("{{ {} }}", parts?.join(", "))).map(|t| t.replace("{  }", "{}"));
    }
    if let Some(word) = text.strip_prefix('\'').and_then(|t| t.strip_suffix('\'')) {
        return Some(format!("\"{word}\""));
    }
    if matches!(text, "true" | "false" | "nil") || text.parse::<f64>().is_ok() {
        return Some(text.into());
    }
    let (kind, rest) = text.split_once('(')?;
    let rest = rest.strip_suffix(')')?;
    let (shape, bounds) = match (kind, rest.split_once(';')) {
        ("i", Some((high, shape))) => (shape, high),
        (_, Some((shape, bounds))) => (shape, bounds),
        (_, None) => (rest, ""),
    };
    // An empty tensor is a test, not an example.
    if shape.split(',').any(|d| d.trim() == "0") {
        return None;
    }
    let shape = format!("{{{}}}", split(shape).join(", "));
    match kind {
        "f" if bounds.is_empty() => Some(format!("pl.randn({shape})")),
        "f" => {
            let (low, high) = bounds.split_once(',')?;
            let (low, high): (f64, f64) = (low.trim().parse().ok()?, high.trim().parse().ok()?);
            Some(format!("pl.rand({shape}) * {} - {}", high - low, -low))
        }
        "p" => Some(format!("pl.rand({shape}) + 0.5")),
        "u" => Some(format!("pl.rand({shape}) - 0.5")),
        "i" => Some(format!("pl.randint(0, {bounds}, {shape})")),
        "b" => Some(format!("pl.randn({shape}):gt(0)")),
        _ => None,
    }
}

/// Returns the documentation of a module function in the editor stubs: its comment, then its signature.
fn of_stub(name: &str) -> Option<String> {
    let text = reference::STUBS_HEAD;
    let at = [format!("function pl.{name}("), format!("function Tensor:{name}(")]
        .iter()
        .find_map(|head| text.lines().position(|l| l.starts_with(head.as_str())))?;
    let lines: Vec<&str> = text.lines().collect();
    Some(with_comment(&lines, at, lines[at].trim_end_matches(" end")))
}

/// Returns a Lua function's signature line and the comment above it, from its file.
fn function(f: &Function) -> Option<String> {
    let info = f.info();
    let name = info.source.as_deref()?.strip_prefix('@')?.to_string();
    let line = info.line_defined?;
    let embedded = name.strip_prefix("perilune/").and_then(|path| {
        crate::loader::stdlib_files().iter().find(|(_, p, _)| *p == path).map(|(_, _, text)| text.to_string())
    });
    let text = match embedded {
        Some(text) => text,
        None => crate::source_text::text(&name)?.to_string(),
    };
    let lines: Vec<&str> = text.lines().collect();
    let at = line.checked_sub(1).filter(|at| *at < lines.len())?;
    Some(format!("{}\n  {name}:{line}", with_comment(&lines, at, lines[at].trim())))
}

/// Returns `Linear(in_dim, out_dim, opts)`, then the comment directly above line `at`.
fn with_comment(lines: &[&str], at: usize, signature: &str) -> String {
    let signature = signature.trim_start_matches("local ").trim_start_matches("function ");
    let signature = match signature.find(')') {
        Some(end) => &signature[..=end],
        None => signature,
    };
    let mut first = at;
    while first > 0 && lines[first - 1].trim_start().starts_with("--") {
        first -= 1;
    }
    let mut out = signature.to_string();
    for line in &lines[first..at] {
        let line = line.trim_start().trim_start_matches('-').trim();
        let line = match line.strip_prefix('@') {
            None => line.to_string(),
            Some(tag) => match tag.split_once(' ') {
                Some(("param", rest)) => {
                    let class = rest.split_once(' ').map_or("", |r| r.1).trim_end_matches('?');
                    let options = if class.ends_with("Options") { class_fields(class) } else { Vec::new() };
                    let lines = options.iter().map(|(name, rest)| format!("\n      {name} {rest}"));
                    format!("  {rest}{}", lines.collect::<String>())
                }
                Some(("return", rest)) => format!("  -> {rest}"),
                Some(("overload", rest)) => format!("  or {rest}"),
                _ => continue,
            },
        };
        let _ = write!(out, "\n  {line}");
    }
    out
}

/// Describes a table by its functions with the first lines of their docs.
fn of_table(lua: &Lua, text: &str, t: &Table) -> String {
    let speaks = t.metatable().is_some_and(|m| m.raw_get::<Value>("__tostring").is_ok_and(|v| !v.is_nil()));
    let mut out =
        if speaks { super::value::tostring(lua, &Value::Table(t.clone())).unwrap_or_default() } else { String::new() };
    let mut names = super::complete::members(lua, t);
    names.sort();
    let mut rest = Vec::new();
    for name in names {
        let Some(Value::Function(f)) = super::complete::member(lua, t, &name) else {
            rest.push(name);
            continue;
        };
        let said =
            function(&f).or_else(|| ops::by_name(&name).filter(|o| !o.sig.is_empty()).map(of_op)).unwrap_or_default();
        let mut lines = said.lines();
        let (head, doc) =
            (lines.next().unwrap_or(&name).to_string(), lines.next().unwrap_or_default().trim().to_string());
        let head = head.split_once("   or   ").map_or(head.as_str(), |h| h.0);
        let doc: String = doc.chars().take(70).collect();
        let _ = write!(
            out,
            "{}  {:<40} {doc}",
            if out.is_empty() { "" } else { "\n" },
            head.trim_start_matches("methods:")
        );
    }
    if !rest.is_empty() {
        let _ = write!(out, "{}  holds {}", if out.is_empty() { "" } else { "\n" }, rest.join(", "));
    }
    if out.is_empty() { format!("{text}: an empty table") } else { out }
}

/// Returns the options of a function's trailing table from the comment above it: `opts {bias?: boolean}` or a class of fields.
/// With `first`, only if the options are its first argument. `name` is its name in the module.
pub fn options_of(f: &Function, name: &str, first: bool) -> Vec<String> {
    let Some(text) = function(f).or_else(|| of_stub(name)) else { return Vec::new() };
    if first && !text.lines().next().is_some_and(|head| head.contains("(o")) {
        return Vec::new();
    }
    let Some(line) = text
        .lines()
        .map(str::trim)
        .find(|l| ["opts ", "opts? ", "options ", "options? "].iter().any(|p| l.starts_with(p)))
    else {
        return Vec::new();
    };
    let ty = line.split_once(' ').map_or("", |l| l.1);
    if ty.starts_with('{') {
        return fields(ty);
    }
    let class = ty.split(|c: char| !(c.is_alphanumeric() || c == '.' || c == '_')).next().unwrap_or_default();
    if class.is_empty() {
        return Vec::new();
    }
    class_fields(class).into_iter().map(|f| f.0).collect()
}

/// Returns the fields of a class of the library with types and docs; those of its parent class first.
fn class_fields(class: &str) -> Vec<(String, String)> {
    let mut out = Vec::new();
    for (_, _, text) in crate::loader::stdlib_files() {
        let mut on = false;
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("---@class ") {
                let (name, base) = rest.split_once(':').unwrap_or((rest, ""));
                on = name.split(' ').next() == Some(class);
                if on && !base.trim().is_empty() {
                    out.extend(class_fields(base.trim()));
                }
            } else if let (true, Some(rest)) = (on, line.strip_prefix("---@field ")) {
                let (name, rest) = rest.split_once(' ').unwrap_or((rest, ""));
                out.push((name.trim_end_matches('?').to_string(), rest.to_string()));
            } else {
                on &= line.starts_with("---");
            }
        }
    }
    out
}

/// Returns the names in `{a?: number, b?: {c: string}}`.
fn fields(ty: &str) -> Vec<String> {
    let (mut out, mut depth) = (Vec::new(), 0);
    let list = tokens(ty);
    for (k, t) in list.iter().enumerate() {
        match &ty[t.start..t.end] {
            "{" | "(" => depth += 1,
            "}" | ")" => depth -= 1,
            word if depth == 1 && t.kind == Kind::Name => {
                let next = |n: usize| list.get(k + n).map_or("", |t| &ty[t.start..t.end]);
                let begins = k > 0 && matches!(&ty[list[k - 1].start..list[k - 1].end], "{" | ",");
                if begins && (next(1) == ":" || (next(1) == "?" && next(2) == ":")) {
                    out.push(word.to_string());
                }
            }
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_become_calls() {
        let op = |name| ops::by_name(name).expect("an op");
        assert_eq!(of_sample(op("softmax"), "f(2,3), 1").as_deref(), Some("pl.softmax(pl.randn({2, 3}), 1)"));
        assert_eq!(of_sample(op("softmax"), "f(0,3), 1"), None);
        assert_eq!(split("f(2,3), [0,2], keepdim=true"), ["f(2,3)", "[0,2]", "keepdim=true"]);
        assert_eq!(fields("{lr?: number, by: {a: string}, fn?: fun(x: number)}?"), ["lr", "by", "fn"]);
    }
}
