//! Defines the feed-forward layers of experts, of which each token passes through some: the core of a mixture of experts.
//!
//! Letters: N tokens, C width, H hidden width, D result width, E experts, K experts of a token, R = N K rows.
//!
//! Both nodes decompose into a sort of the rows by expert, grouped products and the inverse order. They are whole in a recording, so that
//! the planner sees which rows go to which expert: where a mesh splits the experts, devices exchange rows and run the same node on
//! those of their own experts (`plan/passes/shard/experts.rs`). The backward node recomputes what the forward node computed, which the
//! planner merges with it. Shazeer et al., arXiv:1701.06538.

use super::{
    Class, Grad, GradCtx, Op, Out, activation, create, elementwise, grouped, index, movement, one, out_of, scan, sort,
};
use crate::amp::Amp;
use crate::error::{Error, Result};
use crate::graph::{Graph, Meta, NodeId};
use crate::op::times;
use crate::{DType, Shape};
use smallvec::{SmallVec, smallvec};

pub static OPS: &[&Op] = &[&EXPERT_MLP, &EXPERT_MLP_BACKWARD];

/// Operand numbers: x, the expert of each row, and two weights. The backward node has the gradient next. The gate is last, if there is
/// one.
pub const EXPERT: usize = 1;
pub const UP: usize = 2;
const DOWN: usize = 3;
pub const GRADIENT: usize = 4;

/// Attribute numbers: 1 for the tanh form of GELU; how many rows there are for one that has an expert, where a device has slots for more
/// rows than come.
const TANH: usize = 0;
pub const SLOTS: usize = 1;

/// If operand `k` of a node names experts: the operand whose first dim counts them.
pub fn number_of_experts(op: &Op, k: usize) -> Option<usize> {
    (k == EXPERT && (op == &EXPERT_MLP || op == &EXPERT_MLP_BACKWARD)).then_some(UP)
}

/// The rows of all tokens, in the order of their experts.
struct Rows {
    /// For each place, the row: (R).
    order: NodeId,
    /// For each row, its place: (R).
    places: NodeId,
    /// The token of each place: (R).
    tokens: NodeId,
    /// Where the rows of each expert end: (E).
    ends: NodeId,
    shape: Shape,
    /// The attributes of grouped products.
    slots: SmallVec<[i64; 1]>,
}

impl Rows {
    /// Sorts the rows of `expert` (N, K). Those of no expert come last.
    fn sort(g: &mut Graph, expert: NodeId, experts: usize, attrs: &[i64]) -> Result<Rows> {
        let shape = g.shape(expert);
        let flat = g.reshape(expert, &[shape.numel()])?;
        let order = g.push(&sort::ARGSORT, &[flat], &[0, 0])?;
        let places = g.push(&sort::ARGSORT, &[order], &[0, 0])?;
        let each = g.int_constant(shape.dims()[1] as i64);
        let tokens = g.map(&elementwise::FLOOR_DIV, &[order, each])?;
        let hits = index::one_hot(g, flat, experts)?;
        let hits = g.cast(hits, DType::I64)?;
        let counts = g.sum(hits, &[0], false)?;
        let ends = g.push(&scan::CUMSUM, &[counts], &[0])?;
        let slots = attrs.get(SLOTS).copied().into_iter().collect();
        Ok(Rows { order, places, tokens, ends, shape, slots })
    }

    /// Element `at` of each row of `x` (M, ..), in the order of experts or back.
    fn take(g: &mut Graph, x: NodeId, at: NodeId) -> Result<NodeId> {
        g.push(&index::INDEX_SELECT, &[x, at], &[0, index::OF_PLANNER])
    }

    /// Results by place (R, D) as (N, K, D).
    fn back(&self, g: &mut Graph, y: NodeId) -> Result<NodeId> {
        let y = Rows::take(g, y, self.places)?;
        let width = g.shape(y).dims()[1];
        movement::reshape(g, y, self.shape.insert(2, width)?)
    }

    fn product(&self, g: &mut Graph, x: NodeId, w: NodeId) -> Result<NodeId> {
        g.push(&grouped::GROUPED_MATMUL, &[x, w, self.ends], &self.slots)
    }

    /// As `product`, by the transposes of the matrices.
    fn product_t(&self, g: &mut Graph, x: NodeId, w: NodeId) -> Result<NodeId> {
        let w = g.t(w)?;
        self.product(g, x, w)
    }

