//! Defines the reductions: four primitives over adjacent dims, and the ops built on them.
//!
//! A reduction over any set of dims becomes one primitive per run of adjacent dims. The order in which elements are
//! added is a function of the shape alone (see `plan::ir`), so results depend neither on fusion nor on the thread
//! count.

use super::{Class, Expand, Grad, GradCtx, Grads, Op, ReduceFn, movement, one};
use crate::amp::Amp;
use crate::error::{Error, Result};
use crate::graph::{Graph, Infer, Meta, NodeId};
use crate::{DType, Shape};
use smallvec::{SmallVec, smallvec};

pub static OPS: &[&Op] = &[
    &SUM, &PROD, &AMAX, &AMIN, &MAX, &MIN, &MEAN, &VAR, &STD, &NORM, &LOGSUMEXP, &ANY, &ALL, &ARGMAX, &ARGMIN,
    &ARGREDUCE,
];

pub type Axes = SmallVec<[usize; 8]>;

fn infer(i: &Infer) -> Result<Meta> {
    let (lo, hi) = (i.attr(0), i.attr(1));
    let d = i.shape(0);
    let mut dims: Axes = d.dims()[..lo].into();
    dims.extend_from_slice(&d.dims()[hi..]);
    Ok(Meta { shape: Shape::of(&dims), dtype: i.dtype(0) })
}

/// The axes of an argument: a list, one int, or all axes if it is absent.
pub fn axes(g: &Graph, op: &str, x: NodeId, dims: Option<&[i64]>) -> Result<Axes> {
    let shape = g.shape(x);
    let Some(dims) = dims else { return Ok((0..shape.rank()).collect()) };
    let mut out = Axes::new();
    for &d in dims {
        let at = shape.axis(op, d)?;
        if out.contains(&at) {
            return Err(Error::argument(op, format!("dim {d} is named twice")));
        }
        out.push(at);
    }
    out.sort_unstable();
    Ok(out)
}

/// Records `op` (a reduction primitive) over any set of axes.
pub fn over(g: &mut Graph, op: &'static Op, x: NodeId, axes: &[usize], keepdim: bool) -> Result<NodeId> {
    let (shape, dtype) = (g.shape(x), g.dtype(x));
    // Several sums of 16-bit floats are kept in f32 and rounded once. (Autocast makes each of them f32.)
    let runs = axes.iter().zip(axes.iter().skip(1)).filter(|(a, b)| *a + 1 != **b).count() + 1;
    let rounds = runs > 1 && dtype.is_half() && [&SUM, &PROD].contains(&op) && g.modes.autocast.is_none();
    let mut y = if rounds { g.widen(x)? } else { x };
    // From the last run of adjacent dims to the first, so that earlier positions stay valid.
    let mut end = axes.len();
    while end > 0 {
        let mut start = end - 1;
        while start > 0 && axes[start - 1] + 1 == axes[start] {
            start -= 1;
        }
        y = g.push(op, &[y], &[axes[start] as i64, axes[end - 1] as i64 + 1])?;
        end = start;
    }
    if rounds {
        y = g.cast(y, dtype)?;
    }
    if keepdim {
        let mut kept = shape;
        for &a in axes {
            kept.dims_mut()[a] = 1;
        }
        y = movement::reshape(g, y, kept)?;
    }
    Ok(y)
}

/// Expands a reduced value to the shape of the input `x`.
fn spread(g: &mut Graph, y: NodeId, x: NodeId, attrs: &[i64]) -> Result<NodeId> {
    let shape = g.shape(x);
    let mut kept = shape;
    for a in attrs[0]..attrs[1] {
        kept.dims_mut()[a as usize] = 1;
    }
    let y = movement::reshape(g, y, kept)?;
    movement::expand(g, y, shape)
}

/// Gradient of max and min: shared equally by all elements that attain the extremum, as in PyTorch's amax and amin.
fn extremum_grad(g: &mut Graph, c: &GradCtx) -> Result<Grads> {
    let x = c.x(0);
    let y = spread(g, c.out, x, c.attrs)?;
    let hit = g.eq(x, y)?;
    let dtype = g.dtype(c.grad);
    let hit = g.cast(hit, dtype)?;
    let count = g.push(&SUM, &[hit], c.attrs)?;
    let share = g.div(c.grad, count)?;
    let share = spread(g, share, x, c.attrs)?;
    Ok(smallvec![Some(g.mul(share, hit)?)])
}

