//! Defines the joining and splitting of tensors: cat and stack, which write memory, and lists of slices.

use super::slicing::{select, slice};
use super::{Args, Class, Grad, Op, Out, one};
use crate::Shape;
use crate::error::{Error, Result};
use crate::graph::{Graph, Meta, NodeId};
use crate::shape::Dims;
use smallvec::SmallVec;

pub static OPS: &[&Op] = &[&CAT, &STACK, &SPLIT, &CHUNK, &UNBIND, &CONCAT];

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
    shard: Some(crate::sharding::join),
    regroups: Some(&crate::sharding::JOINING),
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
