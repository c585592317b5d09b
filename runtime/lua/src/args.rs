//! Converts Lua values to the arguments that an op's signature declares.

use crate::errors;
use crate::host::Host;
use crate::tensor::{Ref, Tensor};
use mlua::{FromLua, Lua, Value};
use perilune_core::graph::{NodeId, Number};
use perilune_core::ops::{Args, Op, Param, Ty, Value as Arg, parse_signature};
use perilune_core::{DType, Error, error::did_you_mean};
use perilune_engine::{Engine, Fault};
use smallvec::SmallVec;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Mutex, OnceLock};

/// An op's parsed signature.
#[derive(Debug)]
pub struct Signature {
    pub params: Vec<Param>,
    /// The number of positional parameters.
    pub positional: usize,
    /// Whether the first parameter is a tensor, so that the op is also a method.
    pub is_method: bool,
}

/// Returns the signature of an op, parsed once per process.
pub fn signature(op: &'static Op) -> &'static Signature {
    static ALL: OnceLock<Mutex<HashMap<&'static str, &'static Signature>>> = OnceLock::new();
    let mut all = match ALL.get_or_init(Default::default).lock() {
        Ok(all) => all,
        Err(poisoned) => poisoned.into_inner(),
    };
    all.entry(op.name).or_insert_with(|| {
        // Signatures are constants, and a core test parses every one of them.
        let params = parse_signature(op.sig).unwrap_or_default();
        let positional = params.iter().filter(|p| !p.option).count();
        let is_method = params.first().is_some_and(|p| matches!(p.ty, Ty::Tensor | Ty::Operand) && !p.optional);
        Box::leak(Box::new(Signature { params, positional, is_method }))
    })
}

/// A tensor or a number.
pub enum Operand {
    Tensor(Rc<Host>, RefGuard),
    Number(Number),
    Bool(bool),
}

/// A reference copied from a Lua tensor. The Lua value stays on the caller's stack, so the handle stays counted.
#[derive(Clone, Copy)]
pub struct RefGuard(pub Ref);

impl RefGuard {
    pub fn node(self, engine: &mut Engine) -> Result<NodeId, Error> {
        match self.0 {
            Ref::Node(h) => engine.recorder.node(h),
            Ref::State(s) => engine.state_node(s),
        }
    }
}

impl Operand {
    pub fn value(&self, engine: &mut Engine) -> Result<Arg, Error> {
        Ok(match self {
            Operand::Tensor(_, r) => Arg::Tensor(r.node(engine)?),
            Operand::Number(n) => Arg::Number(*n),
            Operand::Bool(b) => Arg::Tensor(truth(engine, *b)),
        })
    }

    /// Converts to a node; a number takes the dtype of `like`.
    pub fn node(&self, engine: &mut Engine, like: DType) -> Result<NodeId, Fault> {
        Ok(match self {
            Operand::Tensor(_, r) => r.node(engine)?,
            Operand::Number(n) => engine.recorder.graph.scalar(*n, like.promote_number(n.category())),
            Operand::Bool(b) => truth(engine, *b),
        })
    }
}

/// Converts `true` or `false` to a bool of rank 0, which promotes to every other dtype.
fn truth(engine: &mut Engine, b: bool) -> NodeId {
    engine.recorder.graph.constant(f64::from(u8::from(b)), DType::Bool)
}

impl FromLua for Operand {
    fn from_lua(value: Value, lua: &Lua) -> mlua::Result<Self> {
        match &value {
            Value::Integer(i) => Ok(Operand::Number(Number::Int(*i))),
            Value::Number(n) => Ok(Operand::Number(Number::Float(*n))),
            Value::Boolean(b) => Ok(Operand::Bool(*b)),
            Value::UserData(u) => match u.borrow::<Tensor>() {
                Ok(t) => Ok(Operand::Tensor(t.host().clone(), RefGuard(t.what))),
                Err(_) => Err(wrong_operand(lua, &value)),
            },
            _ => Err(wrong_operand(lua, &value)),
        }
    }
}

fn wrong_operand(lua: &Lua, value: &Value) -> mlua::Error {
    let host = match crate::functions::host(lua) {
        Ok(host) => host,
        Err(e) => return e,
    };
    let hint = match value {
        Value::Nil => Some("nil is what a misspelt name, or a function without `return`, gives"),
        Value::Table(_) => Some("pl.tensor(t) makes a tensor of a list"),
        Value::String(_) => Some("tonumber(s) makes a number of a text"),
        _ => None,
    };
    let message = format!("a tensor and {} do not combine: both sides must be tensors or numbers", show(value));
    errors::argument(&host, lua, "", message, hint.map(str::to_string))
}

/// The maximum bytes of a string shown in a message.
const SHOWN: usize = 200;

/// Quotes a string; a long one is truncated, with its length.
fn quoted(bytes: &[u8]) -> String {
    match bytes.get(..SHOWN) {
        Some(head) if bytes.len() > SHOWN => {
            format!("\"{}…\" ({} bytes)", String::from_utf8_lossy(head).trim_end_matches('\u{fffd}'), bytes.len())
        }
        _ => format!("\"{}\"", String::from_utf8_lossy(bytes)),
    }
}

/// Describes a Lua value for messages: `"text"`, `3.5`, `a table`.
pub fn show(value: &Value) -> String {
    match value {
        Value::Nil => "nil".into(),
        Value::Boolean(b) => b.to_string(),
        Value::Integer(i) => i.to_string(),
        Value::Number(n) => n.to_string(),
        Value::String(s) => quoted(&s.as_bytes()),
        Value::UserData(u) if u.is::<Tensor>() => "a tensor".into(),
        Value::Table(_) => "a table".into(),
        Value::Function(_) => "a function".into(),
        other => format!("a {}", other.type_name()),
    }
}

/// Parses the arguments of a call of `op`.
///
/// Tensors are resolved to nodes by `resolve` at the end, in one borrow of the engine.
pub fn parse(
    host: &Rc<Host>,
    lua: &Lua,
    op: &'static Op,
    sig: &Signature,
    given: &[Value],
    method: bool,
) -> mlua::Result<Parsed> {
    let mut out: SmallVec<[Pending; 6]> = SmallVec::new();
    let bad = |message: String, hint: Option<String>| Err(errors::argument(host, lua, op.name, message, hint));
    let mut given = given;
    // Trailing nils are absent arguments.
    while let Some((Value::Nil, rest)) = given.split_last() {
        given = rest;
    }
    let has_options = sig.positional < sig.params.len();
    let mut options = None;
    if has_options
        && let Some((Value::Table(t), rest)) = given.split_last()
        && is_options(t)
        && !rest.is_empty() | (sig.positional == 0) | sig.params[0].optional
    {
        options = Some(t.clone());
        given = rest;
    }
    let mut used = 0;
    for (k, p) in sig.params[..sig.positional].iter().enumerate() {
        let last = k + 1 == sig.positional;
        let value = given.get(used).unwrap_or(&Value::Nil);
        if last && p.ty == Ty::Ints && given.len() > used + 1 && given[used..].iter().all(|v| as_int(v).is_some()) {
            out.push(Pending::Ready(Arg::Ints(given[used..].iter().filter_map(as_int).collect())));
            used = given.len();
            continue;
        }
        used += 1;
        if value.is_nil() {
            if !p.optional {
                return bad(
                    format!("{} is missing: it must be {}", place(k, p, method), want(&p.ty)),
                    Some(call_of(op, sig, method)),
                );
            }
            out.push(Pending::Ready(p.default.clone()));
            continue;
        }
        match convert(&p.ty, value) {
            Some(v) => out.push(v),
            None if method && k == 0 => {
                let message = format!("called with a dot on {}; a method is called with a colon", show(value));
                return bad(message, Some(call_of(op, sig, true)));
            }
            None => {
                let message = format!("{} is {}; it must be {}", place(k, p, method), show(value), want(&p.ty));
                return bad(message, Some(call_of(op, sig, method)));
            }
        }
    }
    if given.len() > used {
        // A trailing table that is not an options table is most likely meant to be one.
        let own = usize::from(method);
        let takes = match sig.positional - own {
            0 => "takes no arguments".to_string(),
            1 => "takes 1 argument".to_string(),
            n => format!("takes {n} arguments"),
        };
        let are = if given.len() - own == 1 { "is" } else { "are" };
        return bad(format!("{takes}, {} {are} given", given.len() - own), Some(call_of(op, sig, method)));
    }
    if let Some(t) = options {
        let names: Vec<&str> = sig.params[sig.positional..].iter().map(|p| p.name).collect();
        for pair in t.pairs::<Value, Value>() {
            let (key, _) = pair?;
            let key = match &key {
                Value::String(s) => s.to_string_lossy(),
                other => show(other),
            };
            if !names.contains(&key.as_str()) {
                let near = did_you_mean(&key, names.iter().copied())
                    .map(|n| format!(" Did you mean '{n}'?"))
                    .unwrap_or_default();
                return bad(format!("unknown option '{key}' (options: {}).{near}", names.join(", ")), None);
            }
        }
        for p in &sig.params[sig.positional..] {
            let value: Value = t.raw_get(p.name)?;
            if value.is_nil() {
                out.push(Pending::Ready(p.default.clone()));
                continue;
            }
            match convert(&p.ty, &value) {
                Some(v) => out.push(v),
                None => return bad(format!("option {} is {}; it must be {}", p.name, show(&value), want(&p.ty)), None),
            }
        }
    } else {
        for p in &sig.params[sig.positional..] {
            if !p.optional {
                return bad(
                    format!("option {} is missing: it must be {}", p.name, want(&p.ty)),
                    Some(call_of(op, sig, method)),
                );
            }
            out.push(Pending::Ready(p.default.clone()));
        }
    }
    Ok(Parsed { op, values: out })
}

/// An argument whose tensors have not been resolved to nodes.
pub enum Pending {
    Ready(Arg),
    Bool(bool),
    Tensor(RefGuard),
    Tensors(Vec<RefGuard>),
}

pub struct Parsed {
    op: &'static Op,
    values: SmallVec<[Pending; 6]>,
}

impl Parsed {
    pub fn resolve(self, engine: &mut Engine) -> Result<Args, Error> {
        let mut values: SmallVec<[Arg; 6]> = SmallVec::new();
        for v in self.values {
            values.push(match v {
                Pending::Ready(v) => v,
                Pending::Bool(b) => Arg::Tensor(truth(engine, b)),
                Pending::Tensor(r) => Arg::Tensor(r.node(engine)?),
                Pending::Tensors(rs) => Arg::Tensors(rs.into_iter().map(|r| r.node(engine)).collect::<Result<_, _>>()?),
            });
        }
        Ok(Args { op: self.op, values })
    }
}

/// Returns whether a table is an options table: it has no sequence part, or is empty.
fn is_options(t: &mlua::Table) -> bool {
    t.raw_len() == 0
}

pub fn as_int(v: &Value) -> Option<i64> {
    match v {
        Value::Integer(i) => Some(*i),
        Value::Number(n) if n.fract() == 0.0 && n.abs() < 9e15 => Some(*n as i64),
        _ => None,
    }
}

fn tensor(v: &Value) -> Option<RefGuard> {
    v.as_userdata().and_then(|u| u.borrow::<Tensor>().ok().map(|t| RefGuard(t.what)))
}

fn convert(ty: &Ty, v: &Value) -> Option<Pending> {
    let ready = |a: Arg| Some(Pending::Ready(a));
    match ty {
        Ty::Tensor => tensor(v).map(Pending::Tensor),
        Ty::Operand => match v {
            Value::Integer(i) => ready(Arg::Number(Number::Int(*i))),
            Value::Number(n) => ready(Arg::Number(Number::Float(*n))),
            Value::Boolean(b) => Some(Pending::Bool(*b)),
            _ => tensor(v).map(Pending::Tensor),
        },
        Ty::Tensors => {
            let t = v.as_table()?;
            let mut out = Vec::with_capacity(t.raw_len());
            for x in t.sequence_values::<Value>() {
                out.push(tensor(&x.ok()?)?);
            }
            Some(Pending::Tensors(out))
        }
        Ty::Int => ready(Arg::Number(Number::Int(as_int(v)?))),
        Ty::Float => match v {
            Value::Integer(i) => ready(Arg::Number(Number::Float(*i as f64))),
            Value::Number(n) => ready(Arg::Number(Number::Float(*n))),
            _ => None,
        },
        Ty::Number => match v {
            Value::Integer(i) => ready(Arg::Number(Number::Int(*i))),
            Value::Number(n) => ready(Arg::Number(Number::Float(*n))),
            _ => None,
        },
        Ty::Bool => ready(Arg::Bool(v.as_boolean()?)),
        Ty::Ints => match v {
            Value::Table(t) => {
                let mut out = SmallVec::new();
                for x in t.sequence_values::<Value>() {
                    out.push(as_int(&x.ok()?)?);
                }
                // A list must not have named fields.
                (t.raw_len() == out.len()).then_some(())?;
                ready(Arg::Ints(out))
            }
            _ => ready(Arg::Ints(SmallVec::from_slice(&[as_int(v)?]))),
        },
        Ty::IntsOr(words) => match v {
            Value::String(_) => convert(&Ty::Str(words.clone()), v),
            _ => convert(&Ty::Ints, v),
        },
        Ty::DType => ready(Arg::DType(DType::parse(&v.as_string()?.to_str().ok()?)?)),
        Ty::Str(words) => {
            let s = v.as_string()?.to_str().ok()?.to_string();
            (words.is_empty() || words.contains(&s.as_str())).then_some(())?;
            ready(Arg::Str(s))
        }
    }
}

pub fn want(ty: &Ty) -> String {
    match ty {
        Ty::Tensor => "a tensor".into(),
        Ty::Operand => "a tensor or a number".into(),
        Ty::Tensors => "a list of tensors".into(),
        Ty::Int => "an integer".into(),
        Ty::Float | Ty::Number => "a number".into(),
        Ty::Bool => "true or false".into(),
        Ty::Ints => "an integer or a list of integers".into(),
        Ty::IntsOr(words) => format!("{}, or {}", want(&Ty::Ints), want(&Ty::Str(words.clone()))),
        Ty::DType => format!("a dtype ({})", DType::ALL.map(DType::name).join(", ")),
        Ty::Str(words) if words.is_empty() => "a string".into(),
        Ty::Str(words) => words.iter().map(|w| format!("\"{w}\"")).collect::<Vec<_>>().join(" or "),
    }
}

/// Returns the number of an argument in the call; a method's own tensor is not counted.
fn place(k: usize, p: &Param, method: bool) -> String {
    match k + 1 - usize::from(method && k > 0) {
        _ if method && k == 0 => format!("the tensor ({})", p.name),
        n => format!("argument {n} ({})", p.name),
    }
}

/// Formats the usage in the form of the call, function or method.
fn call_of(op: &'static Op, sig: &Signature, method: bool) -> String {
    let call = usage(op);
    let Some(first) = sig.params.first().filter(|_| method) else { return format!("pl.{call}") };
    let rest = call.split_once('(').map_or("", |c| c.1);
    let rest = rest.strip_prefix(first.name).unwrap_or(rest);
    format!("{}:{}({}", first.name, op.name, rest.strip_prefix(", ").unwrap_or(rest))
}

/// Formats the usage of a call.
pub fn usage(op: &'static Op) -> String {
    let sig = signature(op);
    let mut parts: Vec<String> = sig.params[..sig.positional]
        .iter()
        .map(|p| if p.optional { format!("[{}]", p.name) } else { p.name.to_string() })
        .collect();
    let options: Vec<&str> = sig.params[sig.positional..].iter().map(|p| p.name).collect();
    if !options.is_empty() {
        parts.push(format!("[{{{}}}]", options.join(", ")));
    }
    format!("{}({})", op.name, parts.join(", "))
}
