//! Defines data movement: views, which read the same elements through another layout, and the ops built on them.
//!
//! Six primitives: `reshape expand permute slice flip window`, and `detach`. None of them moves a byte by itself; the
//! planner folds chains of them into strides. `strided_pad` is the opposite of `slice` and does write memory, as does `cat`.

use super::{Args, Class, Grad, Op, Out, create, one};
use crate::error::{Error, Result};
use crate::graph::{Graph, Infer, Meta, NodeId};
use crate::shape::{Dims, size};
use crate::{Layout, MAX_RANK, Shape};
use smallvec::{SmallVec, smallvec};

pub static OPS: &[&Op] = &[
    &RESHAPE,
    &VIEW,
    &FLATTEN,
    &UNFLATTEN,
    &SQUEEZE,
    &UNSQUEEZE,
    &PERMUTE,
    &TRANSPOSE,
    &T,
    &EXPAND,
    &BROADCAST_TO,
    &NARROW,
    &SELECT,
    &SLICE,
    &FLIP,
    &ROLL,
    &UNFOLD,
    &COL2IM,
    &DETACH,
    &CAT,
    &STACK,
    &SPLIT,
    &CHUNK,
    &UNBIND,
    &STRIDED_PAD,
    &PAD,
    &TRIL,
    &TRIU,
    &TILE,
    &REPEAT_INTERLEAVE,
    &DIAGONAL,
    &CONCAT,
];

type Vec8 = SmallVec<[usize; 8]>;

fn same(i: &Infer) -> Result<Meta> {
    Ok(i.inputs[0])
}

/// The shape that the attributes contain in full.
fn from_attrs(i: &Infer) -> Result<Meta> {
    let dims: Vec8 = i.attrs.iter().map(|&d| d as usize).collect();
    Ok(Meta { shape: Shape::new(&dims)?, dtype: i.dtype(0) })
}

fn attrs_of(dims: &[usize]) -> SmallVec<[i64; 8]> {
    dims.iter().map(|&d| d as i64).collect()
}

// ---- reshape ---------------------------------------------------------------------------------------------------

pub fn reshape(g: &mut Graph, x: NodeId, shape: Shape) -> Result<NodeId> {
    if g.shape(x) == shape {
        return Ok(x);
    }
    g.push(&RESHAPE, &[x], &attrs_of(shape.dims()))
}

/// Resolves dims with at most one -1 against `shape`.
fn resolve(op: &str, shape: Shape, dims: &[i64]) -> Result<Shape> {
    let bad = |why: String| Err(Error::shape(op, format!("shape {shape} cannot become {}: {why}", Dims(dims))));
    let mut known = 1u128;
    let mut free = None;
    for (i, &d) in dims.iter().enumerate() {
        match d {
            -1 if free.is_none() => free = Some(i),
            -1 => return bad("only one dim may be -1".into()),
            d if d < 0 => return bad(format!("dim {d} is negative")),
            d => known = known.saturating_mul(d as u128),
        }
    }
    let n = shape.numel() as u128;
    let mut out: Vec8 = dims.iter().map(|&d| d as usize).collect();
    if let Some(i) = free {
        if known == 0 || !n.is_multiple_of(known) {
            return bad(format!("{n} elements are not a multiple of {known}"));
        }
        out[i] = (n / known) as usize;
    } else if known != n {
        return bad(format!("it has {n} elements and would need {known}"));
    }
    Shape::new(&out)
}

fn call_reshape(g: &mut Graph, a: &Args) -> Result<Out> {
    let x = a.tensor(0)?;
    let shape = resolve(a.op.name, g.shape(x), a.ints(1)?)?;
    reshape(g, x, shape).map(one)
}

pub static RESHAPE: Op = Op {
    name: "reshape",
    sig: "x: tensor, shape: ints",
    doc: "x (...) -> (shape): the same elements in row-major order under other dims; one dim may be -1 and is inferred.\n\
          Free if strides can express it; otherwise the elements are copied.",
    shard: Some(crate::sharding::reshape),
    class: Class::View(|l, _, out| l.reshape(*out)),
    infer: from_attrs,
    call: Some(call_reshape),
    grad: Grad::Rule(|g, c| {
        let shape = g.shape(c.x(0));
        Ok(smallvec![Some(reshape(g, c.grad, shape)?)])
    }),
    samples: &["f(2,6), [3,4]", "f(2,6), [-1]", "f(2,3,4), [2,-1,2]", "f(0,3), [3,0]", "f(), [1,1]", "f(4), [2,2]"],
    smooth: true,
    ..Op::BASE
};

pub static VIEW: Op = Op {
    name: "view",
    sig: "x: tensor, shape: ints",
    doc: "x (...) -> (shape): the same as `reshape`, since tensors never alias.",
    call: Some(call_reshape),
    samples: &["f(2,6), [3,4]", "f(2,3,4), [2,-1]"],
    smooth: true,
    ..Op::BASE
};

pub static FLATTEN: Op = Op {
    name: "flatten",
    sig: "x: tensor, start: int = 0, stop: int = -1",
    doc: "x (...) -> dims start to stop (both included) merged into one.",
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let shape = g.shape(x);
        if shape.is_scalar() {
            return reshape(g, x, Shape::of(&[1])).map(one);
        }
        let (lo, hi) = (shape.axis("flatten", a.int(1)?)?, shape.axis("flatten", a.int(2)?)?);
        if lo > hi {
            return Err(Error::argument("flatten", format!("start dim {lo} comes after stop dim {hi}")));
        }
        let mut dims: Vec8 = shape.dims()[..lo].into();
        dims.push(shape.dims()[lo..=hi].iter().product());
        dims.extend_from_slice(&shape.dims()[hi + 1..]);
        reshape(g, x, Shape::of(&dims)).map(one)
    }),
    samples: &["f(2,3,4)", "f(2,3,4), 1", "f(2,3,4), 0, 1", "f()", "f(0,3)"],
    smooth: true,
    ..Op::BASE
};