fn no_empty(g: &Graph, op: &str, x: NodeId, axes: &[usize]) -> Result<()> {
    let shape = g.shape(x);
    if axes.iter().any(|&a| shape.dims()[a] == 0) {
        return Err(Error::shape(op, format!("no elements to choose from: shape {shape} has a reduced dim of size 0")));
    }
    Ok(())
}

const PRIMITIVE: Op = Op { infer, ..Op::BASE };

pub static SUM: Op = Op {
    name: "sum",
    sig: "x: tensor, dims: ints?, *, keepdim: bool = false",
    doc: "x (...) -> the sum over `dims` (all when absent).\n\
          Integers and bools sum in i64. 16-bit floats accumulate in f32 and round once. The sum of zero elements is 0.",
    class: Class::Reduce(ReduceFn::Sum),
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let axes = axes(g, "sum", x, a.opt_ints(1))?;
        let dtype = g.dtype(x).sum();
        let x = g.cast(x, dtype)?;
        over(g, &SUM, x, &axes, a.bool(2)).map(one)
    }),
    grad: Grad::Rule(|g, c| Ok(smallvec![Some(spread(g, c.grad, c.x(0), c.attrs)?)])),
    amp: Amp::Full,
    samples: &[
        "f(2,3)",
        "f(2,3,4), 1",
        "f(2,3,4), [0,2], keepdim=true",
        "f(0,3), 0",
        "f(2,0), 1",
        "f()",
        "f(70,33), 0",
        "f(5,1000), -1",
    ],
    smooth: true,
    ..PRIMITIVE
};

/// Gradient of a product: for each element the product of the others, computed by division where they are not zero. The
/// values of the zeros are factors of it, so that it can be differentiated again where elements are zero.
fn product_of_the_others(g: &mut Graph, c: &GradCtx) -> Result<Grads> {
    let x = c.x(0);
    let (zero, one) = (g.constant_like(0.0, x), g.constant_like(1.0, x));
    let is_zero = g.eq(x, zero)?;
    let safe = g.where_(is_zero, one, x)?;
    let zeros = g.where_(is_zero, x, zero)?;
    let product = g.push(&PROD, &[safe], c.attrs)?;
    let hits = g.cast(is_zero, DType::I64)?;
    let (count, sum) = (g.push(&SUM, &[hits], c.attrs)?, g.push(&SUM, &[zeros], c.attrs)?);
    let number = |g: &mut Graph, n: i64| g.constant(n as f64, DType::I64);
    let (none, single, two) = (number(g, 0), number(g, 1), number(g, 2));
    let (no_zero, one_zero, two_zeros) = (g.eq(count, none)?, g.eq(count, single)?, g.eq(count, two)?);
    // The terms of the zeros in the gradient of another element, and in that of a zero.
    let apart = g.where_(one_zero, sum, zero)?;
    let apart = g.where_(no_zero, one, apart)?;
    let one_zero = spread(g, one_zero, x, c.attrs)?;
    let two_zeros = spread(g, two_zeros, x, c.attrs)?;
    let sum = spread(g, sum, x, c.attrs)?;
    let other = g.sub(sum, zeros)?;
    let among = g.where_(two_zeros, other, zero)?;
    let among = g.where_(one_zero, one, among)?;
    let d = g.mul(c.grad, product)?;
    let (d, apart) = (spread(g, d, x, c.attrs)?, spread(g, apart, x, c.attrs)?);
    let quotient = g.div(d, safe)?;
    let (of_zero, of_other) = (g.mul(d, among)?, g.mul(quotient, apart)?);
    Ok(smallvec![Some(g.where_(is_zero, of_zero, of_other)?)])
}

pub static PROD: Op = Op {
    name: "prod",
    sig: "x: tensor, dims: ints?, *, keepdim: bool = false",
    doc: "x (...) -> the product over `dims` (all when absent). Integers and bools multiply in i64. The product of zero\n\
          elements is 1.",
    class: Class::Reduce(ReduceFn::Prod),
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let axes = axes(g, "prod", x, a.opt_ints(1))?;
        let dtype = g.dtype(x).sum();
        let x = g.cast(x, dtype)?;
        over(g, &PROD, x, &axes, a.bool(2)).map(one)
    }),
    grad: Grad::Rule(product_of_the_others),
    amp: Amp::Full,
    samples: &["p(2,3)", "p(2,3,4), 1", "p(2,3), 0, keepdim=true", "p(2,0), 1", "p()"],
    smooth: true,
    ..PRIMITIVE
};

