//! Defines the targets of losses over classes: the check of class ids, smoothing, class weights, and the reduction of the rows.

use super::{CROSS_ENTROPY, MEAN, NLL_LOSS, NONE, SUM, reduce};
use crate::amp::Amp;
use crate::error::{Error, Result};
use crate::graph::{Graph, Infer, Meta, NodeId};
use crate::ops::{Args, Class, IndexFault, IndexKind, Op, create, index, real};
use crate::{DType, Shape};

/// `attrs` of the losses over classes: [1 if targets are probabilities, reduction, ignored id, smoothing bits, index in
/// `OF_CLASSES`].
pub(super) struct Classes {
    pub(super) probabilities: bool,
    pub(super) how: i64,
    pub(super) ignore: i64,
    pub(super) smoothing: f64,
    pub(super) which: i64,
    /// The axis of the classes and their number.
    pub(super) last: usize,
    pub(super) n: usize,
}

impl Classes {
    pub(super) fn of(logits: Shape, attrs: &[i64]) -> Classes {
        let last = logits.rank() - 1;
        Classes {
            probabilities: attrs[0] != 0,
            how: attrs[1],
            ignore: attrs[2],
            smoothing: real(attrs[3]),
            which: attrs[4],
            last,
            n: logits.dims()[last],
        }
    }

    /// Which targets are ignored. Only this small part of a loss reads the checked ids; the pass over the logits
    /// remains one kernel, which waits for it (`plan::fuse`).
    pub(super) fn skipped(&self, g: &mut Graph, target: NodeId) -> Result<NodeId> {
        let target = g.push(&CLASS_IDS, &[target], &[self.n as i64, self.which, self.ignore])?;
        let ignore = g.int_constant(self.ignore);
        g.eq(target, ignore)
    }

    /// `row` if the target counts, else 0.
    pub(super) fn guard(&self, g: &mut Graph, row: NodeId, target: NodeId) -> Result<NodeId> {
        let skip = self.skipped(g, target)?;
        let zero = g.constant_like(0.0, row);
        g.where_(skip, zero, row)
    }

    /// What each target adds to the divisor of "mean": 1 or the weight of its class, and 0 if it does not count.
    pub(super) fn shares(&self, g: &mut Graph, target: NodeId, weight: Option<NodeId>, dtype: DType) -> Result<NodeId> {
        match weight {
            Some(w) => {
                let picked = self.pick(g, w, target)?;
                self.guard(g, picked, target)
            }
            None => {
                let skip = self.skipped(g, target)?;
                let counts = g.logical_not(skip)?;
                g.cast(counts, dtype)
            }
        }
    }

    /// The divisor of "mean": the number of targets that count, or the sum of their classes' weights.
    pub(super) fn total(&self, g: &mut Graph, target: NodeId, weight: Option<NodeId>, dtype: DType) -> Result<NodeId> {
        let each = self.shares(g, target, weight, dtype)?;
        g.sum_all(each)
    }

    /// Reduces the losses of the rows. They are few compared with the logits, and are added and divided in f64: in f32
    /// the rounding of the sum alone could cost the loss several units in its last place.
    pub(super) fn reduce(&self, g: &mut Graph, rows: NodeId, target: NodeId, weight: Option<NodeId>) -> Result<NodeId> {
        if self.how == NONE {
            return Ok(rows);
        }
        let dtype = g.dtype(rows);
        let wide = g.cast(rows, DType::F64)?;
        let mean = if self.how != MEAN || self.probabilities {
            reduce(g, wide, self.how)?
        } else {
            let sum = g.sum_all(wide)?;
            let total = self.total(g, target, weight, dtype)?;
            let total = g.cast(total, DType::F64)?;
            g.div(sum, total)?
        };
        g.cast(mean, dtype)
    }

    /// The probabilities of the targets, after smoothing: (..., C).
    pub(super) fn wanted(&self, g: &mut Graph, target: NodeId, like: NodeId) -> Result<NodeId> {
        if self.probabilities {
            let t = g.widen(target)?;
            return self.smooth(g, t);
        }
        let hit = index::one_hot(g, target, self.n)?;
        let off = self.smoothing / self.n as f64;
        let (on, off) = (g.constant_like(1.0 - self.smoothing + off, like), g.constant_like(off, like));
        g.where_(hit, on, off)
    }

    /// The element of each row of `x` at the target's class; a vector is used for all rows.
    pub(super) fn pick(&self, g: &mut Graph, x: NodeId, target: NodeId) -> Result<NodeId> {
        let hit = index::one_hot(g, target, self.n)?;
        let zero = g.constant_like(0.0, x);
        let x = g.where_(hit, x, zero)?;
        g.sum(x, &[self.last], false)
    }

    /// Target probabilities after smoothing.
    pub(super) fn smooth(&self, g: &mut Graph, target: NodeId) -> Result<NodeId> {
        if self.smoothing == 0.0 {
            return Ok(target);
        }
        let t = g.mul_c(target, 1.0 - self.smoothing)?;
        g.add_c(t, self.smoothing / self.n as f64)
    }
}