pub static UNFLATTEN: Op = Op {
    name: "unflatten",
    sig: "x: tensor, dim: int, sizes: ints",
    doc: "x (...) -> dim `dim` split into `sizes`, of which one may be -1.",
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let shape = g.shape(x);
        let at = shape.axis("unflatten", a.int(1)?)?;
        let part = resolve("unflatten", Shape::of(&[shape.dims()[at]]), a.ints(2)?)?;
        let mut dims: Vec<usize> = shape.dims()[..at].into();
        dims.extend_from_slice(part.dims());
        dims.extend_from_slice(&shape.dims()[at + 1..]);
        reshape(g, x, Shape::new(&dims)?).map(one)
    }),
    samples: &["f(2,6), 1, [2,3]", "f(6,2), 0, [-1,2]"],
    smooth: true,
    ..Op::BASE
};

pub static SQUEEZE: Op = Op {
    name: "squeeze",
    sig: "x: tensor, dims: ints?",
    doc: "x (...) -> without its dims of size 1: those named, or all. A named dim of another size is kept.",
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let shape = g.shape(x);
        let mut drop: Vec8 = Vec8::new();
        match a.opt_ints(1) {
            None => drop.extend(0..shape.rank()),
            Some(dims) => {
                for &d in dims {
                    drop.push(shape.axis("squeeze", d)?);
                }
            }
        }
        let keep = |(i, d): (usize, &usize)| (*d != 1 || !drop.contains(&i)).then_some(*d);
        let dims: Vec8 = shape.dims().iter().enumerate().filter_map(keep).collect();
        reshape(g, x, Shape::of(&dims)).map(one)
    }),
    samples: &["f(2,1,3,1)", "f(2,1,3,1), 1", "f(2,1,3,1), [1,3]", "f(2,3), 0"],
    smooth: true,
    ..Op::BASE
};

pub static UNSQUEEZE: Op = Op {
    name: "unsqueeze",
    sig: "x: tensor, dim: int",
    doc: "x (...) -> with a new dim of size 1 at `dim` (-1 puts it last).",
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let rank = g.shape(x).rank() as i64;
        let d = a.int(1)?;
        let at = if d < 0 { d + rank + 1 } else { d };
        if at < 0 || at > rank {
            let message = format!("dim {d} is out of range: a new dim can go at {} to {rank}", -rank - 1);
            return Err(Error::shape("unsqueeze", message));
        }
        g.unsqueeze(x, at as usize).map(one)
    }),
    samples: &["f(2,3), 0", "f(2,3), -1", "f(2,3), 1", "f(), 0"],
    smooth: true,
    ..Op::BASE
};

// ---- permute ---------------------------------------------------------------------------------------------------

pub fn permute(g: &mut Graph, x: NodeId, axes: &[usize]) -> Result<NodeId> {
    if axes.iter().enumerate().all(|(i, &a)| i == a) {
        return Ok(x);
    }
    g.push(&PERMUTE, &[x], &attrs_of(axes))
}

pub static PERMUTE: Op = Op {
    name: "permute",
    sig: "x: tensor, dims: ints",
    doc: "x (...) -> dims in the order named: dim i of the result is dim dims[i] of x.",
    shard: Some(crate::sharding::permute),
    class: Class::View(|l, attrs, _| {
        let axes: Vec8 = attrs.iter().map(|&a| a as usize).collect();
        Some(l.permute(&axes))
    }),
    infer: |i| {
        let dims: Vec8 = i.attrs.iter().map(|&a| i.shape(0).dims()[a as usize]).collect();
        Ok(Meta { shape: Shape::of(&dims), dtype: i.dtype(0) })
    },
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let (shape, dims) = (g.shape(x), a.ints(1)?);
        let mut axes = Vec8::new();
        for &d in dims {
            axes.push(shape.axis("permute", d)?);
        }
        let mut sorted = axes.clone();
        sorted.sort_unstable();
        if sorted.iter().enumerate().any(|(i, &a)| i != a) || axes.len() != shape.rank() {
            let message = format!("{} must name each of the {} dims of {shape} once", Dims(dims), shape.rank());
            return Err(Error::argument("permute", message));
        }
        permute(g, x, &axes).map(one)
    }),
    grad: Grad::Rule(|g, c| {
        let mut inverse: Vec8 = smallvec![0; c.attrs.len()];
        for (i, &a) in c.attrs.iter().enumerate() {
            inverse[a as usize] = i;
        }
        Ok(smallvec![Some(permute(g, c.grad, &inverse)?)])
    }),
    samples: &["f(2,3,4), [2,0,1]", "f(2,3), [1,0]", "f(2,3,4), [0,-1,1]", "f(0,3), [1,0]"],
    smooth: true,
    ..Op::BASE
};

pub static TRANSPOSE: Op = Op {
    name: "transpose",
    sig: "x: tensor, dim0: int, dim1: int",
    doc: "x (...) -> with dims dim0 and dim1 swapped.",
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let shape = g.shape(x);
        let (p, q) = (shape.axis("transpose", a.int(1)?)?, shape.axis("transpose", a.int(2)?)?);
        let mut axes: Vec8 = (0..shape.rank()).collect();
        axes.swap(p, q);
        permute(g, x, &axes).map(one)
    }),
    samples: &["f(2,3), 0, 1", "f(2,3,4), -1, 0", "f(0,3), 0, 1"],
    smooth: true,
    ..Op::BASE
};

