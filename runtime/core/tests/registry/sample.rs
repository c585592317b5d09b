//! Parses the samples of ops: the text of a call (`"f(2,3), 1, keepdim=true"`) becomes arguments over a graph.

use perilune_core::graph::Number;
use perilune_core::ops::{Args, Op, Param, Ty, Value, create, parse_signature};
use perilune_core::{DType, Graph, NodeId, Shape};
use std::collections::HashMap;

/// The input tensors of a recorded call, with their values.
#[derive(Default)]
pub struct Leaves {
    pub values: HashMap<NodeId, Vec<f64>>,
    pub floats: Vec<NodeId>,
    seed: u64,
}

impl Leaves {
    pub fn uniform(&mut self) -> f64 {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.seed >> 11) as f64 / (1u64 << 53) as f64
    }

    fn normal(&mut self) -> f64 {
        let (u, v) = (1.0 - self.uniform(), self.uniform());
        (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    }

    fn tensor(&mut self, g: &mut Graph, text: &str, float: DType) -> NodeId {
        let (kind, rest) = text.split_once('(').unwrap_or_else(|| panic!("no tensor: {text}"));
        let parts: Vec<&str> = rest.trim_end_matches(')').split(';').collect();
        let list =
            |t: &str| t.split(',').filter(|s| !s.is_empty()).map(|s| s.trim().parse().unwrap()).collect::<Vec<f64>>();
        let shape = |t: &str| Shape::of(&list(t).iter().map(|&d| d as usize).collect::<Vec<_>>());
        let (shape, dtype) = match kind {
            "i" | "ends" => (shape(parts[1]), DType::I64),
            "u8" => (shape(parts[1]), DType::U8),
            "perm" => (shape(parts[0]), DType::I64),
            "b" => (shape(parts[0]), DType::Bool),
            _ => (shape(parts[0]), float),
        };
        let n = shape.numel();
        let range = parts.get(1).map(|t| list(t));
        let mut values: Vec<f64> = (0..n)
            .map(|k| match (kind, &range) {
                ("ends", _) => (self.uniform() * (parts[0].trim().parse::<f64>().unwrap() + 1.0)).floor(),
                ("i" | "u8", _) => (self.uniform() * parts[0].trim().parse::<f64>().unwrap()).floor(),
                ("perm", _) => (n - 1 - k) as f64,
                ("b", _) => f64::from(self.uniform() < 0.5),
                (_, Some(r)) => r[0] + self.uniform() * (r[1] - r[0]),
                ("p", _) => 0.3 + self.uniform() * 1.7,
                ("u", _) => self.uniform() * 1.8 - 0.9,
                _ => self.normal(),
            })
            .collect();
        if kind == "ends" {
            values.sort_by(f64::total_cmp);
        }
        self.leaf(g, shape, dtype, values)
    }

    pub fn leaf(&mut self, g: &mut Graph, shape: Shape, dtype: DType, values: Vec<f64>) -> NodeId {
        let id = g.leaf(&create::LEAF, shape, dtype, &[], self.values.len() as u64);
        self.values.insert(id, values);
        if dtype.is_float() {
            self.floats.push(id);
        }
        id
    }

    fn value(&mut self, g: &mut Graph, text: &str, p: &Param, float: DType) -> Value {
        let number = |t: &str| match t.parse::<i64>() {
            Ok(i) => Value::Number(Number::Int(i)),
            Err(_) => Value::Number(Number::Float(t.parse().unwrap_or_else(|_| panic!("no number: {t}")))),
        };
        if text == "nil" {
            return p.default.clone();
        }
        match &p.ty {
            Ty::Tensor => Value::Tensor(self.tensor(g, text, float)),
            Ty::Operand if text.contains('(') => Value::Tensor(self.tensor(g, text, float)),
            Ty::Tensors => {
                let inner = text.trim_start_matches('[').trim_end_matches(']');
                Value::Tensors(split(inner).iter().map(|t| self.tensor(g, t, float)).collect())
            }
            Ty::IntsOr(_) if text.starts_with('\'') => Value::Str(text.trim_matches('\'').into()),
            Ty::Ints | Ty::IntsOr(_) => {
                let inner = text.trim_start_matches('[').trim_end_matches(']');
                Value::Ints(
                    inner.split(',').filter(|t| !t.trim().is_empty()).map(|t| t.trim().parse().unwrap()).collect(),
                )
            }
            Ty::Bool => Value::Bool(text == "true"),
            Ty::Str(_) => Value::Str(text.trim_matches('\'').into()),
            Ty::DType => Value::DType(DType::parse(text.trim_matches('\'')).unwrap()),
            _ => number(text),
        }
    }

    /// The call that `text` describes.
    pub fn args(&mut self, g: &mut Graph, op: &'static Op, text: &str, float: DType) -> Args {
        let params = parse_signature(op.sig).unwrap();
        let mut values: Vec<Value> = params.iter().map(|p| p.default.clone()).collect();
        let mut given = vec![""; params.len()];
        let mut next = 0;
        let pieces = split(text);
        for piece in &pieces {
            let named = piece.split_once('=').filter(|(n, _)| params.iter().any(|p| p.name == n.trim()));
            let at = match named {
                Some((name, _)) => params.iter().position(|p| p.name == name.trim()).unwrap(),
                None => {
                    next += 1;
                    next - 1
                }
            };
            assert!(
                at < params.len() && (named.is_some() || !params[at].option),
                "{}: '{piece}' has no place",
                op.name
            );
            given[at] = named.map_or(*piece, |(_, v)| v).trim();
        }
        for (i, p) in params.iter().enumerate() {
            if !given[i].is_empty() {
                values[i] = self.value(g, given[i], p, float);
            }
            assert!(!matches!(values[i], Value::None) || p.optional, "{}: {} is missing in '{text}'", op.name, p.name);
        }
        Args::new(op, values)
    }
}

fn split(text: &str) -> Vec<&str> {
    let (mut depth, mut start, mut quoted, mut out) = (0, 0, false, Vec::new());
    for (i, c) in text.char_indices() {
        match c {
            '\'' => quoted = !quoted,
            '(' | '[' if !quoted => depth += 1,
            ')' | ']' if !quoted => depth -= 1,
            ',' if depth == 0 && !quoted => {
                out.push(text[start..i].trim());
                start = i + 1;
            }
            _ => {}
        }
    }
    out.push(text[start..].trim());
    out.retain(|t| !t.is_empty());
    out
}
