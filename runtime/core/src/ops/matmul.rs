//! Defines the matrix product: one batched primitive, and the ops that reduce to it.

use super::{Class, Grad, Op, Results, Tolerance, movement, one};
use crate::amp::Amp;
use crate::error::{Error, Result};
use crate::graph::{Graph, Meta, NodeId};
use crate::{DType, Shape};
use smallvec::{SmallVec, smallvec};

pub static OPS: &[&Op] = &[&MATMUL, &MM, &BMM, &LINEAR, &DOT, &OUTER, &super::einsum::EINSUM];

/// a (B..., M, K), b (B..., K, N), batch dims equal -> (B..., M, N).
pub static MATMUL: Op = Op {
    name: "matmul",
    epilogue: true,
    sig: "a: tensor, b: tensor",
    doc: "a (..., M, K), b (..., K, N) -> (..., M, N); leading dims broadcast. A vector a (K) or b (K) works too; its dim\n\
          is removed from the result.\n\
          Sums are in f32 for f32 and 16-bit floats, in f64 for f64, wrapping for integers. Both must promote to one dtype.",
    results: crate::ops::Results::One,
    shard: Some(crate::sharding::product),
    class: Class::Library,
    flops: Some(super::product_flops),
    infer: |i| {
        let (a, b) = (i.shape(0), i.shape(1));
        let r = a.rank();
        Ok(Meta { shape: a.with(r - 1, b.dims()[r - 1]), dtype: i.dtype(0) })
    },
    call: Some(|g, a| {
        let (x, y) = (a.tensor(0)?, a.tensor(1)?);
        matmul(g, x, y).map(one)
    }),
    grad: Grad::Rule(|g, c| {
        let (a, b) = (c.x(0), c.x(1));
        let da = if c.needs[0] { Some(product(g, a, c.grad, b, false)?) } else { None };
        let db = if c.needs[1] { Some(product(g, b, c.grad, a, true)?) } else { None };
        Ok(smallvec![da, db])
    }),
    amp: Amp::Low,
    samples: &[
        "f(2,3), f(3,4)",
        "f(3), f(3)",
        "f(2,3), f(3)",
        "f(3), f(3,4)",
        "f(2,2,3), f(2,3,4)",
        "f(2,1,2,3), f(5,3,4)",
        "f(2,3,4), f(4,5)",
        "f(0,3), f(3,4)",
        "f(2,0), f(0,4)",
        "f(33,70), f(70,17)",
    ],
    smooth: true,
    ..Op::BASE
};

/// The gradient of `x`, an operand of a product whose result has gradient `grad`, with `y` the other operand: grad yT,
/// or yT grad if `x` is the right operand.
///
/// If `x` is the transpose of a stored matrix (`linear`'s weight), the transposed product is recorded, so that the
/// gradient has the matrix's own memory layout and an update of it reads contiguous memory.
fn product(g: &mut Graph, x: NodeId, grad: NodeId, y: NodeId, right: bool) -> Result<NodeId> {
    if is_transpose(g, x) {
        let gt = g.t(grad)?;
        let p = if right { g.push(&MATMUL, &[gt, y], &[])? } else { g.push(&MATMUL, &[y, gt], &[])? };
        return g.t(p);
    }
    let yt = g.t(y)?;
    let (l, r) = if right { (yt, grad) } else { (grad, yt) };
    g.push(&MATMUL, &[l, r], &[])
}

/// Whether a node swaps the last two dims of another node and leaves the others.
pub fn is_transpose(g: &Graph, x: NodeId) -> bool {
    let n = g.node(x);
    let r = n.shape.rank();
    n.op == &movement::PERMUTE
        && n.attrs[..r - 2].iter().enumerate().all(|(k, a)| *a == k as i64)
        && n.attrs[r - 2..] == [r as i64 - 1, r as i64 - 2]
}

