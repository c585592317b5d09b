//! Describes how the work of an op divides among devices: which dims of its operands and results are cut together.
//!
//! A [`Factor`] is one way to divide a node. Along it each device gets a piece of some operands and computes, by the same op, its
//! piece of every result: a block of one dim, or a term of a combination (a partial sum). The other operands are needed whole. What
//! no factor mentions cannot be divided. The planner chooses a factor for each axis of a mesh and propagates placements through a
//! recorded graph with them; no factor names an axis or a way of training. Shardy (openxla/shardy, docs/propagation.md) has the
//! same notion for the dims of an op.
//!
//! The classes `Map`, `Cast` and `Reduce` have factors by rule. Other ops state theirs in [`Op::shard`]; without a statement only
//! whole operands will do, and a fused op is decomposed first.

mod experts;
mod regroup;
mod rules;

pub use experts::{expert_mlp, expert_mlp_backward};
pub use regroup::{Cut, GATHERING, JOINING, PADDING, RESHAPING, Regrouping, SCATTERING, SLICING};
pub use rules::*;

use crate::dtype::DType;
use crate::mesh::Combine;
use crate::ops::elementwise::MapFn;
use crate::ops::{Class, Op, ReduceFn};
use crate::shape::Shape;
use smallvec::{SmallVec, smallvec};

/// What each device has of one operand or result along a factor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Piece {
    /// All of it.
    Whole,
    /// A block of that dim.
    Block(u8),
    /// A term: the tensor is the combination of all devices' terms.
    Term(Combine),
}

/// One way to divide a node among devices.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Factor {
    pub operands: SmallVec<[Piece; 4]>,
    pub results: SmallVec<[Piece; 2]>,
    /// The number of equal parts into which the blocks may be cut at most: a block has a whole number of them. 0 without blocks.
    pub units: usize,
    /// The attribute of the node, if there is one, that states the size of the dim of the result.
    pub size_attr: Option<u8>,
    /// How the op uses positions along the divided dim, if it does.
    pub positions: Option<Positions>,
    /// What the blocks of this device meet of other devices, if they do.
    pub meets: Option<Meeting>,
}

/// An op whose operand 1 holds positions along the dim of operand 0 that is divided. Each device counts from the start of its
/// block, and leaves out positions in other blocks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Positions {
    /// It reads operand 0 there: 0 for what is left out.
    Read,
    /// It adds operand 2 to operand 0 there.
    Add,
}

/// A node whose blocks meet what other devices have. The planner writes the exchange and the part of a device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Meeting {
    /// The divided dim is that of queries, which meet the keys of all devices (`plan/passes/shard/attention.rs`).
    Keys,
    /// The divided dim is that of tokens, which go to the devices of their experts. Operands and results that are whole along this factor
    /// are weights and their gradients, in blocks of dim 0 (`plan/passes/shard/experts.rs`).
    Experts,
}

/// The ways to divide one node.
pub type Factors = SmallVec<[Factor; 4]>;

/// What factors depend on: never on values, nor on a device.
#[derive(Clone, Copy, Debug)]
pub struct Signature<'a> {
    pub operands: &'a [(Shape, DType)],
    pub results: &'a [(Shape, DType)],
    pub attrs: &'a [i64],
}

impl Signature<'_> {
    /// Shape of operand `k`.
    pub fn shape(&self, k: usize) -> Shape {
        self.operands[k].0
    }

    /// Shape of the first result.
    pub fn out(&self) -> Shape {
        self.results[0].0
    }

    fn axis(&self) -> usize {
        self.attrs[0] as usize
    }
}

/// Computes the factors of a node.
pub type Rule = fn(&Signature) -> Factors;

impl Factor {
    fn new(operands: SmallVec<[Piece; 4]>, results: SmallVec<[Piece; 2]>, units: usize) -> Factor {
        Factor { operands, results, units, size_attr: None, positions: None, meets: None }
    }