pub static T: Op = Op {
    name: "t",
    sig: "x: tensor",
    doc: "x (..., M, N) -> (..., N, M): the last two dims swapped. A vector or scalar is unchanged.",
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        if g.shape(x).rank() < 2 { Ok(one(x)) } else { g.t(x).map(one) }
    }),
    samples: &["f(2,3)", "f(3)", "f(2,3,4)"],
    smooth: true,
    ..Op::BASE
};

// ---- expand ----------------------------------------------------------------------------------------------------

pub fn expand(g: &mut Graph, x: NodeId, shape: Shape) -> Result<NodeId> {
    let from = g.shape(x);
    if from == shape {
        return Ok(x);
    }
    if Shape::broadcast(&from, &shape) != Some(shape) {
        let message = format!("shape {from} does not expand to {shape}");
        return Err(Error::shape("expand", message).hint("only dims of size 1, and new leading dims, can grow"));
    }
    g.push(&EXPAND, &[x], &attrs_of(shape.dims()))
}

fn call_expand(g: &mut Graph, a: &Args) -> Result<Out> {
    let x = a.tensor(0)?;
    let (from, dims) = (g.shape(x), a.ints(1)?);
    let lead = dims.len() as i64 - from.rank() as i64;
    let mut out = Vec::new();
    for (i, &d) in dims.iter().enumerate() {
        let own = usize::try_from(i as i64 - lead).ok().map(|k| from.dims()[k]);
        out.push(match (d, own) {
            (-1, Some(n)) => n as i64,
            (d, _) => d,
        });
    }
    let shape = create::shape_of(a.op.name, &out)?;
    expand(g, x, shape).map(one)
}

pub static EXPAND: Op = Op {
    name: "expand",
    sig: "x: tensor, shape: ints",
    doc: "x (...) -> (shape): dims of size 1, and new leading dims, repeat without a copy; -1 keeps a dim.",
    shard: Some(crate::sharding::expand),
    class: Class::View(|l, _, out| Some(l.expand(*out))),
    infer: from_attrs,
    call: Some(call_expand),
    grad: Grad::Rule(|g, c| {
        let shape = g.shape(c.x(0));
        Ok(smallvec![Some(g.sum_to(c.grad, shape)?)])
    }),
    samples: &["f(2,1), [2,3]", "f(3), [2,3]", "f(2,1,4), [5,-1,3,-1]", "f(), [2,2]", "f(1), [0]"],
    smooth: true,
    ..Op::BASE
};

pub static BROADCAST_TO: Op = Op {
    name: "broadcast_to",
    sig: "x: tensor, shape: ints",
    doc: "x (...) -> (shape): as `expand`.",
    call: Some(call_expand),
    samples: &["f(2,1), [2,3]", "f(3), [2,3]"],
    smooth: true,
    ..Op::BASE
};

// ---- slice and its opposite ------------------------------------------------------------------------------------

pub fn slice(g: &mut Graph, x: NodeId, at: usize, lo: usize, hi: usize, step: usize) -> Result<NodeId> {
    let n = g.shape(x).dims()[at];
    if lo == 0 && hi == n && step == 1 {
        return Ok(x);
    }
    let len = hi.saturating_sub(lo).div_ceil(step);
    // A longer step takes one element too, and its product with a stride might not fit in 64 bits.
    let step = step.min(n.max(1));
    g.push(&SLICE, &[x], &[at as i64, lo as i64, step as i64, len as i64])
}

/// A half-open range given by the user: negative ends count from the back, and ends beyond the dim are clamped, as in
/// NumPy.
pub fn range(n: usize, lo: Option<i64>, hi: Option<i64>) -> (usize, usize) {
    let fix = |v: i64| (if v < 0 { v + n as i64 } else { v }).clamp(0, n as i64) as usize;
    let (lo, hi) = (lo.map_or(0, fix), hi.map_or(n, fix));
    (lo, hi.max(lo))
}

pub static SLICE: Op = Op {
    name: "slice",
    sig: "x: tensor, dim: int, start: int?, stop: int?, step: int = 1",
    doc: "x (...) -> elements start, start + step, ... below stop of dim `dim`. Negative ends count from the back; ends\n\
          beyond the dim are clamped. The same as `x[{ {start, stop} }]` on that dim. step must be 1 or more.",
    shard: Some(crate::sharding::linear_along_other_dims),
    class: Class::View(|l, attrs, out| {
        let (at, lo, step) = (attrs[0] as usize, attrs[1] as isize, attrs[2] as isize);
        let mut y = Layout { shape: *out, strides: l.strides, offset: l.offset + lo * l.strides[at] };
        y.strides[at] *= step;
        Some(y)
    }),
    infer: |i| Ok(Meta { shape: i.shape(0).with(i.attr(0), i.attr(3)), dtype: i.dtype(0) }),
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let at = g.shape(x).axis("slice", a.int(1)?)?;
        let (lo, hi) = range(g.shape(x).dims()[at], a.opt_int(2), a.opt_int(3));
        let step = a.int(4)?;
        if step < 1 {
            return Err(
                Error::argument("slice", format!("step is {step}; it must be 1 or more")).hint("x:flip(dim) reverses")
            );
        }
        slice(g, x, at, lo, hi, step as usize).map(one)
    }),
    grad: Grad::Rule(|g, c| {
        let total = g.shape(c.x(0)).dims()[c.attr(0)] as i64;
        Ok(smallvec![Some(strided_pad(g, c.grad, c.attr(0), c.attr(1), c.attr(2), total as usize, 0.0)?)])
    }),
    samples: &["f(5,3), 0, 1, 4", "f(5,3), 0, 0, 5, 2", "f(5,3), -1, -2, nil", "f(5,3), 0, 4, 2", "f(7), 0, 1, nil, 3"],
    smooth: true,
    ..Op::BASE
};

