//! Defines grouped matrix products: each group of rows is multiplied with its own matrix, as in a mixture of experts.
//!
//! There are two library primitives, each of which is the gradient of the other. The number of rows in a group is data:
//! it stays on the device, and the plan is the same for any routing.

use super::matmul::is_transpose;
use super::{Class, Grad, IndexFault, IndexKind, Op, Results, index, one};
use crate::amp::Amp;
use crate::error::{Error, Result};
use crate::graph::{Graph, Meta, NodeId};
use crate::op::times;
use crate::{DType, Shape};
use smallvec::smallvec;

pub static OPS: &[&Op] = &[&GROUPED_MATMUL, &GROUPED_SUMS];

/// The share of the work on all rows that is expected: of so many rows one is in a group. 1 unless it is given.
pub(crate) fn expected(all: u64, slots: Option<&i64>) -> u64 {
    all / slots.map_or(1, |slots| (*slots).max(1) as u64)
}

/// Reports group ends that are out of range, for both ops in the name of the one that recipes call.
const ENDS: fn(&[i64]) -> IndexFault = |_| IndexFault { op: "grouped_matmul", kind: IndexKind::Ends };

/// x (T, K), w (E, K, N), ends (E) i64 -> (T, N). `attrs`: [of how many rows one is expected in a group]?, which only counts of work read.
pub static GROUPED_MATMUL: Op = Op {
    name: "grouped_matmul",
    index_fault: Some(ENDS),
    sig: "x: tensor, w: tensor, ends: tensor",
    doc: "x (T, K), w (E, K, N), ends (E) int -> (T, N): rows ends[e-1] to ends[e] of x times w[e], where group 0 begins at row\n\
          0; rows after the last end are 0. Or x (M, T), w (T, N), ends (E) int -> (E, M, N): the columns of x times the\n\
          rows of w, group by group, 0 for an empty group. One launch computes the products of all groups, whatever their\n\
          sizes: with tokens sorted by expert, `ends` is the cumulative sum of the tokens per expert. It is read on the\n\
          device, so the host does not wait for it, and every routing has the same plan. Dtypes and sums are as in\n\
          `matmul`. Ends that descend, are negative or above T are an error when the step runs. PyTorch's\n\
          torch.nn.functional.grouped_mm(x, w, offs=ends).",
    results: Results::One,
    flops: Some(|w| expected(super::product_flops(w), w.attrs.first())),
    class: Class::Library,
    infer: |i| {
        let (x, w) = (i.shape(0), i.shape(1));
        Ok(Meta { shape: x.with(1, w.dims()[2]), dtype: i.dtype(0) })
    },
    call: Some(|g, a| {
        let (x, w, ends) = (a.tensor(0)?, a.tensor(1)?, a.tensor(2)?);
        grouped(g, x, w, ends).map(one)
    }),
    grad: Grad::Rule(|g, c| {
        let (x, w, ends) = (c.x(0), c.x(1), c.x(2));
        let dx = if c.needs[0] {
            let wt = g.t(w)?;
            Some(g.push(&GROUPED_MATMUL, &[c.grad, wt, ends], c.attrs)?)
        } else {
            None
        };
        // In the storage order of the weight, so that an update of it reads contiguous memory (see `matmul::product`).
        let dw = match (c.needs[1], is_transpose(g, w)) {
            (false, _) => None,
            (true, true) => {
                let d = sums(g, c.grad, x, ends, c.attrs)?;
                Some(g.t(d)?)
            }
            (true, false) => Some(sums(g, x, c.grad, ends, c.attrs)?),
        };
        Ok(smallvec![dx, dw, None])
    }),
    amp: Amp::Low,
    samples: &[
        "f(7,3), f(3,3,4), ends(7;3)",
        "f(7,3), f(1,3,4), ends(7;1)",
        "f(3,9), f(9,4), ends(9;4)",
        "f(5,3), f(9,3,2), ends(5;9)",
        "f(0,3), f(2,3,4), ends(0;2)",
        "f(5,0), f(2,0,3), ends(5;2)",
        "f(4,3), f(0,3,2), ends(4;0)",
        "f(3,0), f(0,4), ends(0;2)",
        "f(90,40), f(3,40,33), ends(90;3)",
    ],
    smooth: true,
    ..Op::BASE
};

