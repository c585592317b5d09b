//! Binds `string.find`, `match`, `gmatch` and `gsub` on the interruptible matcher of `pattern.rs`.

use super::panics::Guarded;
use super::pattern::{Captured, Matcher, Problem, is_plain};
use super::recipe_line;
use super::{interrupt, memory_limit};
use crate::args::show;
use crate::errors::Cause;
use mlua::{Lua, LuaString, MultiValue, Table, Value};
use std::cell::Cell;

fn raise(lua: &Lua, op: &str, problem: Problem) -> mlua::Error {
    match problem {
        Problem::Pattern(text) => recipe_line::raised(lua, format!("string.{op}: {text}"), None, Cause::Recipe),
        Problem::Interrupted(e) => recipe_line::raised(lua, e.message, None, Cause::Interrupted),
    }
}

/// Returns the start of a search, from 0; `None` if it is after the end.
fn start(init: Option<i64>, len: usize) -> Option<usize> {
    let at = match init.unwrap_or(1) {
        n if n > 0 => usize::try_from(n - 1).unwrap_or(usize::MAX),
        0 => 0,
        n => len.saturating_sub(usize::try_from(n.unsigned_abs()).unwrap_or(usize::MAX)),
    };
    (at <= len).then_some(at)
}

/// A pattern without its anchor, and whether it has one.
fn anchored(pattern: &[u8]) -> (&[u8], bool) {
    match pattern.strip_prefix(b"^") {
        Some(rest) => (rest, true),
        None => (pattern, false),
    }
}

/// Appends the values of a match to `out`.
fn push(
    lua: &Lua,
    op: &str,
    m: &Matcher<'_>,
    src: &[u8],
    n: usize,
    at: (usize, usize),
    out: &mut MultiValue,
) -> mlua::Result<()> {
    for i in 0..n {
        let captured = m.captured(i, at.0, at.1).map_err(|e| raise(lua, op, e))?;
        out.push_back(value(lua, src, captured)?);
    }
    Ok(())
}

fn value(lua: &Lua, src: &[u8], captured: Captured) -> mlua::Result<Value> {
    Ok(match captured {
        Captured::Text(from, to) => Value::String(lua.create_string(&src[from..to])?),
        Captured::Position(at) => Value::Integer(at as i64),
    })
}

fn nothing() -> MultiValue {
    MultiValue::from_vec(vec![Value::Nil])
}

/// `string.find(s, pattern, [init, [plain]])`.
fn find(lua: &Lua, (s, p, init, plain): (LuaString, LuaString, Option<i64>, bool)) -> mlua::Result<MultiValue> {
    let (src, pattern) = (s.as_bytes(), p.as_bytes());
    let Some(from) = start(init, src.len()) else { return Ok(nothing()) };
    if plain || is_plain(&pattern) {
        let found = memchr::memmem::find(&src[from..], &pattern);
        return Ok(found.map_or_else(nothing, |at| {
            let first = (from + at + 1) as i64;
            MultiValue::from_vec(vec![Value::Integer(first), Value::Integer(first - 1 + pattern.len() as i64)])
        }));
    }
    let (pattern, anchor) = anchored(&pattern);
    let interrupt = interrupt(lua)?;
    let mut m = Matcher::new(&src, pattern, &interrupt);
    for at in from..=src.len() {
        if let Some(end) = m.match_at(at).map_err(|e| raise(lua, "find", e))? {
            let mut out = MultiValue::from_vec(vec![Value::Integer(at as i64 + 1), Value::Integer(end as i64)]);
            push(lua, "find", &m, &src, m.captures(), (at, end), &mut out)?;
            return Ok(out);
        }
        if anchor {
            break;
        }
    }
    Ok(nothing())
}

/// `string.match(s, pattern, [init])`.
fn match_(lua: &Lua, (s, p, init): (LuaString, LuaString, Option<i64>)) -> mlua::Result<MultiValue> {
    let (src, pattern) = (s.as_bytes(), p.as_bytes());
    let Some(from) = start(init, src.len()) else { return Ok(nothing()) };
    let (pattern, anchor) = anchored(&pattern);
    let interrupt = interrupt(lua)?;
    let mut m = Matcher::new(&src, pattern, &interrupt);
    for at in from..=src.len() {
        if let Some(end) = m.match_at(at).map_err(|e| raise(lua, "match", e))? {
            let mut out = MultiValue::new();
            push(lua, "match", &m, &src, m.count(), (at, end), &mut out)?;
            return Ok(out);
        }
        if anchor {
            break;
        }
    }
    Ok(nothing())
}

/// `string.gmatch(s, pattern, [init])`: an iterator. An anchor is a plain character here, as in C.
fn gmatch(lua: &Lua, (s, p, init): (LuaString, LuaString, Option<i64>)) -> mlua::Result<mlua::Function> {
    let len = s.as_bytes().len();
    let (at, last) = (Cell::new(start(init, len).unwrap_or(len + 1)), Cell::new(None));
    Guarded(lua).create_function(move |lua, ()| {
        let (src, pattern) = (s.as_bytes(), p.as_bytes());
        let interrupt = interrupt(lua)?;
        let mut m = Matcher::new(&src, &pattern, &interrupt);
        for from in at.get()..=src.len() {
            if let Some(end) = m.match_at(from).map_err(|e| raise(lua, "gmatch", e))?
                && Some(end) != last.get()
            {
                at.set(end);
                last.set(Some(end));
                let mut out = MultiValue::new();
                push(lua, "gmatch", &m, &src, m.count(), (from, end), &mut out)?;
                return Ok(out);
            }
        }
        // Like C, keep the position: another call searches again.
        Ok(MultiValue::new())
    })
}