pub static NARROW: Op = Op {
    name: "narrow",
    sig: "x: tensor, dim: int, start: int, length: int",
    doc: "x (...) -> `length` elements of dim `dim` from `start` on.",
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let at = g.shape(x).axis("narrow", a.int(1)?)?;
        let n = g.shape(x).dims()[at] as i64;
        let (start, len) = (a.int(2)?, a.int(3)?);
        let lo = if start < 0 { start + n } else { start };
        if lo < 0 || len < 0 || lo > n || len > n - lo {
            let message = format!("start {start} and length {len} do not fit dim {} of size {n}", a.int(1)?);
            let hint = format!("start counts from 0, or from the back if negative; start + length is at most {n}");
            return Err(Error::argument("narrow", message).hint(hint));
        }
        slice(g, x, at, lo as usize, (lo + len) as usize, 1).map(one)
    }),
    samples: &["f(5,3), 0, 1, 2", "f(5,3), 1, -2, 2", "f(5), 0, 2, 0"],
    smooth: true,
    ..Op::BASE
};

/// Element `index` of axis `at`; the axis is removed.
pub fn select(g: &mut Graph, x: NodeId, at: usize, index: i64, op: &str) -> Result<NodeId> {
    let shape = g.shape(x);
    let n = shape.dims()[at] as i64;
    let i = if index < 0 { index + n } else { index };
    if i < 0 || i >= n {
        return Err(Error::argument(op, format!("index {index} is out of range for dim {at} of size {n}"))
            .hint("tensor coordinates count from 0"));
    }
    let y = slice(g, x, at, i as usize, i as usize + 1, 1)?;
    reshape(g, y, shape.remove(at))
}

pub static SELECT: Op = Op {
    name: "select",
    sig: "x: tensor, dim: int, index: int",
    doc: "x (...) -> the slice at `index` of dim `dim`, which is removed. Indices count from 0, negative ones from the\n\
          back.",
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let at = g.shape(x).axis("select", a.int(1)?)?;
        select(g, x, at, a.int(2)?, "select").map(one)
    }),
    samples: &["f(2,3), 0, 1", "f(2,3,4), -1, -1", "f(2,3,4), 1, 0"],
    smooth: true,
    ..Op::BASE
};

/// The inverse of `slice` (strided padding): `attrs` [axis, lo, step, total, fill bits].
pub static STRIDED_PAD: Op = Op {
    name: "strided_pad",
    class: Class::Library,
    infer: |i| Ok(Meta { shape: i.shape(0).with(i.attr(0), i.attr(3)), dtype: i.dtype(0) }),
    grad: Grad::Rule(|g, c| {
        let (at, lo, step) = (c.attr(0), c.attr(1), c.attr(2));
        let n = g.shape(c.x(0)).dims()[at];
        if n == 0 {
            return Ok(smallvec![None]);
        }
        Ok(smallvec![Some(slice(g, c.grad, at, lo, lo + (n - 1) * step + 1, step)?)])
    }),
    smooth: true,
    ..Op::BASE
};

/// `x` at positions `lo + i * step` of an axis of size `total`, `fill` elsewhere.
pub fn strided_pad(
    g: &mut Graph,
    x: NodeId,
    at: usize,
    lo: usize,
    step: usize,
    total: usize,
    fill: f64,
) -> Result<NodeId> {
    if g.shape(x).dims()[at] == total && lo == 0 && step == 1 {
        return Ok(x);
    }
    g.push(&STRIDED_PAD, &[x], &[at as i64, lo as i64, step as i64, total as i64, fill.to_bits() as i64])
}

pub static PAD: Op = Op {
    name: "pad",
    sig: "x: tensor, pads: ints, *, value: float = 0.0",
    doc: "x (...) -> padded with a constant: pads = {before, after} of the last dim, then of the one before it, and so on,\n\
          as in PyTorch. Negative pads crop.",
    call: Some(|g, a| {
        let mut x = a.tensor(0)?;
        let pads = a.ints(1)?;
        let rank = g.shape(x).rank();
        if pads.len() % 2 != 0 || pads.len() > 2 * rank {
            let message =
                format!("{} pads for a tensor of rank {rank}; there must be two per dim, last dim first", pads.len());
            return Err(Error::argument("pad", message));
        }
        for (k, pair) in pads.chunks(2).enumerate() {
            let at = rank - 1 - k;
            let n = g.shape(x).dims()[at] as i128;
            let (before, after) = (i128::from(pair[0]), i128::from(pair[1]));
            let (cut, end) = ((-before).max(0), n + after.min(0));
            if end < cut {
                let message = format!("pads {{{before}, {after}}} would give dim {at} of size {n} a negative size");
                return Err(
                    Error::shape("pad", message).hint(format!("together, negative pads cut at most {n} elements"))
                );
            }
            let total = size(
                "pad",
                format_args!("dim {at} of size {n}, padded by {{{before}, {after}}},"),
                n + before + after,
            )?;
            x = slice(g, x, at, cut as usize, end as usize, 1)?;
            x = strided_pad(g, x, at, before.max(0) as usize, 1, total, a.float(2)?)?;
        }
        Ok(one(x))
    }),
    samples: &["f(2,3), [1,2]", "f(2,3), [1,0,0,2], value=1.5", "f(2,3), [-1,1]", "f(2,0), [1,1]", "f(2,3), [0,0]"],
    smooth: true,
    ..Op::BASE
};

// ---- flip, roll, window ------------------------------------------------------------------------------------------

