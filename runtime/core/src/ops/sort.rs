//! Defines sorting: one library primitive (`argsort`), the ops that gather with it, and `unique`.
//!
//! Sorting is stable in both directions and NaN counts as larger than every number, as in PyTorch.

use super::{Args, Class, Op, Out, create, index, one};
use crate::error::{Error, Result};
use crate::graph::{Graph, Meta, NodeId};
use crate::{DType, HostTensor, Shape, host_memory};
use smallvec::smallvec;
use std::cmp::Ordering;

pub static OPS: &[&Op] = &[&ARGSORT, &SORT, &TOPK, &UNIQUE];

fn argsort(g: &mut Graph, x: NodeId, at: usize, descending: bool) -> Result<NodeId> {
    g.push(&ARGSORT, &[x], &[at as i64, i64::from(descending)])
}

/// `attrs`: [axis, 1 for descending].
pub static ARGSORT: Op = Op {
    name: "argsort",
    sig: "x: tensor, dim: int = -1, *, descending: bool = false",
    doc: "x (..., N, ...) -> (..., N, ...) i64: the positions along `dim` in the order of their elements. Equal elements keep\n\
          their order; NaN comes last, or first if `descending`.",
    shard: Some(crate::sharding::along_other_dims),
    class: Class::Library,
    infer: |i| Ok(Meta { shape: create::same(i)?.shape, dtype: DType::I64 }),
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let at = g.shape(x).axis("argsort", a.int(1)?)?;
        argsort(g, x, at, a.bool(2)).map(one)
    }),
    samples: &["f(2,3)", "f(5,4), 0", "i(4;9), 0", "f(7), descending=true", "i(3;9), descending=true", "f(2,0)"],
    ..Op::BASE
};

pub static SORT: Op = Op {
    name: "sort",
    sig: "x: tensor, dim: int = -1, *, descending: bool = false",
    doc: "x (..., N, ...) -> values (..., N, ...), positions (..., N, ...) i64: in order along `dim`. See `argsort`.",
    results: crate::ops::Results::Named(&["values", "positions"]),
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let at = g.shape(x).axis("sort", a.int(1)?)?;
        let order = argsort(g, x, at, a.bool(2))?;
        Ok(smallvec![index::gather(g, x, at, order)?, order])
    }),
    samples: &["f(2,3)", "f(5,4), 0", "i(4;9), 0", "f(7), descending=true", "f(2,0)"],
    ..Op::BASE
};

pub static TOPK: Op = Op {
    name: "topk",
    sig: "x: tensor, k: int, dim: int = -1, *, largest: bool = true, sorted: bool = true",
    doc: "x (..., N, ...) -> values (..., k, ...), positions (..., k, ...) i64: the k largest elements along `dim`, or the\n\
          smallest, in order. Of equal elements, the first are taken. The result is in order even if `sorted` is false.",
    results: crate::ops::Results::Named(&["values", "positions"]),
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let at = g.shape(x).axis("topk", a.int(2)?)?;
        let (n, k) = (g.shape(x).dims()[at], a.int(1)?);
        let Some(k) = usize::try_from(k).ok().filter(|k| *k <= n) else {
            return Err(Error::argument("topk", format!("k is {k}; dim {} has {n} elements", a.int(2)?)));
        };
        let order = argsort(g, x, at, a.bool(3))?;
        let order = g.slice(order, at, 0, k, 1)?;
        Ok(smallvec![index::gather(g, x, at, order)?, order])
    }),
    samples: &["f(2,5), 2", "f(5,4), 3, 0", "f(7), 7, largest=false", "f(2,5), 0", "i(9;8), 3"],
    ..Op::BASE
};

/// Orders NaN above every other value; -0 equals 0.
fn order(x: &HostTensor, i: usize, j: usize) -> Ordering {
    if !x.dtype.is_float() {
        return x.get_i64(i).cmp(&x.get_i64(j));
    }
    let (a, b) = (x.get_f64(i), x.get_f64(j));
    a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}

fn unique(x: &HostTensor, a: &Args) -> Result<Vec<HostTensor>> {
    // An order, the inverse and the counts.
    host_memory::check("unique", x.numel().saturating_mul(3 * size_of::<i64>()))?;
    let mut at: Vec<usize> = (0..x.numel()).collect();
    at.sort_by(|&i, &j| order(x, i, j));
    let size = x.dtype.size();
    let (mut bytes, mut counts) = (Vec::new(), Vec::<i64>::new());
    let mut inverse = vec![0i64; x.numel()];
    for (k, &i) in at.iter().enumerate() {
        // NaN differs from itself, so every NaN is kept.
        let nan = x.dtype.is_float() && x.get_f64(i).is_nan();
        if k == 0 || nan || order(x, at[k - 1], i) != Ordering::Equal {
            bytes.extend_from_slice(&x.bytes[i * size..(i + 1) * size]);
            counts.push(0);
        }
        let last = counts.len() - 1;
        counts[last] += 1;
        inverse[i] = last as i64;
    }
    let shape = Shape::of(&[counts.len()]);
    let mut out = vec![HostTensor::new(x.dtype, shape, bytes)];
    if a.bool(1) {
        out.push(HostTensor::from_i64(x.shape, &inverse));
    }
    if a.bool(2) {
        out.push(HostTensor::from_i64(shape, &counts));
    }
    Ok(out)
}

/// The host's results follow x and the two options.
fn of_host(_: &mut Graph, a: &Args) -> Result<Out> {
    (3..a.values.len()).map(|i| a.tensor(i)).collect()
}

pub static UNIQUE: Op = Op {
    name: "unique",
    sig: "x: tensor, *, return_inverse: bool = false, return_counts: bool = false",
    doc: "x (...) -> values (n), the distinct elements of the flattened tensor in ascending order; then, if requested,\n\
          (...) i64, the position of each element in values, and (n) i64, the number of occurrences of each value. Every\n\
          NaN is distinct. Reads the tensor on the host, which splits the step.",
    class: Class::Host(|xs, a| unique(&xs[0], a)),
    call: Some(of_host),
    samples: &[
        "i(4;9)",
        "i(3;2,5), return_inverse=true",
        "f(5), return_counts=true",
        "i(5;0)",
        "b(6), return_inverse=true, return_counts=true",
    ],
    ..Op::BASE
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Value;

    #[test]
    fn unique_sorts_counts_and_points_back() {
        let x = HostTensor::from_f64(DType::F32, Shape::of(&[2, 3]), &[2.0, -1.0, 2.0, f64::NAN, 0.0, -0.0]);
        let a = Args::new(&UNIQUE, [Value::None, Value::Bool(true), Value::Bool(true)]);
        let out = unique(&x, &a).unwrap();
        assert_eq!(out[0].to_f64()[..3], [-1.0, 0.0, 2.0]);
        assert!(out[0].get_f64(3).is_nan() && out[0].numel() == 4);
        assert_eq!(out[1].to_i64(), [2, 0, 2, 3, 1, 1]);
        assert_eq!(out[1].shape, x.shape);
        assert_eq!(out[2].to_i64(), [1, 2, 2, 1]);
    }
}
