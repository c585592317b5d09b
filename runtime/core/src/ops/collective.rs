//! Defines collectives: ops that exchange the pieces of a tensor among the devices along an axis of a mesh. The planner inserts
//! them (`plan/passes/shard`); a recipe records none. What it may call by these names are functions of global tensors
//! ([`super::distribute`]).

use super::{Class, Op};
use crate::dtype::DType;
use crate::graph::Meta;
use crate::mesh::{Axis, Combine};
use smallvec::SmallVec;

/// Combines the terms of all devices; every device gets the whole. `attrs`: [axis, combination].
pub static ALL_REDUCE: Op = Op {
    name: "all_reduce",
    shard: Some(crate::sharding::all_reduce),
    class: Class::Library,
    infer: |i| Ok(Meta { shape: i.shape(0), dtype: result(i.attrs[1], i.dtype(0)) }),
    ..Op::BASE
};

/// Joins the blocks of all devices along a dim; every device gets the whole. `attrs`: [axis, dim, devices].
pub static ALL_GATHER: Op = Op {
    name: "all_gather",
    shard: Some(crate::sharding::other_dims_of_collective),
    regroups: Some(&crate::sharding::GATHERING),
    class: Class::Library,
    infer: |i| {
        let (shape, dim) = (i.shape(0), i.attr(1));
        Ok(Meta { shape: shape.with(dim, shape.dims()[dim] * i.attr(2)), dtype: i.dtype(0) })
    },
    ..Op::BASE
};

/// Combines the terms of all devices; every device gets its block of a dim. `attrs`: [axis, dim, devices, combination].
pub static REDUCE_SCATTER: Op = Op {
    name: "reduce_scatter",
    shard: Some(crate::sharding::other_dims_of_collective),
    regroups: Some(&crate::sharding::SCATTERING),
    class: Class::Library,
    infer: |i| {
        let (shape, dim) = (i.shape(0), i.attr(1));
        let dtype = result(i.attrs[3], i.dtype(0));
        Ok(Meta { shape: shape.with(dim, shape.dims()[dim] / i.attr(2)), dtype })
    },
    ..Op::BASE
};

/// Sends a tensor to one other device along the axis, without waiting for it to be received. The result is a scalar without meaning.
/// `attrs`: [axis, coordinate of the receiver, number of the transfer].
pub static SEND: Op = Op { name: "send", class: Class::Library, infer: |i| Ok(i.inputs[0]), ..Op::BASE };

/// Waits for a tensor of one other device along the axis. It has no operands: the planner knows shape and dtype. `attrs`: [axis,
/// coordinate of the sender, number of the transfer].
pub static RECV: Op = Op { name: "recv", class: Class::Library, ..Op::BASE };

/// Exchanges slices: of dim 0, which has a slice for each device, every device gets the slice with its own number from all, in their
/// order. `attrs`: [axis, 0, devices].
pub static ALL_TO_ALL: Op = Op {
    name: "all_to_all",
    shard: Some(crate::sharding::other_dims_of_collective),
    class: Class::Library,
    infer: |i| Ok(i.inputs[0]),
    ..Op::BASE
};

/// Moves pieces: every device gets the piece of one device, and each piece goes to one. `attrs`: [axis, devices, the coordinate of
/// the sender for each receiver].
pub static COLLECTIVE_PERMUTE: Op = Op {
    name: "collective_permute",
    shard: Some(crate::sharding::same_dims),
    class: Class::Library,
    infer: |i| Ok(i.inputs[0]),
    ..Op::BASE
};

/// Whether an op exchanges data among devices.
pub fn is_collective(op: &Op) -> bool {
    [&ALL_REDUCE, &ALL_GATHER, &REDUCE_SCATTER, &ALL_TO_ALL, &COLLECTIVE_PERMUTE].into_iter().any(|known| op == known)
}

/// Whether an op moves a tensor from one device to one other.
pub fn is_transfer(op: &Op) -> bool {
    op == &SEND || op == &RECV
}

/// The attributes of a [`COLLECTIVE_PERMUTE`]. `senders`: for each device, the one whose piece it gets.
pub fn permutation(axis: Axis, senders: impl ExactSizeIterator<Item = usize>) -> SmallVec<[i64; 8]> {
    let head = [axis as i64, senders.len() as i64];
    head.into_iter().chain(senders.map(|from| from as i64)).collect()
}

/// The device whose piece the one at `coordinate` gets in a [`COLLECTIVE_PERMUTE`].
pub fn sender(attrs: &[i64], coordinate: usize) -> Option<usize> {
    attrs.get(2 + coordinate).map(|from| *from as usize)
}

/// The number of attributes of a collective for one tensor. A call that moves several tensors has those of each, one after the other, and
/// as many for each.
pub fn num_attrs(op: &Op, attrs: &[i64]) -> usize {
    match op {
        _ if op == &ALL_REDUCE => 2,
        _ if op == &ALL_GATHER || op == &ALL_TO_ALL => 3,
        _ if op == &COLLECTIVE_PERMUTE => 2 + attrs[1] as usize,
        _ => 4,
    }
}

/// The attributes of the `k`-th tensor of a call.
pub fn attrs_of<'a>(op: &Op, attrs: &'a [i64], k: usize) -> &'a [i64] {
    let n = num_attrs(op, attrs);
    &attrs[k * n..(k + 1) * n]
}

/// The attribute of a call that stands for its combination, if it combines terms.
pub fn code_of(op: &Op, attrs: &[i64]) -> Option<i64> {
    match op {
        _ if op == &ALL_REDUCE => Some(attrs[1]),
        _ if op == &REDUCE_SCATTER => Some(attrs[3]),
        _ => None,
    }
}

/// The attribute that stands for a combination in the order of the coordinates.
pub fn code(combine: Combine) -> i64 {
    combine as i64
}

/// The attribute of a sum over a power of two of devices whose terms are added in pairs, the sums of neighbours in pairs again, and so
/// on: a binary tree over the coordinates. Each sum is rounded to the dtype.
pub const TREE: i64 = 3;

/// The attribute of a sum of 16-bit floats whose result is in f32: the sum of the terms as f32, at half the bytes.
pub const WIDENED: i64 = 4;

/// The combination of an attribute.
pub fn combine(code: i64) -> Combine {
    [Combine::Sum, Combine::Max, Combine::Min, Combine::Sum, Combine::Sum][code as usize]
}

/// The dtype in which terms of a dtype are combined.
pub fn result(code: i64, terms: DType) -> DType {
    if code == WIDENED { DType::F32 } else { terms }
}

/// The axis of a collective.
pub fn axis(attrs: &[i64]) -> Axis {
    Axis::ALL[attrs[0] as usize]
}