pub static FLIP: Op = Op {
    name: "flip",
    sig: "x: tensor, dims: ints",
    doc: "x (...) -> with the order of elements along `dims` reversed.",
    shard: Some(crate::sharding::linear_along_other_dims),
    class: Class::View(|l, attrs, out| {
        let at = attrs[0] as usize;
        let mut y = *l;
        y.shape = *out;
        y.offset += (l.shape.dims()[at].max(1) as isize - 1) * l.strides[at];
        y.strides[at] = -l.strides[at];
        Some(y)
    }),
    infer: same,
    call: Some(|g, a| {
        let mut x = a.tensor(0)?;
        for at in super::reduce::axes(g, "flip", x, Some(a.ints(1)?))? {
            x = g.push(&FLIP, &[x], &[at as i64])?;
        }
        Ok(one(x))
    }),
    grad: Grad::Rule(|g, c| Ok(smallvec![Some(g.push(&FLIP, &[c.grad], c.attrs)?)])),
    samples: &["f(2,3), 0", "f(2,3), [0,1]", "f(0,3), 0", "f(2,3), -1"],
    smooth: true,
    ..Op::BASE
};

pub static ROLL: Op = Op {
    name: "roll",
    sig: "x: tensor, shifts: ints, dims: ints?",
    doc: "x (...) -> elements shifted by `shifts` along `dims`; those shifted out re-enter at the front. Without dims, the\n\
          flattened tensor is rolled.",
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let shape = g.shape(x);
        let shifts = a.ints(1)?;
        let roll1 = |g: &mut Graph, x: NodeId, at: usize, shift: i64| -> Result<NodeId> {
            let n = g.shape(x).dims()[at];
            if n == 0 {
                return Ok(x);
            }
            let cut = n - shift.rem_euclid(n as i64) as usize;
            if cut == n {
                return Ok(x);
            }
            let (tail, head) = (slice(g, x, at, cut, n, 1)?, slice(g, x, at, 0, cut, 1)?);
            cat(g, &[tail, head], at)
        };
        let Some(dims) = a.opt_ints(2) else {
            let &[shift] = shifts else {
                return Err(Error::argument(
                    "roll",
                    format!("{} shifts and no dims; without dims there is one", shifts.len()),
                )
                .hint("name the dims: x:roll({1, 2}, {0, 1})"));
            };
            let flat = g.reshape(x, &[shape.numel()])?;
            let y = roll1(g, flat, 0, shift)?;
            return reshape(g, y, shape).map(one);
        };
        if dims.len() != shifts.len() {
            return Err(Error::argument("roll", format!("{} shifts for {} dims", shifts.len(), dims.len())));
        }
        let mut y = x;
        for (&d, &s) in dims.iter().zip(shifts) {
            let at = shape.axis("roll", d)?;
            y = roll1(g, y, at, s)?;
        }
        Ok(one(y))
    }),
    samples: &["f(5), 2", "f(2,3), 1, 1", "f(3,4), [1,-1], [0,1]", "f(2,3), 4"],
    smooth: true,
    ..Op::BASE
};

/// Sliding windows along an axis: `attrs` [axis, size, step, dilation]; the window is a new last dim.
pub fn window(g: &mut Graph, x: NodeId, at: usize, size: usize, step: usize, dilation: usize) -> Result<NodeId> {
    // As in `slice`: a larger step or dilation gives the same windows.
    let n = g.shape(x).dims()[at].max(1);
    let (step, dilation) = (step.min(n), dilation.min(n));
    g.push(&UNFOLD, &[x], &[at as i64, size as i64, step as i64, dilation as i64])
}

/// Number of windows that fit.
pub fn windows(n: usize, size: usize, step: usize, dilation: usize) -> usize {
    let reach = dilation.saturating_mul(size.saturating_sub(1)).saturating_add(1);
    if n < reach { 0 } else { (n - reach) / step + 1 }
}

pub static UNFOLD: Op = Op {
    name: "unfold",
    sig: "x: tensor, dim: int, size: int, step: int = 1",
    doc: "x (..., L, ...) -> (..., N, ..., size): all windows of `size` elements along `dim`, `step` apart, as a new last dim.\n\
          N = (L - size) // step + 1. This is a view: overlapping windows share memory.",
    class: Class::View(|l, attrs, out| {
        let (at, step, dilation) = (attrs[0] as usize, attrs[2] as isize, attrs[3] as isize);
        let mut y = Layout { shape: *out, strides: l.strides, offset: l.offset };
        y.strides[out.rank() - 1] = l.strides[at] * dilation;
        y.strides[at] = l.strides[at] * step;
        Some(y)
    }),
    infer: |i| {
        let (at, size) = (i.attr(0), i.attr(1));
        let n = windows(i.shape(0).dims()[at], size, i.attr(2), i.attr(3));
        let shape = i.shape(0).with(at, n);
        Ok(Meta { shape: shape.insert(shape.rank(), size)?, dtype: i.dtype(0) })
    },
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let at = g.shape(x).axis("unfold", a.int(1)?)?;
        let (n, size, step) = (g.shape(x).dims()[at] as i64, a.int(2)?, a.int(3)?);
        if size < 1 || size > n || step < 1 {
            let message = format!("windows of size {size} and step {step} do not fit a dim of size {n}");
            return Err(Error::argument("unfold", message).hint("size must be 1 to the dim's size, step 1 or more"));
        }
        window(g, x, at, size as usize, step as usize, 1).map(one)
    }),
    grad: Grad::Rule(|g, c| {
        let total = g.shape(c.x(0)).dims()[c.attr(0)] as i64;
        let mut attrs: SmallVec<[i64; 6]> = c.attrs.into();
        attrs.push(total);
        Ok(smallvec![Some(g.push(&COL2IM, &[c.grad], &attrs)?)])
    }),
    samples: &["f(7), 0, 3", "f(2,6), 1, 2, 2", "f(5,2), 0, 3, 2"],
    smooth: true,
    ..Op::BASE
};

