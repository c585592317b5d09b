//! Defines reads and writes by index tensors.
//!
//! There are four library primitives (`gather`, `scatter_add`, `index_select`, `index_add`) and `scatter`; the rest are
//! maps over index ramps. Additions happen in index order, so results do not depend on threads. An index out of range
//! is an error at run time that names the index, the dim and the recipe line.

use super::loss::{CLASS_IDS, IGNORES_NONE, OF_CLASSES};
use super::{Args, Class, Grad, IndexFault, Op, one};
use crate::error::{Error, Result};
use crate::graph::{Graph, Infer, Meta, NodeId};
use crate::{DType, HostTensor, Shape, host_memory};
use smallvec::smallvec;

pub static OPS: &[&Op] = &[
    &GATHER,
    &TAKE_ALONG,
    &SCATTER,
    &SCATTER_ADD,
    &INDEX_SELECT,
    &INDEX_ADD,
    &MASKED_FILL,
    &ONE_HOT,
    &EMBEDDING,
    &NONZERO,
    &MASKED_SELECT,
];

/// Converts an index tensor to i64; floats are an error.
pub fn as_index(g: &mut Graph, op: &str, index: NodeId) -> Result<NodeId> {
    let dtype = g.dtype(index);
    if !dtype.is_int() {
        return Err(Error::dtype(op, format!("indices must be integers, not {dtype}"))
            .hint("convert them with ids:to(\"i64\")"));
    }
    g.cast(index, DType::I64)
}

fn like_index(i: &Infer) -> Result<Meta> {
    let (x, index, at) = (i.shape(0), i.shape(1), i.attr(0));
    let fits =
        x.rank() == index.rank() && x.dims().iter().zip(index.dims()).enumerate().all(|(d, (n, k))| d == at || k <= n);
    if !fits {
        let message = format!("index {index} does not fit {x}: same number of dims, and none larger except dim {at}");
        return Err(Error::shape(i.op, message));
    }
    Ok(Meta { shape: index, dtype: i.dtype(0) })
}

fn like_x(i: &Infer) -> Result<Meta> {
    Ok(i.inputs[0])
}

pub fn gather(g: &mut Graph, x: NodeId, at: usize, index: NodeId) -> Result<NodeId> {
    g.push(&GATHER, &[x, index], &[at as i64])
}

fn zeros_like(g: &mut Graph, x: NodeId) -> Result<NodeId> {
    let (shape, dtype) = (g.shape(x), g.dtype(x));
    g.filled(0.0, shape, dtype)
}

fn call_gather(g: &mut Graph, a: &Args) -> Result<super::Out> {
    let x = a.tensor(0)?;
    let at = g.shape(x).axis(a.op.name, a.int(1)?)?;
    let index = as_index(g, a.op.name, a.tensor(2)?)?;
    gather(g, x, at, index).map(one)
}

/// `attrs`: [axis].
pub static GATHER: Op = Op {
    name: "gather",
    index_fault: Some(|_| IndexFault::elements("gather")),
    reads: Some(super::lookup_reads),
    sig: "x: tensor, dim: int, index: tensor",
    doc: "x (..., N, ...), index (..., K, ...) int -> (..., K, ...): out[.., k, ..] = x[.., index[.., k, ..], ..] along `dim`.",
    shard: Some(crate::sharding::gather),
    class: Class::Library,
    infer: like_index,
    call: Some(call_gather),
    grad: Grad::Rule(|g, c| {
        let z = zeros_like(g, c.x(0))?;
        Ok(smallvec![Some(g.push(&SCATTER_ADD, &[z, c.x(1), c.grad], c.attrs)?), None])
    }),
    samples: &["f(3,4), 1, i(4;3,2)", "f(3,4), 0, i(3;2,4)", "f(5), 0, i(5;7)", "f(3,4), 1, i(4;3,0)"],
    smooth: true,
    ..Op::BASE
};

pub static TAKE_ALONG: Op = Op {
    name: "take_along",
    sig: "x: tensor, dim: int, index: tensor",
    doc: "x (..., N, ...), index (..., K, ...) int -> (..., K, ...): as `gather`, but x and index broadcast in the other dims\n\
          (NumPy's take_along_axis).",
    call: Some(|g, a| {
        let (x, index) = (a.tensor(0)?, as_index(g, a.op.name, a.tensor(2)?)?);
        let (sx, si) = (g.shape(x), g.shape(index));
        let at = sx.axis(a.op.name, a.int(1)?)?;
        let others = |s: Shape| (s.rank() == sx.rank()).then(|| s.with(at, 1));
        let common = others(si).and_then(|i| Shape::broadcast(&sx.with(at, 1), &i));
        let Some(common) = common else {
            let message =
                format!("index {si} and x {sx} must have the same number of dims, and broadcast in all but dim {at}");
            return Err(Error::shape(a.op.name, message));
        };
        let x = g.expand(x, common.with(at, sx.dims()[at]))?;
        let index = g.expand(index, common.with(at, si.dims()[at]))?;
        gather(g, x, at, index).map(one)
    }),
    samples: &["f(3,4), 1, i(4;3,2)", "f(3,4), 1, i(4;1,2)", "f(1,4), 1, i(4;3,2)", "f(3,1,2), 0, i(3;2,4,1)"],
    smooth: true,
    ..Op::BASE
};