/// The replacement of a match.
enum Replacement {
    Text(LuaString),
    Table(Table),
    Function(mlua::Function),
}

/// The text of a substitution. It grows outside of Lua's memory, within the same limit.
struct Output {
    bytes: Vec<u8>,
    room: usize,
}

impl Output {
    fn push(&mut self, lua: &Lua, more: &[u8]) -> mlua::Result<()> {
        let size = self.bytes.len() + more.len();
        if size > self.room || self.bytes.try_reserve(more.len()).is_err() {
            memory_limit::need(lua, ("string.gsub".to_string(), size as f64))?;
            self.room = memory_limit::room(lua);
        }
        self.bytes.extend_from_slice(more);
        Ok(())
    }
}

/// `string.gsub(s, pattern, repl, [n])`.
fn gsub(lua: &Lua, (s, p, repl, max): (LuaString, LuaString, Value, Option<i64>)) -> mlua::Result<(LuaString, i64)> {
    let replacement = match &repl {
        Value::Table(t) => Replacement::Table(t.clone()),
        Value::Function(f) => Replacement::Function(f.clone()),
        Value::String(_) | Value::Integer(_) | Value::Number(_) => match lua.coerce_string(repl.clone())? {
            Some(text) => Replacement::Text(text),
            None => Replacement::Text(lua.create_string("")?),
        },
        other => {
            let message =
                format!("string.gsub: the replacement is {}; it must be a string, a function or a table", show(other));
            return Err(recipe_line::raised(lua, message, None, Cause::Recipe));
        }
    };
    let (src, pattern) = (s.as_bytes(), p.as_bytes());
    let max = max.unwrap_or(i64::MAX);
    let (pattern, anchor) = anchored(&pattern);
    let fail = |e| raise(lua, "gsub", e);
    let interrupt = interrupt(lua)?;
    let mut m = Matcher::new(&src, pattern, &interrupt);
    let mut out = Output { bytes: Vec::new(), room: memory_limit::room(lua) };
    let (mut at, mut last, mut count, mut changed) = (0, None, 0, false);
    while count < max {
        match m.match_at(at).map_err(fail)?.filter(|end| Some(*end) != last) {
            Some(end) => {
                count += 1;
                let first = || m.captured(0, at, end).map_err(fail).and_then(|c| value(lua, &src, c));
                let new = match &replacement {
                    Replacement::Text(text) => {
                        expand(lua, &m, &src, (at, end), &text.as_bytes(), &mut out)?;
                        None
                    }
                    Replacement::Table(t) => Some(t.get::<Value>(first()?)?),
                    Replacement::Function(f) => {
                        let mut args = MultiValue::new();
                        push(lua, "gsub", &m, &src, m.count(), (at, end), &mut args)?;
                        Some(f.call::<Value>(args)?)
                    }
                };
                changed |= match new {
                    None => true,
                    Some(Value::Nil | Value::Boolean(false)) => {
                        out.push(lua, &src[at..end])?;
                        false
                    }
                    Some(new @ (Value::String(_) | Value::Integer(_) | Value::Number(_))) => {
                        let text = lua.coerce_string(new)?;
                        out.push(lua, text.as_ref().map(|t| t.as_bytes()).as_deref().unwrap_or_default())?;
                        true
                    }
                    Some(other) => {
                        let text = format!("invalid replacement value (a {})", other.type_name());
                        return Err(fail(Problem::Pattern(text)));
                    }
                };
                (at, last) = (end, Some(end));
            }
            None if at < src.len() => {
                out.push(lua, &src[at..=at])?;
                at += 1;
            }
            None => break,
        }
        if anchor {
            break;
        }
    }
    if !changed {
        return Ok((s.clone(), count));
    }
    out.push(lua, &src[at..])?;
    Ok((lua.create_string(&out.bytes)?, count))
}

/// Appends a replacement text with `%0` to `%9` and `%%` expanded.
fn expand(
    lua: &Lua,
    m: &Matcher<'_>,
    src: &[u8],
    (start, end): (usize, usize),
    text: &[u8],
    out: &mut Output,
) -> mlua::Result<()> {
    let fail = |e| raise(lua, "gsub", e);
    let mut rest = text;
    while let Some(k) = memchr::memchr(b'%', rest) {
        out.push(lua, &rest[..k])?;
        match rest.get(k + 1) {
            Some(b'%') => out.push(lua, b"%")?,
            Some(b'0') => out.push(lua, &src[start..end])?,
            Some(digit @ b'1'..=b'9') => match m.captured(usize::from(digit - b'1'), start, end).map_err(fail)? {
                Captured::Text(from, to) => out.push(lua, &src[from..to])?,
                Captured::Position(at) => out.push(lua, at.to_string().as_bytes())?,
            },
            _ => return Err(fail(Problem::Pattern("invalid use of '%' in replacement string".into()))),
        }
        rest = &rest[k + 2..];
    }
    out.push(lua, rest)
}

pub fn install(lua: &Lua, string: &Table) -> mlua::Result<()> {
    let lua = &Guarded(lua);
    string.raw_set("find", lua.create_function(find)?)?;
    string.raw_set("match", lua.create_function(match_)?)?;
    string.raw_set("gmatch", lua.create_function(gmatch)?)?;
    string.raw_set("gsub", lua.create_function(gsub)?)
}

#[cfg(test)]
#[path = "string_lib_tests.rs"]
mod tests;