/// The inverse of a window view, with overlaps summed (col2im): `attrs` [axis, size, step, dilation, total].
pub static COL2IM: Op = Op {
    name: "col2im",
    class: Class::Library,
    infer: |i| {
        let shape = i.shape(0);
        Ok(Meta { shape: shape.remove(shape.rank() - 1).with(i.attr(0), i.attr(4)), dtype: i.dtype(0) })
    },
    grad: Grad::Rule(|g, c| Ok(smallvec![Some(g.push(&UNFOLD, &[c.grad], &c.attrs[..4])?)])),
    smooth: true,
    ..Op::BASE
};

// ---- detach ----------------------------------------------------------------------------------------------------

pub fn detach(g: &mut Graph, x: NodeId) -> Result<NodeId> {
    g.push(&DETACH, &[x], &[])
}

pub static DETACH: Op = Op {
    name: "detach",
    sig: "x: tensor",
    doc: "x (...) -> (...): the same values; no gradient flows back through it.",
    shard: Some(crate::sharding::same_dims),
    class: Class::View(|l, _, _| Some(*l)),
    infer: same,
    call: Some(|g, a| detach(g, a.tensor(0)?).map(one)),
    samples: &["f(2,3)"],
    ..Op::BASE
};

// ---- joining and splitting ---------------------------------------------------------------------------------------

pub fn cat(g: &mut Graph, xs: &[NodeId], at: usize) -> Result<NodeId> {
    if xs.len() == 1 {
        return Ok(xs[0]);
    }
    g.push(&CAT, xs, &[at as i64])
}

fn call_cat(g: &mut Graph, a: &Args) -> Result<Out> {
    let given = a.tensors(0)?;
    let Some(&first) = given.first() else {
        return Err(Error::argument(a.op.name, "needs at least one tensor, the list is empty"));
    };
    let at = g.shape(first).axis(a.op.name, a.int(1)?)?;
    let dtype = given.iter().fold(g.dtype(first), |d, &x| crate::DType::promote(d, g.dtype(x)));
    let mut xs: SmallVec<[NodeId; 8]> = SmallVec::new();
    for &x in given {
        xs.push(g.cast(x, dtype)?);
    }
    cat(g, &xs, at).map(one)
}

pub static CAT: Op = Op {
    name: "cat",
    sig: "xs: tensors, dim: int = 0",
    doc: "xs of (..., Ni, ...) -> (..., sum of Ni, ...): concatenated along `dim`; all other dims must be equal.",
    class: Class::Library,
    infer: |i| {
        let at = i.attr(0);
        let mut total = 0usize;
        for (k, m) in i.inputs.iter().enumerate() {
            let fits = m.shape.rank() == i.shape(0).rank()
                && m.shape.dims().iter().zip(i.shape(0).dims()).enumerate().all(|(d, (p, q))| d == at || p == q);
            if !fits {
                let message = format!(
                    "tensor {} of the list has shape {}, the first has {}; all dims but {at} must be equal",
                    k + 1,
                    m.shape,
                    i.shape(0)
                );
                return Err(Error::shape("cat", message));
            }
            total = total.saturating_add(m.shape.dims()[at]);
        }
        Ok(Meta { shape: Shape::new(i.shape(0).with(at, total).dims())?, dtype: i.dtype(0) })
    },
    call: Some(call_cat),
    grad: Grad::Rule(|g, c| {
        let at = c.attr(0);
        let mut out = super::Grads::new();
        let mut lo = 0;
        for &x in c.inputs {
            let n = g.shape(x).dims()[at];
            out.push(Some(slice(g, c.grad, at, lo, lo + n, 1)?));
            lo += n;
        }
        Ok(out)
    }),
    samples: &["[f(2,3), f(4,3)]", "[f(2,3), f(2,1), f(2,2)], 1", "[f(2,3), f(0,3)]", "[f(2,3)], -1"],
    smooth: true,
    ..Op::BASE
};

pub static CONCAT: Op = Op {
    name: "concat",
    sig: "xs: tensors, dim: int = 0",
    doc: "An alias of `cat`.",
    call: Some(call_cat),
    samples: &["[f(2,3), f(4,3)]"],
    smooth: true,
    ..Op::BASE
};

pub static STACK: Op = Op {
    name: "stack",
    sig: "xs: tensors, dim: int = 0",
    doc: "xs of (...), n of them -> (..., n, ...): joined along a new dim at `dim`; all shapes must be equal.",
    call: Some(|g, a| {
        let given = a.tensors(0)?;
        let Some(&first) = given.first() else {
            return Err(Error::argument("stack", "needs at least one tensor, the list is empty"));
        };
        let rank = g.shape(first).rank() as i64 + 1;
        let d = a.int(1)?;
        let at = if d < 0 { d + rank } else { d };
        if at < 0 || at >= rank {
            return Err(Error::shape(
                "stack",
                format!("dim {d} is out of range: a new dim can go at {} to {}", -rank, rank - 1),
            ));
        }
        let dtype = given.iter().fold(g.dtype(first), |d, &x| crate::DType::promote(d, g.dtype(x)));
        let mut xs: SmallVec<[NodeId; 8]> = SmallVec::new();
        for (k, &x) in given.iter().enumerate() {
            if g.shape(x) != g.shape(first) {
                let message = format!(
                    "tensor {} of the list has shape {}, the first has {}; all must be equal",
                    k + 1,
                    g.shape(x),
                    g.shape(first)
                );
                return Err(Error::shape("stack", message));
            }
            let x = g.cast(x, dtype)?;
            xs.push(g.unsqueeze(x, at as usize)?);
        }
        cat(g, &xs, at as usize).map(one)
    }),
    samples: &["[f(2,3), f(2,3)]", "[f(2,3), f(2,3), f(2,3)], -1", "[f(), f()]"],
    smooth: true,
    ..Op::BASE
};