fn check_src(i: &Infer) -> Result<Meta> {
    like_index(i)?;
    if i.shape(2) != i.shape(1) {
        return Err(Error::shape(
            i.op,
            format!("src {} and index {} must have the same shape", i.shape(2), i.shape(1)),
        ));
    }
    if i.dtype(2) != i.dtype(0) {
        return Err(Error::dtype(i.op, format!("src is {} and x is {}; they must be equal", i.dtype(2), i.dtype(0))));
    }
    like_x(i)
}

/// Converts bools to i64 before they are summed.
fn summand(g: &mut Graph, x: NodeId) -> Result<NodeId> {
    if g.dtype(x) == DType::Bool { g.cast(x, DType::I64) } else { Ok(x) }
}

fn call_scatter(g: &mut Graph, a: &Args, op: &'static Op) -> Result<super::Out> {
    let x = a.tensor(0)?;
    let x = if op == &SCATTER_ADD { summand(g, x)? } else { x };
    let at = g.shape(x).axis(a.op.name, a.int(1)?)?;
    let index = as_index(g, a.op.name, a.tensor(2)?)?;
    let dtype = g.dtype(x);
    let src = a.operand(g, 3, dtype)?;
    let src = g.cast(src, dtype)?;
    let shape = g.shape(index);
    let src = if g.shape(src).is_scalar() { g.expand(src, shape)? } else { src };
    g.push(op, &[x, index, src], &[at as i64]).map(one)
}

/// `attrs`: [axis].
pub static SCATTER: Op = Op {
    name: "scatter",
    index_fault: Some(|_| IndexFault::elements("scatter")),
    sig: "x: tensor, dim: int, index: tensor, src: operand",
    doc: "x (..., N, ...), index (..., K, ...) int, src (..., K, ...) or number -> x with x[.., index[.., k, ..], ..] replaced\n\
          by src[.., k, ..]. Of several writes to one element, the last in row-major order is kept.",
    shard: Some(crate::sharding::along_other_dims),
    class: Class::Library,
    infer: check_src,
    call: Some(|g, a| call_scatter(g, a, &SCATTER)),
    grad: Grad::Rule(|g, c| {
        let z = zeros_like(g, c.x(2))?;
        let dx = g.push(&SCATTER, &[c.grad, c.x(1), z], c.attrs)?;
        Ok(smallvec![Some(dx), None, Some(gather(g, c.grad, c.attr(0), c.x(1))?)])
    }),
    samples: &["f(3,4), 1, perm(3,2), f(3,2)", "f(3,4), 0, i(3;1,4), 2.0"],
    smooth: true,
    ..Op::BASE
};

/// `attrs`: [axis].
pub static SCATTER_ADD: Op = Op {
    name: "scatter_add",
    index_fault: Some(|_| IndexFault::elements("scatter_add")),
    sig: "x: tensor, dim: int, index: tensor, src: operand",
    doc: "x (..., N, ...), index (..., K, ...) int, src (..., K, ...) or number -> x with src[.., k, ..] added at\n\
          [.., index[.., k, ..], ..], in row-major order of index.",
    shard: Some(crate::sharding::scatter_add),
    class: Class::Library,
    infer: check_src,
    call: Some(|g, a| call_scatter(g, a, &SCATTER_ADD)),
    grad: Grad::Rule(|g, c| Ok(smallvec![Some(c.grad), None, Some(gather(g, c.grad, c.attr(0), c.x(1))?)])),
    samples: &[
        "f(3,4), 1, i(4;3,6), f(3,6)",
        "f(3,4), 0, i(3;2,4), f(2,4)",
        "f(4), 0, i(4;9), 1.0",
        "f(3), 0, i(3;0), f(0)",
    ],
    smooth: true,
    ..Op::BASE
};

pub fn index_select(g: &mut Graph, x: NodeId, at: usize, index: NodeId) -> Result<NodeId> {
    g.push(&INDEX_SELECT, &[x, index], &[at as i64])
}