/// a (T, M), b (T, N), ends (E) i64 -> (E, M, N): for each group, the transposed rows of a times the rows of b. `attrs` as
/// [`GROUPED_MATMUL`].
pub static GROUPED_SUMS: Op = Op {
    name: "grouped_sums",
    index_fault: Some(ENDS),
    flops: Some(|w| expected(times([2, w.numel(0), w.dim(1, 0)]), w.attrs.first())),
    class: Class::Library,
    infer: |i| {
        let (a, b) = (i.shape(0), i.shape(1));
        Ok(Meta { shape: Shape::new(&[i.shape(2).numel(), a.dims()[1], b.dims()[1]])?, dtype: i.dtype(0) })
    },
    grad: Grad::Rule(|g, c| {
        let (a, b, ends) = (c.x(0), c.x(1), c.x(2));
        let da = if c.needs[0] {
            let dt = g.t(c.grad)?;
            Some(g.push(&GROUPED_MATMUL, &[b, dt, ends], c.attrs)?)
        } else {
            None
        };
        let db = if c.needs[1] { Some(g.push(&GROUPED_MATMUL, &[a, c.grad, ends], c.attrs)?) } else { None };
        Ok(smallvec![da, db, None])
    }),
    amp: Amp::Low,
    smooth: true,
    ..Op::BASE
};

fn sums(g: &mut Graph, a: NodeId, b: NodeId, ends: NodeId, attrs: &[i64]) -> Result<NodeId> {
    g.push(&GROUPED_SUMS, &[a, b, ends], attrs)
}

/// Checks and promotes the operands, and selects one of the two products.
fn grouped(g: &mut Graph, x: NodeId, w: NodeId, ends: NodeId) -> Result<NodeId> {
    let op = GROUPED_MATMUL.name;
    let (sx, sw, se) = (g.shape(x), g.shape(w), g.shape(ends));
    let ends = index::as_index(g, op, ends)?;
    if sx.rank() != 2 || !(2..=3).contains(&sw.rank()) || se.rank() != 1 {
        let message =
            format!("x {sx}, w {sw} and ends {se} must be (T, K), (E, K, N) and (E), or (M, T), (T, N) and (E)");
        return Err(Error::shape(op, message));
    }
    let (k, rows) = (sx.dims()[1], sw.dims()[sw.rank() - 2]);
    if k != rows {
        let which = if sw.rank() == 3 { "second" } else { "first" };
        let message =
            format!("shapes {sx} and {sw} do not chain: last dim of x ({k}) must equal the {which} of w ({rows})");
        return Err(Error::shape(op, message));
    }
    if sw.rank() == 3 && sw.dims()[0] != se.dims()[0] {
        let message = format!("w {sw} has {} matrices and ends {se} names {} groups", sw.dims()[0], se.dims()[0]);
        return Err(Error::shape(op, message).hint("each group has one matrix and one end"));
    }
    let dtype = DType::promote(g.dtype(x), g.dtype(w));
    let dtype = if dtype == DType::Bool { DType::I64 } else { dtype };
    let (x, w) = (g.cast(x, dtype)?, g.cast(w, dtype)?);
    if sw.rank() == 3 {
        return g.push(&GROUPED_MATMUL, &[x, w, ends], &[]);
    }
    let xt = g.t(x)?;
    sums(g, xt, w, ends, &[])
}

/// The error for a group end outside `rows` rows, or before the end of the previous group; `at` is its index, if known.
pub fn bad_end(at: Option<usize>, end: i64, rows: i64) -> Error {
    let what = at.map_or_else(|| "an end".to_string(), |e| format!("ends[{e}]"));
    let (message, cure) = if end < 0 || end > rows {
        (
            format!("{what} is {end}, but there are {rows} rows"),
            format!("ends are positions: here 0 to {rows}, each where its group's rows end"),
        )
    } else {
        (
            format!("{what} is {end}, less than the one before it"),
            "ends ascend: the cumulative sum of the groups' sizes".to_string(),
        )
    };
    Error::argument(GROUPED_MATMUL.name, message).hint(cure)
}