/// The most tensors that a call splits one into: each is a node, and a value on Lua's stack.
const MAX_PIECES: usize = 1 << 16;

fn check_pieces(op: &str, n: usize) -> Result<()> {
    if n <= MAX_PIECES {
        return Ok(());
    }
    let message = format!("would return {n} tensors; at most {MAX_PIECES} are allowed");
    Err(Error::argument(op, message).hint("x:reshape keeps the pieces in one tensor, with a dim that counts them"))
}

fn pieces(g: &mut Graph, x: NodeId, at: usize, sizes: &[usize]) -> Result<Out> {
    let mut lo = 0;
    let mut out = Out::new();
    for &n in sizes {
        out.push(slice(g, x, at, lo, lo + n, 1)?);
        lo += n;
    }
    Ok(out)
}

pub static SPLIT: Op = Op {
    name: "split",
    sig: "x: tensor, sizes: ints, dim: int = 0",
    doc: "x (..., N, ...) -> several: pieces of the given sizes along `dim`, or of one size each (the last may be smaller).",
    results: crate::ops::Results::Several,
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let at = g.shape(x).axis("split", a.int(2)?)?;
        let (n, given) = (g.shape(x).dims()[at], a.ints(1)?);
        let sizes: Vec<usize> = match given {
            [size] if *size > 0 => {
                let size = (*size as usize).min(n.max(1));
                let count = n.div_ceil(size).max(1);
                check_pieces("split", count)?;
                (0..count).map(|i| size.min(n - i * size)).collect()
            }
            list if list.iter().all(|&s| s >= 0) && list.iter().map(|&s| i128::from(s)).sum::<i128>() == n as i128 => {
                check_pieces("split", list.len())?;
                list.iter().map(|&s| s as usize).collect()
            }
            list => {
                let message = match list.iter().find(|s| **s < 0) {
                    Some(s) => format!("a piece of size {s} is asked for"),
                    None => {
                        let sum: i128 = list.iter().map(|&s| i128::from(s)).sum();
                        format!("sizes {} add up to {sum}, but dim {at} has {n}", Dims(list))
                    }
                };
                let hint = "give one size of 1 or more for all pieces, or sizes that add up to the dim's";
                return Err(Error::argument("split", message).hint(hint));
            }
        };
        pieces(g, x, at, &sizes)
    }),
    samples: &["f(5,2), 2", "f(5,2), [1,4]", "f(2,6), 3, -1"],
    smooth: true,
    ..Op::BASE
};

pub static CHUNK: Op = Op {
    name: "chunk",
    sig: "x: tensor, chunks: int, dim: int = 0",
    doc: "x (..., N, ...) -> at most `chunks` pieces of ceil(N / chunks) along `dim`; the last may be smaller.",
    results: crate::ops::Results::Several,
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let at = g.shape(x).axis("chunk", a.int(2)?)?;
        let (n, k) = (g.shape(x).dims()[at], a.int(1)?);
        if k < 1 {
            return Err(Error::argument("chunk", format!("chunks is {k}; it must be 1 or more")));
        }
        let size = n.div_ceil(k as usize).max(1);
        let count = n.div_ceil(size).max(1);
        check_pieces("chunk", count)?;
        let sizes: Vec<usize> = (0..count).map(|i| size.min(n - i * size)).collect();
        pieces(g, x, at, &sizes)
    }),
    samples: &["f(6,2), 3", "f(5,2), 3", "f(2,6), 2, -1"],
    smooth: true,
    ..Op::BASE
};

pub static UNBIND: Op = Op {
    name: "unbind",
    sig: "x: tensor, dim: int = 0",
    doc: "x (..., N, ...) -> N tensors (..., ...): the slices along `dim`, which is removed.",
    results: crate::ops::Results::Several,
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let at = g.shape(x).axis("unbind", a.int(1)?)?;
        check_pieces("unbind", g.shape(x).dims()[at])?;
        (0..g.shape(x).dims()[at] as i64).map(|i| select(g, x, at, i, "unbind")).collect()
    }),
    samples: &["f(3,2)", "f(2,3,2), 1", "f(2,3), -1"],
    smooth: true,
    ..Op::BASE
};

// ---- triangles, repeats, diagonals -------------------------------------------------------------------------------

fn triangle(g: &mut Graph, a: &Args, lower: bool) -> Result<Out> {
    let x = a.tensor(0)?;
    let shape = g.shape(x);
    let rank = shape.rank();
    if rank < 2 {
        return Err(Error::shape(a.op.name, format!("needs at least 2 dims, not shape {shape}")));
    }
    let row = g.iota_along(shape.dims()[rank - 2], rank - 2, rank)?;
    let col = g.iota_along(shape.dims()[rank - 1], rank - 1, rank)?;
    // Beyond the corners nothing changes, and `row + k` cannot overflow.
    let k = a.int(1)?.clamp(-(shape.dims()[rank - 2] as i64), shape.dims()[rank - 1] as i64);
    let k = g.int_constant(k);
    let edge = g.add_(row, k)?;
    let keep = if lower { g.le(col, edge)? } else { g.ge(col, edge)? };
    let zero = g.constant_like(0.0, x);
    g.where_(keep, x, zero).map(one)
}