/// Records the general product: promotes, broadcasts batch dims, folds a batch of left rows against one right matrix.
pub fn matmul(g: &mut Graph, a: NodeId, b: NodeId) -> Result<NodeId> {
    let (sa, sb) = (g.shape(a), g.shape(b));
    let chain = |k1: usize, k2: usize| {
        let message = format!(
            "shapes {sa} and {sb} do not chain: last dim of the first ({k1}) must equal the {} of the second ({k2})",
            if sb.rank() == 1 { "only dim" } else { "second-to-last" }
        );
        Err(Error::shape("matmul", message))
    };
    if sa.is_scalar() || sb.is_scalar() {
        return Err(Error::shape("matmul", format!("shapes {sa} and {sb}: both need at least one dim"))
            .hint("use * for a scalar factor"));
    }
    let dtype = DType::promote(g.dtype(a), g.dtype(b));
    let dtype = if dtype == DType::Bool { DType::I64 } else { dtype };
    let (a, b) = (g.cast(a, dtype)?, g.cast(b, dtype)?);
    let k1 = sa.dims()[sa.rank() - 1];
    let k2 = if sb.rank() == 1 { sb.dims()[0] } else { sb.dims()[sb.rank() - 2] };
    if k1 != k2 {
        return chain(k1, k2);
    }
    // Vectors become matrices, and the added dim is removed at the end.
    let a2 = if sa.rank() == 1 { g.unsqueeze(a, 0)? } else { a };
    let b2 = if sb.rank() == 1 { g.unsqueeze(b, 1)? } else { b };
    let (s2, t2) = (g.shape(a2), g.shape(b2));
    let n = t2.dims()[t2.rank() - 1];
    let mut y = if t2.rank() == 2 {
        // One right matrix for all batches: one product over the rows of all batches.
        let rows: usize = s2.dims()[..s2.rank() - 1].iter().product();
        let flat = g.reshape(a2, &[rows, k1])?;
        let y = g.push(&MATMUL, &[flat, b2], &[])?;
        let r = s2.rank();
        movement::reshape(g, y, s2.with(r - 1, n))?
    } else {
        let batch = |s: &Shape| Shape::of(&s.dims()[..s.rank() - 2]);
        let Some(common) = Shape::broadcast(&batch(&s2), &batch(&t2)) else {
            return Err(Error::shape("matmul", format!("shapes {sa} and {sb}: the leading dims do not broadcast")));
        };
        let full = |s: &Shape| {
            let mut dims: SmallVec<[usize; 8]> = common.dims().into();
            dims.extend_from_slice(&s.dims()[s.rank() - 2..]);
            Shape::new(&dims)
        };
        let (fa, fb) = (full(&s2)?, full(&t2)?);
        let (a3, b3) = (g.expand(a2, fa)?, g.expand(b2, fb)?);
        g.push(&MATMUL, &[a3, b3], &[])?
    };
    if sb.rank() == 1 {
        let s = g.shape(y);
        y = movement::reshape(g, y, s.remove(s.rank() - 1))?;
    }
    if sa.rank() == 1 {
        let s = g.shape(y);
        let at = s.rank() - if sb.rank() == 1 { 1 } else { 2 };
        y = movement::reshape(g, y, s.remove(at))?;
    }
    Ok(y)
}

fn ranked(g: &Graph, op: &str, x: NodeId, rank: usize) -> Result<()> {
    let s = g.shape(x);
    if s.rank() != rank {
        return Err(Error::shape(op, format!("needs tensors of {rank} dims, not shape {s}")));
    }
    Ok(())
}

pub static MM: Op = Op {
    name: "mm",
    sig: "a: tensor, b: tensor",
    doc: "a (M, K), b (K, N) -> (M, N).",
    call: Some(|g, a| {
        let (x, y) = (a.tensor(0)?, a.tensor(1)?);
        ranked(g, "mm", x, 2)?;
        ranked(g, "mm", y, 2)?;
        matmul(g, x, y).map(one)
    }),
    samples: &["f(2,3), f(3,4)"],
    smooth: true,
    ..Op::BASE
};

pub static BMM: Op = Op {
    name: "bmm",
    sig: "a: tensor, b: tensor",
    doc: "a (B, M, K), b (B, K, N) -> (B, M, N).",
    call: Some(|g, a| {
        let (x, y) = (a.tensor(0)?, a.tensor(1)?);
        ranked(g, "bmm", x, 3)?;
        ranked(g, "bmm", y, 3)?;
        matmul(g, x, y).map(one)
    }),
    samples: &["f(2,2,3), f(2,3,4)"],
    smooth: true,
    ..Op::BASE
};

