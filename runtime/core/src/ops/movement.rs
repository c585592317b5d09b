//! Defines data movement: views, which read the same elements through another layout, and the ops built on them.
//!
//! The primitives here are `reshape expand permute flip`, and `detach`; `slice` and `window` are in `slicing.rs`. None of them
//! moves a byte by itself: the planner folds chains of them into strides.

use super::join::cat;
use super::slicing::slice;
use super::{Args, Class, Grad, Op, Out, create, one};
use crate::error::{Error, Result};
use crate::graph::{Graph, Infer, Meta, NodeId};
use crate::shape::{Dims, size};
use crate::{MAX_RANK, Shape};
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
    &FLIP,
    &ROLL,
    &DETACH,
    &TRIL,
    &TRIU,
    &TILE,
    &REPEAT_INTERLEAVE,
    &DIAGONAL,
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
    regroups: Some(&crate::sharding::RESHAPING),
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

// ---- flip and roll ------------------------------------------------------------------------------------------------

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