pub static AMAX: Op = Op {
    name: "amax",
    sig: "x: tensor, dims: ints?, *, keepdim: bool = false",
    doc: "x (...) -> the largest element over `dims` (all when absent); NaN if one is. Equal elements share the gradient.",
    class: Class::Reduce(ReduceFn::Max),
    call: Some(|g, a| extremum(g, &AMAX, a).map(one)),
    grad: Grad::Rule(extremum_grad),
    samples: &["f(2,3)", "f(2,3,4), 1", "f(2,3,4), [0,2], keepdim=true", "f(0,3), 1", "f()", "f(70,33), 0"],
    ..PRIMITIVE
};

pub static AMIN: Op = Op {
    name: "amin",
    sig: "x: tensor, dims: ints?, *, keepdim: bool = false",
    doc: "x (...) -> the smallest element over `dims` (all when absent); NaN if one is. Equal elements share the gradient.",
    class: Class::Reduce(ReduceFn::Min),
    call: Some(|g, a| extremum(g, &AMIN, a).map(one)),
    grad: Grad::Rule(extremum_grad),
    samples: &["f(2,3)", "f(2,3,4), 1", "f(2,3,4), [0,2], keepdim=true", "f(0,3), 1", "f()", "f(70,33), 0"],
    ..PRIMITIVE
};

fn extremum(g: &mut Graph, op: &'static Op, a: &super::Args) -> Result<NodeId> {
    let x = a.tensor(0)?;
    let axes = axes(g, a.op.name, x, a.opt_ints(1))?;
    no_empty(g, a.op.name, x, &axes)?;
    over(g, op, x, &axes, a.bool(2))
}

/// `max(x)` is the extremum of all; `max(x, dim)` also gives the position, as in PyTorch.
fn with_position(g: &mut Graph, op: &'static Op, a: &super::Args) -> Result<super::Out> {
    let x = a.tensor(0)?;
    let Some(dim) = a.opt_int(1) else {
        let all: Axes = (0..g.shape(x).rank()).collect();
        no_empty(g, a.op.name, x, &all)?;
        return over(g, op, x, &all, a.bool(2)).map(one);
    };
    let at = g.shape(x).axis(a.op.name, dim)?;
    no_empty(g, a.op.name, x, &[at])?;
    let index = arg(g, x, at, op == &AMAX, true)?;
    let value = super::index::gather(g, x, at, index)?;
    let (mut value, mut index) = (value, index);
    if !a.bool(2) {
        let shape = g.shape(x).remove(at);
        value = movement::reshape(g, value, shape)?;
        index = movement::reshape(g, index, shape)?;
    }
    Ok(smallvec![value, index])
}

pub static MAX: Op = Op {
    name: "max",
    sig: "x: tensor, dim: int?, *, keepdim: bool = false",
    doc: "x (...) -> the largest element; or, along `dim`: values, positions (i64, the first of equal elements).",
    results: crate::ops::Results::OneOrTwo,
    call: Some(|g, a| with_position(g, &AMAX, a)),
    samples: &["f(2,3)", "f(2,3,4), 1", "f(2,3), -1, keepdim=true", "f()"],
    ..Op::BASE
};

pub static MIN: Op = Op {
    name: "min",
    sig: "x: tensor, dim: int?, *, keepdim: bool = false",
    doc: "x (...) -> the smallest element; or, along `dim`: values, positions (i64, the first of equal elements).",
    results: crate::ops::Results::OneOrTwo,
    call: Some(|g, a| with_position(g, &AMIN, a)),
    samples: &["f(2,3)", "f(2,3,4), 1", "f(2,3), -1, keepdim=true", "f()"],
    ..Op::BASE
};

fn count(shape: Shape, axes: &[usize]) -> f64 {
    axes.iter().map(|&a| shape.dims()[a] as f64).product()
}

/// Attrs of the fused reductions: [axis mask, keepdim, extra…].
fn mask(axes: &[usize]) -> i64 {
    axes.iter().fold(0, |m, &a| m | 1 << a)
}

fn unmask(m: i64) -> Axes {
    (0..8).filter(|a| m >> a & 1 == 1).collect()
}

fn infer_masked(i: &Infer) -> Result<Meta> {
    i.float(0)?;
    let mut dims = Axes::new();
    for (a, &d) in i.shape(0).dims().iter().enumerate() {
        match i.attrs[0] >> a & 1 {
            0 => dims.push(d),
            _ if i.attrs[1] != 0 => dims.push(1),
            _ => {}
        }
    }
    Ok(Meta { shape: Shape::of(&dims), dtype: i.dtype(0) })
}