pub static TRIL: Op = Op {
    name: "tril",
    sig: "x: tensor, diagonal: int = 0",
    doc: "x (..., M, N) -> the same with elements above the diagonal set to 0; `diagonal` shifts it up.",
    call: Some(|g, a| triangle(g, a, true)),
    samples: &["f(3,3)", "f(2,3,4), 1", "f(4,3), -1"],
    smooth: true,
    ..Op::BASE
};

pub static TRIU: Op = Op {
    name: "triu",
    sig: "x: tensor, diagonal: int = 0",
    doc: "x (..., M, N) -> the same with elements below the diagonal set to 0; `diagonal` shifts it up.",
    call: Some(|g, a| triangle(g, a, false)),
    samples: &["f(3,3)", "f(2,3,4), 1", "f(4,3), -1"],
    smooth: true,
    ..Op::BASE
};

pub static TILE: Op = Op {
    name: "tile",
    sig: "x: tensor, repeats: ints",
    doc: "x (...) -> the whole tensor repeated along each dim, as NumPy's tile: repeats align at the last dim.",
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let repeats = a.ints(1)?;
        if repeats.len() > MAX_RANK || repeats.iter().any(|r| *r < 0) {
            create::shape_of("tile", repeats)?;
        }
        let mut reps: Vec<usize> = repeats.iter().map(|r| *r as usize).collect();
        let mut dims = g.shape(x).dims().to_vec();
        while reps.len() < dims.len() {
            reps.insert(0, 1);
        }
        while dims.len() < reps.len() {
            dims.insert(0, 1);
        }
        let (mut split, mut wide, mut out) = (Vec::new(), Vec::new(), Vec::new());
        for (&d, &r) in dims.iter().zip(&reps) {
            // Nothing, however often it is repeated, is nothing.
            let r = if d == 0 { 1 } else { r };
            if r != 1 {
                split.push(1);
                wide.push(r);
            }
            split.push(d);
            wide.push(d);
            out.push(size("tile", format_args!("a dim of size {d}, repeated {r} times,"), d as i128 * r as i128)?);
        }
        let y = g.reshape(x, &split)?;
        let y = expand(g, y, Shape::new(&wide)?)?;
        g.reshape(y, &out).map(one)
    }),
    samples: &["f(2,3), [2,1]", "f(3), [2,2]", "f(2,3), 3", "f(2), 0"],
    smooth: true,
    ..Op::BASE
};

pub static REPEAT_INTERLEAVE: Op = Op {
    name: "repeat_interleave",
    sig: "x: tensor, repeats: ints, dim: int?",
    doc: "x (..., N, ...) -> (..., N * repeats, ...): each element repeated `repeats` times along `dim`, or along the\n\
          flattened tensor. `repeats` may be a list of N numbers; the result then has as many elements as their sum.",
    call: Some(|g, a| {
        let mut x = a.tensor(0)?;
        let repeats = a.ints(1)?;
        if let Some(r) = repeats.iter().find(|r| **r < 0) {
            return Err(Error::argument("repeat_interleave", format!("repeats is {r}; it must be 0 or more")));
        }
        let at = match a.opt_int(2) {
            Some(d) => g.shape(x).axis("repeat_interleave", d)?,
            None => {
                let n = g.shape(x).numel();
                x = g.reshape(x, &[n])?;
                0
            }
        };
        let shape = g.shape(x);
        let n = shape.dims()[at];
        if let &[r] = repeats {
            // As in `tile`.
            let r = if n == 0 { 1 } else { r };
            let y = g.unsqueeze(x, at + 1)?;
            let y = expand(g, y, shape.insert(at + 1, r as usize)?)?;
            return reshape(g, y, shape.with(at, n * r as usize)).map(one);
        }
        if repeats.len() != n {
            return Err(Error::argument("repeat_interleave", format!("{} repeats for {n} elements", repeats.len()))
                .hint("give one number for all elements, or one for each"));
        }
        let mut parts: SmallVec<[NodeId; 8]> = SmallVec::new();
        for (i, &r) in repeats.iter().enumerate().filter(|(_, r)| **r > 0) {
            let part = slice(g, x, at, i, i + 1, 1)?;
            parts.push(expand(g, part, shape.with(at, r as usize))?);
        }
        if parts.is_empty() { slice(g, x, at, 0, 0, 1) } else { cat(g, &parts, at) }.map(one)
    }),
    samples: &["f(2,3), 2, 1", "f(2,3), 3, 0", "f(4), 2", "f(3), 0", "f(3,2), [2,0,1], 0", "f(2,2), [1,3,0,2]"],
    smooth: true,
    ..Op::BASE
};

pub static DIAGONAL: Op = Op {
    name: "diagonal",
    sig: "x: tensor",
    doc: "x (..., N, N) -> (..., N): the elements whose last two coordinates are equal.",
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let shape = g.shape(x);
        let rank = shape.rank();
        if rank < 2 || shape.dims()[rank - 1] != shape.dims()[rank - 2] {
            return Err(Error::shape("diagonal", format!("needs a square matrix in the last two dims, not {shape}")));
        }
        diagonal(g, x).map(one)
    }),
    samples: &["f(3,3)", "f(2,4,4)", "f(1,1)"],
    smooth: true,
    ..Op::BASE
};

/// The diagonal of the last two dims, which have equal sizes.
pub fn diagonal(g: &mut Graph, x: NodeId) -> Result<NodeId> {
    let shape = g.shape(x);
    let rank = shape.rank();
    let n = shape.dims()[rank - 1];
    let mut dims: Vec8 = shape.dims()[..rank - 2].into();
    dims.push(n * n);
    let flat = g.reshape(x, &dims)?;
    if n == 0 { Ok(flat) } else { slice(g, flat, rank - 2, 0, n * n, n + 1) }
}