    /// A factor of one result: a block of dim `out` of it, and those pieces of the operands.
    pub fn block(operands: &[Piece], out: usize, units: usize) -> Factor {
        Factor::new(operands.into(), smallvec![Piece::Block(out as u8)], units)
    }

    /// A factor along which each device computes a term of the one result.
    pub fn terms(operands: &[Piece], combine: Combine, units: usize) -> Factor {
        Factor::new(operands.into(), smallvec![Piece::Term(combine)], units)
    }

    /// A linear op of terms of a sum: the operands in `terms` are such terms, the others whole.
    fn linear(operands: usize, terms: &[usize]) -> Factor {
        let piece = |k| if terms.contains(&k) { Piece::Term(Combine::Sum) } else { Piece::Whole };
        Factor::terms(&(0..operands).map(piece).collect::<SmallVec<[Piece; 4]>>(), Combine::Sum, 0)
    }
}

/// Returns the ways to divide a node of `op`.
pub fn factors(op: &Op, s: &Signature) -> Factors {
    if let Some(rule) = op.shard {
        return rule(s);
    }
    match op.class {
        Class::Map(f) => map(f, s),
        Class::Cast => cast(s),
        Class::Reduce(f) => reduce(f, s),
        _ => Factors::new(),
    }
}

/// Every dim is a factor: no element depends on another one. Operands that broadcast along a dim are whole.
pub fn elementwise(s: &Signature) -> Factors {
    let out = s.out();
    let all_dims = (0..out.rank()).map(|d| {
        let piece = |(shape, _): &(Shape, DType)| match (d + shape.rank()).checked_sub(out.rank()) {
            Some(own) if shape.dims()[own] == out.dims()[d] => Piece::Block(own as u8),
            _ => Piece::Whole,
        };
        let results = s.results.iter().map(|_| Piece::Block(d as u8)).collect();
        Factor::new(s.operands.iter().map(piece).collect(), results, out.dims()[d])
    });
    all_dims.collect()
}

fn map(f: MapFn, s: &Signature) -> Factors {
    let mut out = elementwise(s);
    let floats = s.operands.iter().all(|(_, d)| d.is_float() || *d == DType::Bool);
    let linear: &[&[usize]] = match f {
        MapFn::Copy | MapFn::Neg => &[&[0]],
        MapFn::Add | MapFn::Sub => &[&[0, 1]],
        MapFn::Mul => &[&[0], &[1]],
        MapFn::Div if floats => &[&[0]],
        MapFn::Where => &[&[1, 2]],
        _ => &[],
    };
    out.extend(linear.iter().map(|terms| Factor::linear(s.operands.len(), terms)));
    out
}

/// A term of a sum may be widened. Rounding it to fewer bits would round every term.
fn cast(s: &Signature) -> Factors {
    let mut out = elementwise(s);
    let (from, to) = (s.operands[0].1, s.results[0].1);
    if from.is_float() && to.is_float() && to.size() >= from.size() {
        out.push(Factor::linear(1, &[0]));
    }
    out
}

fn reduce(f: ReduceFn, s: &Signature) -> Factors {
    let (from, to) = (s.attrs[0] as usize, s.attrs[1] as usize);
    let combine = match f {
        ReduceFn::Sum => Some(Combine::Sum),
        ReduceFn::Max => Some(Combine::Max),
        ReduceFn::Min => Some(Combine::Min),
        ReduceFn::Prod => None,
    };
    let mut out = Factors::new();
    for (d, &size) in s.shape(0).dims().iter().enumerate() {
        let operand = [Piece::Block(d as u8)];
        if !(from..to).contains(&d) {
            out.push(Factor::block(&operand, if d < from { d } else { d - (to - from) }, size));
        } else if let Some(combine) = combine {
            out.push(Factor::terms(&operand, combine, size));
        }
    }
    if f == ReduceFn::Sum {
        out.push(Factor::linear(1, &[0]));
    }
    out
}