/// Records a fused reduction of x over `dims`: argument 1 lists them, argument `keep` is keepdim.
fn fused(g: &mut Graph, op: &'static Op, a: &super::Args, keep: usize, extra: &[i64]) -> Result<super::Out> {
    let x = a.tensor(0)?;
    let axes = axes(g, op.name, x, a.opt_ints(1))?;
    let dtype = g.dtype(x).to_float();
    let x = g.cast(x, dtype)?;
    let mut attrs: SmallVec<[i64; 6]> = smallvec![mask(&axes), i64::from(a.bool(keep))];
    attrs.extend_from_slice(extra);
    g.push(op, &[x], &attrs).map(one)
}

const FUSED: Op = Op { infer: infer_masked, grad: Grad::Expand, amp: Amp::Full, ..Op::BASE };

pub fn mean(g: &mut Graph, x: NodeId, axes: &[usize], keepdim: bool) -> Result<NodeId> {
    let dtype = g.dtype(x).to_float();
    let x = g.cast(x, dtype)?;
    g.push(&MEAN, &[x], &[mask(axes), i64::from(keepdim)])
}

const MEAN_EXPAND: Expand = |g, x, attrs| {
    let (axes, dtype) = (unmask(attrs[0]), g.dtype(x[0]));
    let n = count(g.shape(x[0]), &axes);
    let w = g.widen(x[0])?;
    let s = g.sum(w, &axes, attrs[1] != 0)?;
    let n = g.constant_like(n, s);
    let m = g.div(s, n)?;
    g.cast(m, dtype).map(one)
};

pub static MEAN: Op = Op {
    name: "mean",
    sig: "x: tensor, dims: ints?, *, keepdim: bool = false",
    doc: "x (...) -> the arithmetic mean over `dims` (all when absent); integers are converted to f32. The mean of zero\n\
          elements is NaN.",
    class: Class::Fused(MEAN_EXPAND),
    call: Some(|g, a| fused(g, &MEAN, a, 2, &[])),
    samples: &["f(2,3)", "f(2,3,4), 1", "f(2,3,4), [0,2], keepdim=true", "f()", "f(70,33), 0"],
    smooth: true,
    ..FUSED
};

/// Applies `f` to a non-negative value; at 0 the value and the gradient are 0. A root has no gradient there, and a norm
/// of zeros must not yield NaN.
fn rooted(g: &mut Graph, x: NodeId, f: impl FnOnce(&mut Graph, NodeId) -> Result<NodeId>) -> Result<NodeId> {
    let (zero, one) = (g.constant_like(0.0, x), g.constant_like(1.0, x));
    let flat = g.eq(x, zero)?;
    let safe = g.where_(flat, one, x)?;
    let y = f(g, safe)?;
    g.where_(flat, zero, y)
}

/// Mean of squared deviations; `attrs[2]` is subtracted from the count.
fn variance(g: &mut Graph, x: NodeId, attrs: &[i64]) -> Result<NodeId> {
    let axes = unmask(attrs[0]);
    let n = count(g.shape(x), &axes);
    let w = g.widen(x)?;
    let s = g.sum(w, &axes, true)?;
    let m = g.mul_c(s, 1.0 / n)?;
    let d = g.sub(w, m)?;
    let d = g.square(d)?;
    let s = g.sum(d, &axes, attrs[1] != 0)?;
    g.mul_c(s, 1.0 / (n - attrs[2] as f64).max(0.0))
}

pub static VAR: Op = Op {
    name: "var",
    sig: "x: tensor, dims: ints?, *, unbiased: bool = true, keepdim: bool = false",
    doc: "x (...) -> the variance over `dims` (all when absent), two-pass; divided by n - 1 if `unbiased`, else by n.",
    class: Class::Fused(|g, x, attrs| {
        let v = variance(g, x[0], attrs)?;
        let dtype = g.dtype(x[0]);
        g.cast(v, dtype).map(one)
    }),
    call: Some(|g, a| fused(g, &VAR, a, 3, &[i64::from(a.bool(2))])),
    samples: &["f(2,3)", "f(2,3,4), 1", "f(2,3,4), [0,2], keepdim=true", "f(4,3), 0, unbiased=false", "f(70,33), 0"],
    smooth: true,
    ..FUSED
};