fn one_dim(i: &Infer) -> Result<()> {
    if i.shape(1).rank() != 1 {
        return Err(Error::shape(i.op, format!("index must have one dim, not shape {}", i.shape(1))));
    }
    Ok(())
}

/// The second attribute of an `index_select` that the user called as `embedding`.
pub const OF_EMBEDDING: i64 = 1;
/// The second attribute of an `index_select` whose positions the planner computes: they are in range.
pub const OF_PLANNER: i64 = 2;

/// `attrs`: [axis, OF_EMBEDDING or OF_PLANNER?].
pub static INDEX_SELECT: Op = Op {
    name: "index_select",
    index_fault: Some(|attrs| {
        IndexFault::elements(if attrs.get(1) == Some(&OF_EMBEDDING) { "embedding" } else { "index_select" })
    }),
    reads: Some(super::lookup_reads),
    sig: "x: tensor, dim: int, index: tensor",
    doc: "x (..., N, ...), index (K) int -> (..., K, ...): the slices of dim `dim` that index names.",
    shard: Some(crate::sharding::select),
    class: Class::Library,
    infer: |i| {
        one_dim(i)?;
        Ok(Meta { shape: Shape::new(i.shape(0).with(i.attr(0), i.shape(1).numel()).dims())?, dtype: i.dtype(0) })
    },
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let at = g.shape(x).axis("index_select", a.int(1)?)?;
        let index = as_index(g, "index_select", a.tensor(2)?)?;
        index_select(g, x, at, index).map(one)
    }),
    grad: Grad::Rule(|g, c| {
        let z = zeros_like(g, c.x(0))?;
        Ok(smallvec![Some(g.push(&INDEX_ADD, &[z, c.x(1), c.grad], &c.attrs[..1])?), None])
    }),
    samples: &["f(5,3), 0, i(5;7)", "f(2,4), 1, i(4;3)", "f(5,3), 0, i(5;0)", "f(2,4,3), 1, i(4;2)"],
    smooth: true,
    ..Op::BASE
};

/// `attrs`: [axis].
pub static INDEX_ADD: Op = Op {
    name: "index_add",
    index_fault: Some(|_| IndexFault::elements("index_add")),
    sig: "x: tensor, dim: int, index: tensor, src: tensor",
    doc: "x (..., N, ...), index (K) int, src (..., K, ...) -> x with slice k of src added to slice index[k], in order.",
    shard: Some(crate::sharding::select_add),
    class: Class::Library,
    infer: |i| {
        one_dim(i)?;
        let want = i.shape(0).with(i.attr(0), i.shape(1).numel());
        if i.shape(2) != want || i.dtype(2) != i.dtype(0) {
            let message = format!("src is {} {}, but must be {} {want}", i.dtype(2), i.shape(2), i.dtype(0));
            return Err(Error::shape(i.op, message));
        }
        like_x(i)
    },
    call: Some(|g, a| {
        let x = summand(g, a.tensor(0)?)?;
        let at = g.shape(x).axis("index_add", a.int(1)?)?;
        let index = as_index(g, "index_add", a.tensor(2)?)?;
        let dtype = g.dtype(x);
        let src = g.cast(a.tensor(3)?, dtype)?;
        g.push(&INDEX_ADD, &[x, index, src], &[at as i64]).map(one)
    }),
    grad: Grad::Rule(|g, c| Ok(smallvec![Some(c.grad), None, Some(index_select(g, c.grad, c.attr(0), c.x(1))?)])),
    samples: &["f(5,3), 0, i(5;7), f(7,3)", "f(2,4), 1, i(4;3), f(2,3)", "f(5,3), 0, i(5;0), f(0,3)"],
    smooth: true,
    ..Op::BASE
};

pub static MASKED_FILL: Op = Op {
    name: "masked_fill",
    sig: "x: tensor, mask: tensor, value: operand",
    doc: "x (...), mask (...) bool -> broadcast: `value` where mask is true, else x.",
    call: Some(|g, a| {
        let (x, mask) = (a.tensor(0)?, a.tensor(1)?);
        let dtype = g.dtype(x);
        let value = a.operand(g, 2, dtype)?;
        let value = g.cast(value, dtype)?;
        g.where_(mask, value, x).map(one)
    }),
    samples: &["f(2,3), b(2,3), 9.5", "f(2,3), b(3), -1", "f(0,3), b(3), 0"],
    smooth: true,
    ..Op::BASE
};