    fn sums(&self, g: &mut Graph, a: NodeId, b: NodeId) -> Result<NodeId> {
        g.push(&grouped::GROUPED_SUMS, &[a, b, self.ends], &self.slots)
    }
}

/// The hidden layer of all rows by place.
struct Hidden {
    /// The rows of x: (R, C).
    x: NodeId,
    /// x times `up`, and x times `gate`: (R, H).
    up: NodeId,
    gate: Option<NodeId>,
    /// silu(gate) if there is one.
    open: Option<NodeId>,
    /// What `down` multiplies.
    h: NodeId,
}

impl Hidden {
    fn of(g: &mut Graph, rows: &Rows, x: NodeId, up: NodeId, gate: Option<NodeId>, attrs: &[i64]) -> Result<Hidden> {
        let x = Rows::take(g, x, rows.tokens)?;
        let up = rows.product(g, x, up)?;
        let Some(gate) = gate else {
            let h = g.push(&activation::GELU, &[up], &attrs[..=TANH])?;
            return Ok(Hidden { x, up, gate: None, open: None, h });
        };
        let gate = rows.product(g, x, gate)?;
        let open = g.push(&activation::SILU, &[gate], &[])?;
        let h = g.mul(open, up)?;
        Ok(Hidden { x, up, gate: Some(gate), open: Some(open), h })
    }
}

/// The gradient of an elementwise op's operand.
fn through(g: &mut Graph, op: &'static Op, x: NodeId, attrs: &[i64], grad: NodeId) -> Result<NodeId> {
    let Grad::Rule(rule) = op.grad else {
        return Err(Error::gradient(op.name, "this is a bug: an activation without a rule"));
    };
    let context = GradCtx { op, out: x, inputs: &[x], attrs, grad, grads: &[Some(grad)], needs: &[true] };
    let found = rule(g, &context)?[0];
    found.ok_or_else(|| Error::gradient(op.name, "this is a bug: an activation without a gradient"))
}

/// Inputs: x (N, C), expert (N, K) i64, up (E, C, H), down (E, H, D), gate (E, C, H)? -> (N, K, D): each token through each of its
/// experts, silu(x gate) * (x up) times down, or gelu(x up) times down without a gate. An expert is from 0 to E - 1; E is none, whose
/// result is 0. The experts of a token differ. `attrs`: [`TANH`], and [`SLOTS`] where a mesh divides the experts.
pub static EXPERT_MLP: Op = Op {
    name: "expert_mlp",
    flops: Some(|w| {
        let rows = grouped::expected(w.numel(EXPERT), w.attrs.get(SLOTS));
        let matrices = w.inputs.len() as u64 - DOWN as u64;
        let wide = times([2, matrices, rows, w.dim(UP, 1), w.dim(UP, 0)]);
        wide.saturating_add(times([2, rows, w.dim(DOWN, 1), w.dim(DOWN, 0)]))
    }),
    shard: Some(crate::sharding::expert_mlp),
    class: Class::Fused(|g, x, attrs| {
        let experts = g.shape(x[UP]).dims()[0];
        let rows = Rows::sort(g, x[EXPERT], experts, attrs)?;
        let hidden = Hidden::of(g, &rows, x[0], x[UP], x.get(4).copied(), attrs)?;
        let y = rows.product(g, hidden.h, x[DOWN])?;
        rows.back(g, y).map(one)
    }),
    infer: |i| {
        i.float(0)?;
        let width = i.shape(DOWN).dims()[2];
        Ok(Meta { shape: i.shape(EXPERT).insert(2, width)?, dtype: i.dtype(0) })
    },
    grad: Grad::Rule(|g, c| {
        let mut inputs: SmallVec<[NodeId; 6]> = c.inputs[..GRADIENT].into();
        inputs.push(c.grad);
        inputs.extend_from_slice(&c.inputs[GRADIENT..]);
        let weights: SmallVec<[(Shape, DType); 3]> =
            c.inputs[UP..].iter().map(|w| (g.shape(*w), g.dtype(*w))).collect();
        let main = g.push(&EXPERT_MLP_BACKWARD, &inputs, c.attrs)?;
        let mut all = out_of(g, main, &weights).into_iter().map(Some);
        let mut grads: crate::ops::Grads = smallvec![all.next().flatten(), None];
        grads.extend(all);
        Ok(grads)
    }),
    amp: Amp::Low,
    smooth: true,
    ..Op::BASE
};