pub static STD: Op = Op {
    name: "std",
    sig: "x: tensor, dims: ints?, *, unbiased: bool = true, keepdim: bool = false",
    doc: "x (...) -> the standard deviation over `dims` (all when absent): the square root of `var`. Its gradient is 0 where\n\
          it is 0.",
    class: Class::Fused(|g, x, attrs| {
        let v = variance(g, x[0], attrs)?;
        let s = rooted(g, v, |g, v| g.sqrt(v))?;
        let dtype = g.dtype(x[0]);
        g.cast(s, dtype).map(one)
    }),
    call: Some(|g, a| fused(g, &STD, a, 3, &[i64::from(a.bool(2))])),
    samples: &["f(2,3)", "f(2,3,4), 1", "f(2,3,4), [0,2], keepdim=true", "f(4,3), 0, unbiased=false"],
    smooth: true,
    ..FUSED
};

pub static NORM: Op = Op {
    name: "norm",
    sig: "x: tensor, dims: ints?, *, p: float = 2, keepdim: bool = false",
    doc: "x (...) -> (sum |x|^p)^(1/p) over `dims` (all when absent); p may be math.huge (largest |x|), 1 or any p > 0.\n\
          The gradient of a norm that is 0 is 0.",
    class: Class::Fused(|g, x, attrs| {
        let (axes, keep, p) = (unmask(attrs[0]), attrs[1] != 0, f64::from_bits(attrs[2] as u64));
        let dtype = g.dtype(x[0]);
        let w = g.widen(x[0])?;
        let y = if p == 2.0 {
            let s = g.square(w)?;
            let s = g.sum(s, &axes, keep)?;
            rooted(g, s, |g, s| g.sqrt(s))?
        } else if p.is_infinite() {
            let m = g.abs(w)?;
            g.max(m, &axes, keep)?
        } else {
            let m = g.abs(w)?;
            let c = g.constant_like(p, m);
            let m = if p == 1.0 { m } else { rooted(g, m, |g, m| g.pow(m, c))? };
            let s = g.sum(m, &axes, keep)?;
            let c = g.constant_like(1.0 / p, s);
            if p == 1.0 { s } else { rooted(g, s, |g, s| g.pow(s, c))? }
        };
        g.cast(y, dtype).map(one)
    }),
    call: Some(|g, a| {
        let p = a.float(2)?;
        if p.is_nan() || p <= 0.0 {
            return Err(Error::argument("norm", format!("p is {p}; it must be above 0")));
        }
        fused(g, &NORM, a, 3, &[p.to_bits() as i64])
    }),
    samples: &["f(2,3)", "f(2,3,4), 1", "f(2,3), 0, p=1, keepdim=true", "p(5,3), 1, p=3", "f(70,33), 0"],
    smooth: true,
    ..FUSED
};

pub static LOGSUMEXP: Op = Op {
    name: "logsumexp",
    sig: "x: tensor, dims: ints?, *, keepdim: bool = false",
    doc: "x (...) -> log(sum(exp(x))) over `dims` (all when absent), without overflow.",
    class: Class::Fused(|g, x, attrs| {
        let (axes, dtype) = (unmask(attrs[0]), g.dtype(x[0]));
        let w = g.widen(x[0])?;
        let m = g.max(w, &axes, true)?;
        // Rows of infinities: subtract 0, not infinity.
        let bad = g.map(&super::elementwise::ISINF, &[m])?;
        let zero = g.constant_like(0.0, m);
        let m = g.where_(bad, zero, m)?;
        let m = movement::detach(g, m)?;
        let d = g.sub(w, m)?;
        let e = g.exp(d)?;
        let s = g.sum(e, &axes, true)?;
        let l = g.log(s)?;
        let mut y = g.add_(l, m)?;
        if attrs[1] == 0 {
            let mut dims = Axes::new();
            let shape = g.shape(y);
            dims.extend(shape.dims().iter().enumerate().filter(|(a, _)| !axes.contains(a)).map(|(_, &d)| d));
            y = g.reshape(y, &dims)?;
        }
        g.cast(y, dtype).map(one)
    }),
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let axes = axes(g, "logsumexp", x, a.opt_ints(1))?;
        no_empty(g, "logsumexp", x, &axes)?;
        fused(g, &LOGSUMEXP, a, 2, &[])
    }),
    samples: &["f(2,3)", "f(2,3,4), 1", "f(2,3), -1, keepdim=true", "f()", "f(70,33), 0"],
    smooth: true,
    ..FUSED
};