pub static ONE_HOT: Op = Op {
    name: "one_hot",
    sig: "ids: tensor, classes: int",
    doc: "ids (...) int -> (..., classes) i64: 1 at the position of the id, else 0. An id outside 0 to classes - 1 is an\n\
          error when the step runs.",
    call: Some(|g, a| {
        let ids = as_index(g, "one_hot", a.tensor(0)?)?;
        let n = a.int(1)?;
        let Some(n) = usize::try_from(n).ok().filter(|n| *n > 0) else {
            return Err(Error::argument("one_hot", format!("classes is {n}; it must be 1 or more")));
        };
        let which = OF_CLASSES.iter().position(|op| *op == "one_hot").unwrap_or(0) as i64;
        let ids = g.push(&CLASS_IDS, &[ids], &[n as i64, which, IGNORES_NONE])?;
        one_hot(g, ids, n).and_then(|y| g.cast(y, DType::I64)).map(one)
    }),
    samples: &["i(4;3), 4", "i(4;2,3), 5", "i(4;0), 3"],
    ..Op::BASE
};

/// ids (...) i64 -> bool (..., n).
pub fn one_hot(g: &mut Graph, ids: NodeId, n: usize) -> Result<NodeId> {
    let rank = g.shape(ids).rank();
    let ramp = g.iota_along(n, rank, rank + 1)?;
    let ids = g.unsqueeze(ids, rank)?;
    g.eq(ids, ramp)
}

pub static EMBEDDING: Op = Op {
    name: "embedding",
    sig: "weight: tensor, ids: tensor",
    doc: "weight (V, D), ids (...) int -> (..., D): row ids[...] of weight. The gradient adds rows in order of position. An id\n\
          outside 0 to V - 1 is an error when the step runs.",
    call: Some(|g, a| {
        let w = a.tensor(0)?;
        let ids = as_index(g, "embedding", a.tensor(1)?)?;
        let (ws, shape) = (g.shape(w), g.shape(ids));
        if ws.rank() != 2 {
            return Err(Error::shape("embedding", format!("weight must be (V, D), not {ws}")));
        }
        let flat = g.reshape(ids, &[shape.numel()])?;
        let rows = g.push(&INDEX_SELECT, &[w, flat], &[0, OF_EMBEDDING])?;
        let out = shape.insert(shape.rank(), ws.dims()[1])?;
        super::movement::reshape(g, rows, out).map(one)
    }),
    samples: &["f(7,3), i(7;4)", "f(7,3), i(7;2,5)", "f(7,3), i(7;0)"],
    smooth: true,
    ..Op::BASE
};

/// Where x is not zero; an error unless there is memory for all coordinates of all elements.
fn positions(op: &str, x: &HostTensor) -> Result<Vec<usize>> {
    host_memory::check(op, x.numel().saturating_mul((1 + x.shape.rank()) * size_of::<i64>()))?;
    Ok((0..x.numel()).filter(|&i| x.get_f64(i) != 0.0).collect())
}

pub static NONZERO: Op = Op {
    name: "nonzero",
    sig: "x: tensor",
    doc: "x (d0, ..., dk) -> (n, k + 1) i64: the coordinates of the elements that are not zero, in row-major order.\n\
          Reads the tensor on the host, which splits the step.",
    class: Class::Host(|xs, _| {
        let x = &xs[0];
        let strides = x.shape.strides();
        let at = positions("nonzero", x)?;
        let rank = x.shape.rank();
        let coords: Vec<i64> = at
            .iter()
            .flat_map(|&p| (0..rank).map(move |d| (p / strides[d] as usize % x.shape.dims()[d]) as i64))
            .collect();
        Ok(vec![HostTensor::from_i64(Shape::of(&[at.len(), rank]), &coords)])
    }),
    call: Some(|_, a| a.tensor(1).map(one)),
    samples: &["i(2;3,4)", "b(5)", "i(2;0)"],
    ..Op::BASE
};

pub static MASKED_SELECT: Op = Op {
    name: "masked_select",
    sig: "x: tensor, mask: tensor",
    doc: "x (...), mask (...) bool of the same shape -> (n): the elements of x where mask is true, in row-major order.\n\
          Reads the tensors on the host, which splits the step.",
    class: Class::Host(|xs, _| {
        let (x, mask) = (&xs[0], &xs[1]);
        if x.shape != mask.shape {
            let message = format!("x {} and mask {} must have the same shape", x.shape, mask.shape);
            return Err(Error::shape("masked_select", message));
        }
        let at: Vec<i64> = positions("masked_select", mask)?.into_iter().map(|p| p as i64).collect();
        Ok(vec![HostTensor::from_i64(Shape::of(&[at.len()]), &at)])
    }),
    // The host finds the positions; gathering the elements has a gradient.
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let flat = g.reshape(x, &[g.shape(x).numel()])?;
        index_select(g, flat, 0, a.tensor(2)?).map(one)
    }),
    samples: &["f(3,4), b(3,4)", "f(5), b(5)"],
    ..Op::BASE
};