/// The mean of a loss over class ids as its sum and its divisor, for means over several batches: both add up, even if a
/// batch has no id that counts. `None` for any other node, and in 16 bits, which cannot hold a sum.
pub fn sum_and_total(g: &mut Graph, loss: NodeId) -> Result<Option<(NodeId, NodeId)>> {
    let node = g.node(loss).clone();
    let of_classes = node.op == &CROSS_ENTROPY || node.op == &NLL_LOSS;
    if !of_classes || node.dtype.is_half() || node.attrs[0] != 0 || node.attrs[1] != MEAN {
        return Ok(None);
    }
    let c = Classes::of(g.shape(node.inputs[0]), &node.attrs);
    let mut attrs = node.attrs.clone();
    attrs[1] = SUM;
    g.without_autocast(|g| {
        let sum = g.push(node.op, &node.inputs, &attrs)?;
        let total = g.with_no_grad(true, |g| {
            let weight = widened(g, node.inputs.get(2))?;
            c.total(g, node.inputs[1], weight, node.dtype)
        })?;
        Ok(Some((sum, total)))
    })
}

/// Shape rule of the losses over classes: a scalar, or one loss per row.
pub(super) fn per_row(i: &Infer) -> Result<Meta> {
    i.float(0)?;
    let logits = i.shape(0);
    let shape = if i.attrs[1] == NONE { logits.remove(logits.rank() - 1) } else { Shape::SCALAR };
    Ok(Meta { shape, dtype: i.dtype(0) })
}

/// The ops whose ids are checked; the second attribute of `CLASS_IDS` is an index into this list.
pub const OF_CLASSES: [&str; 3] = ["cross_entropy", "nll_loss", "one_hot"];

/// The ignored id of an op that ignores none: one that is valid anyway.
pub const IGNORES_NONE: i64 = 0;

/// The hint for an id outside the classes.
pub fn cure_of_class(classes: i64, ignored: i64) -> String {
    match ignored {
        IGNORES_NONE => format!("classes count from 0: here 0 to {}", classes - 1),
        id => format!("classes count from 0: here 0 to {}, or {id} (ignore_index) to ignore one", classes - 1),
    }
}

/// Inputs: ids i64; `attrs`: [number of classes, index in `OF_CLASSES`, ignored id]. Returns the ids. Each must be from
/// 0 to the number of classes - 1 or the ignored one; any other is an error in the name of the op.
pub static CLASS_IDS: Op = Op {
    name: "class_ids",
    shard: Some(crate::sharding::elementwise),
    class: Class::Library,
    infer: create::same,
    amp: Amp::Keep,
    index_fault: Some(|attrs| IndexFault { op: OF_CLASSES[attrs[1] as usize], kind: IndexKind::Classes(attrs[2]) }),
    ..Op::BASE
};

/// Checks class ids against logits (N..., C) and converts them to i64. Their values are checked when the step runs.
pub(super) fn class_ids(g: &mut Graph, op: &str, logits: NodeId, target: NodeId) -> Result<NodeId> {
    let (x, t, dtype) = (g.shape(logits), g.shape(target), g.dtype(target));
    let want = x.remove(x.rank() - 1);
    if !dtype.is_int() {
        return Err(Error::dtype(op, format!("class ids must be integers, not {dtype}"))
            .hint("convert them with y:to(\"i64\")"));
    }
    if t != want {
        let e = Error::shape(
            op,
            format!("target {t} does not fit logits {x}: it must be {want}, one class id for each row of logits"),
        );
        let column = t.rank() == want.rank() + 1 && t.dims()[t.rank() - 1] == 1;
        let second = x.rank() > 2 && t == x.remove(1);
        return Err(match (column, second) {
            (true, _) => e.hint("drop the last dim of the target with y:squeeze(-1)"),
            (_, true) => e.hint("classes are the last dim here: move them with logits:permute"),
            _ => e,
        });
    }
    g.cast(target, DType::I64)
}

/// Option `i`, one weight for each class.
pub(super) fn class_weight(g: &mut Graph, a: &Args, i: usize, logits: NodeId) -> Result<Option<NodeId>> {
    let Some(w) = a.opt_tensor(i) else { return Ok(None) };
    let (s, x, dtype) = (g.shape(w), g.shape(logits), g.dtype(w));
    let n = x.dims()[x.rank() - 1];
    if s.dims() != [n] || !dtype.is_float() {
        let message = format!("weight is {dtype} {s}; it must be a float tensor {{{n}}}, one number for each class");
        return Err(Error::shape(a.op.name, message));
    }
    let wide = if g.dtype(logits) == DType::F64 { DType::F64 } else { DType::F32 };
    g.cast(w, wide).map(Some)
}

/// Converts a weight among the inputs to at least f32.
pub(super) fn widened(g: &mut Graph, weight: Option<&NodeId>) -> Result<Option<NodeId>> {
    weight.map(|&w| g.widen(w)).transpose()
}

pub(super) fn logits_of(g: &mut Graph, a: &Args) -> Result<NodeId> {
    let x = a.tensor(0)?;
    let shape = g.shape(x);
    if shape.is_scalar() || shape.dims()[shape.rank() - 1] == 0 {
        return Err(Error::shape(a.op.name, format!("needs (..., classes), not shape {shape}")));
    }
    g.to_float(x)
}