fn truth(g: &mut Graph, a: &super::Args, op: &'static Op) -> Result<super::Out> {
    let x = a.tensor(0)?;
    let axes = axes(g, a.op.name, x, a.opt_ints(1))?;
    let x = g.cast(x, DType::Bool)?;
    over(g, op, x, &axes, a.bool(2)).map(one)
}

pub static ANY: Op = Op {
    name: "any",
    sig: "x: tensor, dims: ints?, *, keepdim: bool = false",
    doc: "x (...) -> bool: whether some element over `dims` (all when absent) is not zero. False for zero elements.",
    call: Some(|g, a| truth(g, a, &AMAX)),
    samples: &["b(2,3)", "b(2,3), 1", "b(2,0), 1", "i(2;2,3), 0, keepdim=true"],
    ..Op::BASE
};

pub static ALL: Op = Op {
    name: "all",
    sig: "x: tensor, dims: ints?, *, keepdim: bool = false",
    doc: "x (...) -> bool: whether every element over `dims` (all when absent) is not zero. True for zero elements.",
    call: Some(|g, a| truth(g, a, &AMIN)),
    samples: &["b(2,3)", "b(2,3), 1", "b(2,0), 1", "i(2;2,3), 0, keepdim=true"],
    ..Op::BASE
};

/// Position of the extremum along an axis. `attrs`: [axis, 1 for max / 0 for min]; the axis stays with size 1.
pub static ARGREDUCE: Op = Op {
    name: "argreduce",
    shard: Some(crate::sharding::along_other_dims),
    class: Class::Library,
    infer: |i| Ok(Meta { shape: i.shape(0).with(i.attr(0), 1), dtype: DType::I64 }),
    ..Op::BASE
};

pub fn arg(g: &mut Graph, x: NodeId, at: usize, max: bool, keepdim: bool) -> Result<NodeId> {
    let y = g.push(&ARGREDUCE, &[x], &[at as i64, i64::from(max)])?;
    if keepdim {
        return Ok(y);
    }
    let shape = g.shape(x).remove(at);
    movement::reshape(g, y, shape)
}

fn position(g: &mut Graph, a: &super::Args, max: bool) -> Result<super::Out> {
    let x = a.tensor(0)?;
    let shape = g.shape(x);
    let Some(dim) = a.opt_int(1) else {
        let flat = g.reshape(x, &[shape.numel()])?;
        no_empty(g, a.op.name, flat, &[0])?;
        let y = arg(g, flat, 0, max, false)?;
        let kept: Axes = if a.bool(2) { smallvec![1; shape.rank()] } else { Axes::new() };
        return g.reshape(y, &kept).map(one);
    };
    let at = shape.axis(a.op.name, dim)?;
    no_empty(g, a.op.name, x, &[at])?;
    arg(g, x, at, max, a.bool(2)).map(one)
}

pub static ARGMAX: Op = Op {
    name: "argmax",
    sig: "x: tensor, dim: int?, *, keepdim: bool = false",
    doc: "x (...) -> i64: position of the largest element along `dim`, or in the flattened tensor. Of equal elements the\n\
          first counts; NaN is the largest.",
    call: Some(|g, a| position(g, a, true)),
    samples: &["f(2,3)", "f(2,3,4), 1", "f(2,3), -1, keepdim=true", "f(40,5), 0", "f(2,3), nil, keepdim=true"],
    ..Op::BASE
};

pub static ARGMIN: Op = Op {
    name: "argmin",
    sig: "x: tensor, dim: int?, *, keepdim: bool = false",
    doc: "x (...) -> i64: position of the smallest element along `dim`, or in the flattened tensor. Of equal elements the\n\
          first counts; NaN is the smallest.",
    call: Some(|g, a| position(g, a, false)),
    samples: &["f(2,3)", "f(2,3,4), 1", "f(2,3), -1, keepdim=true", "f(40,5), 0", "f(2,3), nil, keepdim=true"],
    ..Op::BASE
};

/// The identity element of a reduction, as f64 (infinities stand for the ends of an integer's range).
pub fn identity(f: ReduceFn, dtype: DType) -> f64 {
    match f {
        ReduceFn::Max if dtype == DType::Bool => 0.0,
        ReduceFn::Min if dtype == DType::Bool => 1.0,
        ReduceFn::Sum => 0.0,
        ReduceFn::Prod => 1.0,
        ReduceFn::Max => f64::NEG_INFINITY,
        ReduceFn::Min => f64::INFINITY,
    }
}
