//! Parses the Lua signature of an op, written as one line of text, and holds the parsed arguments of a call.
//!
//! `"x: tensor, dim: int = -1, *, keepdim: bool = false"`: positional arguments precede `*`, and the options of the
//! trailing table follow it. A `?` after a type makes the argument optional. The binder, `help`, the editor stubs and
//! the reference page all use this text.

use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId, Number};
use crate::ops::Op;
use crate::{Category, DType};
use smallvec::SmallVec;

/// The type of a parameter.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Ty {
    Tensor,
    /// A tensor, or a number that becomes a run-time slot with the dtype of the other operand.
    Operand,
    /// A Lua list of tensors.
    Tensors,
    Int,
    Float,
    /// An int or a float, kept as written.
    Number,
    Bool,
    /// A list of ints. A single int is a list of one; if it is the last positional, `f(1, 2, 3)` is a list too.
    Ints,
    /// The same, or one of these words.
    IntsOr(Vec<&'static str>),
    DType,
    /// One of the words, or any string if there are none.
    Str(Vec<&'static str>),
}

#[derive(Clone, PartialEq, Debug)]
pub struct Param {
    pub name: &'static str,
    pub ty: Ty,
    /// May be absent.
    pub optional: bool,
    /// The text after `=`, for docs; already parsed in `default`.
    pub default_text: Option<&'static str>,
    pub default: Value,
    /// Whether it belongs to the trailing options table instead of the positional arguments.
    pub option: bool,
}

/// An argument after parsing.
#[derive(Clone, PartialEq, Debug)]
pub enum Value {
    None,
    Tensor(NodeId),
    Number(Number),
    Tensors(Vec<NodeId>),
    Ints(SmallVec<[i64; 8]>),
    Bool(bool),
    Str(String),
    DType(DType),
}

/// Parses the parameters of a signature. `"-"` declares none.
pub fn parse_signature(sig: &'static str) -> std::result::Result<Vec<Param>, String> {
    let mut params = Vec::new();
    let mut option = false;
    if sig == "-" {
        return Ok(params);
    }
    for piece in split_outside_brackets(sig) {
        let piece = piece.trim();
        if piece == "*" {
            option = true;
            continue;
        }
        let (head, default_text) = match piece.split_once('=') {
            Some((h, d)) => (h.trim(), Some(d.trim())),
            None => (piece, None),
        };
        let (name, ty) = head.split_once(':').ok_or_else(|| format!("'{piece}' has no type"))?;
        let ty = ty.trim();
        let (ty, mut optional) = match ty.strip_suffix('?') {
            Some(t) => (t, true),
            None => (ty, false),
        };
        let ty = match ty {
            "tensor" => Ty::Tensor,
            "operand" => Ty::Operand,
            "tensors" => Ty::Tensors,
            "int" => Ty::Int,
            "float" => Ty::Float,
            "number" => Ty::Number,
            "bool" => Ty::Bool,
            "ints" => Ty::Ints,
            "dtype" => Ty::DType,
            "string" => Ty::Str(Vec::new()),
            words if words.starts_with('\'') => Ty::Str(split_words(words)),
            either if either.starts_with("ints|") => Ty::IntsOr(split_words(&either["ints|".len()..])),
            other => return Err(format!("'{other}' is not a parameter type")),
        };
        optional |= default_text.is_some();
        let default = match default_text {
            None => Value::None,
            Some(text) => parse_default(text, &ty).ok_or_else(|| format!("'{text}' is not a default for {name}"))?,
        };
        params.push(Param { name: name.trim(), ty, optional, default_text, default, option });
    }
    Ok(params)
}

fn split_words(text: &'static str) -> Vec<&'static str> {
    text.split('|').map(|w| w.trim().trim_matches('\'')).collect()
}

fn split_outside_brackets(text: &'static str) -> Vec<&'static str> {
    let (mut depth, mut start, mut out) = (0, 0, Vec::new());
    for (i, c) in text.char_indices() {
        match c {
            '{' | '[' => depth += 1,
            '}' | ']' => depth -= 1,
            ',' if depth == 0 => {
                out.push(&text[start..i]);
                start = i + 1;
            }
            _ => {}
        }
    }
    out.push(&text[start..]);
    out
}

fn parse_default(text: &str, ty: &Ty) -> Option<Value> {
    Some(match ty {
        Ty::Int => Value::Number(Number::Int(text.parse().ok()?)),
        Ty::Float => Value::Number(Number::Float(text.parse().ok()?)),
        Ty::Number | Ty::Operand => Value::Number(match text.parse() {
            Ok(i) => Number::Int(i),
            Err(_) => Number::Float(text.parse().ok()?),
        }),
        Ty::Bool => Value::Bool(text.parse().ok()?),
        Ty::IntsOr(words) if words.contains(&text.trim_matches('\'')) => {
            Value::Str(text.trim_matches('\'').to_string())
        }
        Ty::Ints | Ty::IntsOr(_) => {
            let inner = text.trim_start_matches('{').trim_end_matches('}');
            let ints = inner.split(',').filter(|s| !s.trim().is_empty()).map(|s| s.trim().parse().ok());
            Value::Ints(ints.collect::<Option<_>>()?)
        }
        Ty::Str(_) => Value::Str(text.trim_matches('\'').to_string()),
        Ty::DType => Value::DType(DType::parse(text.trim_matches('\''))?),
        _ => return None,
    })
}

/// The arguments of one call in the order of the signature, with defaults filled in.
#[derive(Debug)]
pub struct Args {
    pub op: &'static Op,
    pub values: SmallVec<[Value; 6]>,
}

impl Args {
    pub fn new(op: &'static Op, values: impl IntoIterator<Item = Value>) -> Args {
        Args { op, values: values.into_iter().collect() }
    }

    fn wrong(&self, i: usize, want: &str) -> Error {
        Error::argument(self.op.name, format!("argument {} must be {want}", i + 1))
    }

    pub fn is_none(&self, i: usize) -> bool {
        matches!(self.values.get(i), None | Some(Value::None))
    }

    pub fn tensor(&self, i: usize) -> Result<NodeId> {
        match self.values.get(i) {
            Some(Value::Tensor(id)) => Ok(*id),
            _ => Err(self.wrong(i, "a tensor")),
        }
    }

    pub fn opt_tensor(&self, i: usize) -> Option<NodeId> {
        match self.values.get(i) {
            Some(Value::Tensor(id)) => Some(*id),
            _ => None,
        }
    }

    pub fn tensors(&self, i: usize) -> Result<&[NodeId]> {
        match self.values.get(i) {
            Some(Value::Tensors(ids)) => Ok(ids),
            _ => Err(self.wrong(i, "a list of tensors")),
        }
    }

    pub fn number(&self, i: usize) -> Result<Number> {
        match self.values.get(i) {
            Some(Value::Number(n)) => Ok(*n),
            _ => Err(self.wrong(i, "a number")),
        }
    }

    pub fn int(&self, i: usize) -> Result<i64> {
        match self.values.get(i) {
            Some(Value::Number(Number::Int(n))) => Ok(*n),
            _ => Err(self.wrong(i, "an integer")),
        }
    }

    pub fn opt_int(&self, i: usize) -> Option<i64> {
        match self.values.get(i) {
            Some(Value::Number(Number::Int(n))) => Some(*n),
            _ => None,
        }
    }

    pub fn float(&self, i: usize) -> Result<f64> {
        self.number(i).map(Number::as_f64)
    }

    pub fn opt_float(&self, i: usize) -> Option<f64> {
        match self.values.get(i) {
            Some(Value::Number(n)) => Some(n.as_f64()),
            _ => None,
        }
    }

    pub fn bool(&self, i: usize) -> bool {
        matches!(self.values.get(i), Some(Value::Bool(true)))
    }

    pub fn str(&self, i: usize) -> &str {
        match self.values.get(i) {
            Some(Value::Str(s)) => s,
            _ => "",
        }
    }

    pub fn ints(&self, i: usize) -> Result<&[i64]> {
        match self.values.get(i) {
            Some(Value::Ints(v)) => Ok(v),
            _ => Err(self.wrong(i, "a list of integers")),
        }
    }

    pub fn opt_ints(&self, i: usize) -> Option<&[i64]> {
        match self.values.get(i) {
            Some(Value::Ints(v)) => Some(v),
            _ => None,
        }
    }

    pub fn dtype(&self, i: usize) -> Option<DType> {
        match self.values.get(i) {
            Some(Value::DType(d)) => Some(*d),
            _ => None,
        }
    }

    /// Returns all tensors and numbers among the arguments as nodes; numbers become slots with the dtype of the other
    /// operands.
    pub fn operands(&self, g: &mut Graph) -> Result<SmallVec<[NodeId; 4]>> {
        let tensors: SmallVec<[NodeId; 4]> =
            self.values.iter().filter_map(|v| if let Value::Tensor(id) = v { Some(*id) } else { None }).collect();
        if tensors.is_empty() {
            return Err(Error::argument(self.op.name, "needs at least one tensor").hint("make one with pl.tensor(…)"));
        }
        let tensor = g.common(&tensors);
        let mut out = SmallVec::new();
        for (i, v) in self.values.iter().enumerate() {
            out.push(match v {
                Value::Tensor(id) => *id,
                Value::Number(n) => g.scalar(*n, tensor.promote_number(n.category())),
                _ => return Err(self.wrong(i, "a tensor or a number")),
            });
        }
        Ok(out)
    }

    /// Argument `i`, a tensor or a number, as a node; a number takes the dtype that promotion with `like` gives.
    pub fn operand(&self, g: &mut Graph, i: usize, like: DType) -> Result<NodeId> {
        match self.values.get(i) {
            Some(Value::Tensor(id)) => Ok(*id),
            Some(Value::Number(n)) => {
                let category: Category = n.category();
                Ok(g.scalar(*n, like.promote_number(category)))
            }
            _ => Err(self.wrong(i, "a tensor or a number")),
        }
    }
}