/// Inputs: x, expert, up, down, gradient (N, K, D), gate? -> the gradients of x, up, down and gate. `attrs` as [`EXPERT_MLP`].
pub static EXPERT_MLP_BACKWARD: Op = Op {
    name: "expert_mlp_backward",
    flops: Some(|w| {
        let rows = grouped::expected(w.numel(EXPERT), w.attrs.get(SLOTS));
        let matrices = w.inputs.len() as u64 - GRADIENT as u64;
        let wide = times([4, matrices, rows, w.dim(UP, 1), w.dim(UP, 0)]);
        wide.saturating_add(times([4, rows, w.dim(DOWN, 1), w.dim(DOWN, 0)]))
    }),
    shard: Some(crate::sharding::expert_mlp_backward),
    class: Class::Fused(|g, x, attrs| {
        let (up, down, gate) = (x[UP], x[DOWN], x.get(5).copied());
        let experts = g.shape(up).dims()[0];
        let rows = Rows::sort(g, x[EXPERT], experts, attrs)?;
        let hidden = Hidden::of(g, &rows, x[0], up, gate, attrs)?;
        let width = g.shape(x[GRADIENT]).dims()[2];
        let d = g.reshape(x[GRADIENT], &[rows.shape.numel(), width])?;
        let d = Rows::take(g, d, rows.order)?;
        let d_down = rows.sums(g, hidden.h, d)?;
        let dh = rows.product_t(g, d, down)?;
        let (d_up, d_gate) = match (hidden.gate, hidden.open) {
            (Some(gate), Some(open)) => {
                let d_open = g.mul(dh, hidden.up)?;
                (g.mul(dh, open)?, Some(through(g, &activation::SILU, gate, &[], d_open)?))
            }
            _ => (through(g, &activation::GELU, hidden.up, &attrs[..=TANH], dh)?, None),
        };
        let mut dx = rows.product_t(g, d_up, up)?;
        let mut out: Out = smallvec![rows.sums(g, hidden.x, d_up)?, d_down];
        if let (Some(d_gate), Some(gate)) = (d_gate, gate) {
            let more = rows.product_t(g, d_gate, gate)?;
            dx = g.add_(dx, more)?;
            out.push(rows.sums(g, hidden.x, d_gate)?);
        }
        let dx = rows.back(g, dx)?;
        out.insert(0, sum_of_token(g, dx)?);
        Ok(out)
    }),
    infer: create::same,
    grad: Grad::Expand,
    smooth: true,
    ..Op::BASE
};

/// Adds what the K rows of each token have: (N, K, C) -> (N, C). 16-bit floats are added in f32 and rounded once.
pub fn sum_of_token(g: &mut Graph, x: NodeId) -> Result<NodeId> {
    let dtype = g.dtype(x);
    let wide = g.widen(x)?;
    let sum = g.sum(wide, &[1], false)?;
    g.cast(sum, dtype)
}

/// Records `expert_mlp` of x (N, C), expert (N, K), up, down and gate, promoted to one dtype.
pub fn expert_mlp(
    g: &mut Graph,
    x: NodeId,
    expert: NodeId,
    [up, down]: [NodeId; 2],
    gate: Option<NodeId>,
    tanh: bool,
) -> Result<NodeId> {
    let op = EXPERT_MLP.name;
    let expert = index::as_index(g, op, expert)?;
    let (sx, se, su, sd) = (g.shape(x), g.shape(expert), g.shape(up), g.shape(down));
    let fits = match (sx.dims(), se.dims(), su.dims(), sd.dims()) {
        ([n, c], [m, k], [e, width, h], [f, hidden, _]) => {
            n == m && *k > 0 && c == width && e == f && h == hidden && gate.is_none_or(|w| g.shape(w) == su)
        }
        _ => false,
    };
    if !fits {
        let message =
            format!("x {sx}, expert {se}, up {su} and down {sd} must be (N, C), (N, K), (E, C, H) and (E, H, D)");
        return Err(Error::shape(op, message).hint("the gate has the shape of up"));
    }
    let all = [Some(x), Some(up), Some(down), gate].into_iter().flatten();
    let dtype = all.fold(g.dtype(x), |d, w| DType::promote(d, g.dtype(w))).to_float();
    let mut inputs: SmallVec<[NodeId; 5]> =
        smallvec![g.cast(x, dtype)?, expert, g.cast(up, dtype)?, g.cast(down, dtype)?];
    if let Some(gate) = gate {
        inputs.push(g.cast(gate, dtype)?);
    }
    g.push(&EXPERT_MLP, &inputs, &[i64::from(tanh)])
}