/// x (M, I), weight (O, I), bias (O) -> (M, O), all of one float dtype. Without a bias, or for integers, a call is
/// recorded as products and sums.
pub static LINEAR: Op = Op {
    name: "linear",
    epilogue: true,
    tolerance: Some(Tolerance { half: 1.0, wide: 8.0, half_scaled: 0.25 }),
    sig: "x: tensor, weight: tensor, bias: tensor?",
    doc: "x (..., I), weight (O, I), bias (O) -> (..., O): x times weight transposed, plus bias.\n\
          The bias is added before the sum is rounded, so 16-bit floats round once.",
    shard: Some(crate::sharding::linear),
    class: Class::Fused(|g, x, _| {
        let dtype = g.dtype(x[0]);
        let (a, w, b) = (g.widen(x[0])?, g.widen(x[1])?, g.widen(x[2])?);
        let wt = g.t(w)?;
        let y = g.push(&MATMUL, &[a, wt], &[])?;
        let y = g.add_(y, b)?;
        g.cast(y, dtype).map(one)
    }),
    flops: Some(super::product_flops),
    results: Results::One,
    infer: |i| {
        i.float(0)?;
        let (x, w) = (i.shape(0), i.shape(1));
        Ok(Meta { shape: x.with(1, w.dims()[0]), dtype: i.dtype(0) })
    },
    call: Some(|g, a| {
        let (x, w) = (a.tensor(0)?, a.tensor(1)?);
        let (sx, sw) = (g.shape(x), g.shape(w));
        if sw.rank() != 2 || sx.is_scalar() || sx.dims()[sx.rank() - 1] != sw.dims()[1] {
            let message = format!(
                "x {sx} and weight {sw} do not chain: last dim of x must equal the last dim of weight (out, in)"
            );
            return Err(Error::shape("linear", message));
        }
        let mut given: SmallVec<[NodeId; 4]> = smallvec![x, w];
        if let Some(b) = a.opt_tensor(2) {
            if g.shape(b) != Shape::of(&sw.dims()[..1]) {
                return Err(Error::shape("linear", format!("bias {} must be {{{}}}", g.shape(b), sw.dims()[0])));
            }
            given.push(b);
        }
        // Cast before the views are applied: the gradient of a weight then has its memory layout (see `product`).
        if let Some(low) = g.modes.autocast {
            given = crate::amp::cast_inputs(g, Amp::Low, low, &given)?;
        }
        let dtype = DType::promote(g.dtype(given[0]), g.dtype(given[1]));
        let (x, w) = (given[0], given[1]);
        if let Some(&b) = given.get(2).filter(|_| dtype.is_float()) {
            let (x, w, b) = (g.cast(x, dtype)?, g.cast(w, dtype)?, g.cast(b, dtype)?);
            let rows = sx.dims()[..sx.rank() - 1].iter().product();
            let flat = g.reshape(x, &[rows, sw.dims()[1]])?;
            let y = g.push(&LINEAR, &[flat, w, b], &[])?;
            return movement::reshape(g, y, sx.with(sx.rank() - 1, sw.dims()[0])).map(one);
        }
        let wt = g.t(w)?;
        let y = matmul(g, x, wt)?;
        let Some(&b) = given.get(2) else { return Ok(one(y)) };
        let dtype = g.dtype(y);
        let b = g.cast(b, dtype)?;
        g.add_(y, b).map(one)
    }),
    grad: Grad::Rule(|g, c| {
        let (x, w, d) = (c.x(0), c.x(1), c.grad);
        let dx = if c.needs[0] { Some(g.push(&MATMUL, &[d, w], &[])?) } else { None };
        // In the storage order of the weight, so that an update of it reads contiguous memory.
        let dw = if c.needs[1] {
            let dt = g.t(d)?;
            Some(g.push(&MATMUL, &[dt, x], &[])?)
        } else {
            None
        };
        let db = if c.needs[2] { Some(g.sum(d, &[0], false)?) } else { None };
        Ok(smallvec![dx, dw, db])
    }),
    amp: Amp::Low,
    samples: &[
        "f(2,3), f(4,3), f(4)",
        "f(2,5,3), f(4,3)",
        "f(3), f(4,3), f(4)",
        "f(0,3), f(4,3), f(4)",
        "f(2,0), f(4,0), f(4)",
        "f(33,70), f(17,70), f(17)",
    ],
    smooth: true,
    ..Op::BASE
};

pub static DOT: Op = Op {
    name: "dot",
    sig: "a: tensor, b: tensor",
    doc: "a (N), b (N) -> scalar: sum of products.",
    call: Some(|g, a| {
        let (x, y) = (a.tensor(0)?, a.tensor(1)?);
        ranked(g, "dot", x, 1)?;
        ranked(g, "dot", y, 1)?;
        matmul(g, x, y).map(one)
    }),
    samples: &["f(5), f(5)", "f(0), f(0)"],
    smooth: true,
    ..Op::BASE
};

pub static OUTER: Op = Op {
    name: "outer",
    sig: "a: tensor, b: tensor",
    doc: "a (M), b (N) -> (M, N): out[i, j] = a[i] * b[j].",
    call: Some(|g, a| {
        let (x, y) = (a.tensor(0)?, a.tensor(1)?);
        ranked(g, "outer", x, 1)?;
        ranked(g, "outer", y, 1)?;
        let x = g.unsqueeze(x, 1)?;
        g.mul(x, y).map(one)
    }),
    samples: &["f(2), f(3)", "f(0), f(3)"],
    smooth: true,
    ..Op::BASE
};
