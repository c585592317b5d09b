//! Defines placement of tensors on the mesh of the recording, and collectives on global tensors.
//!
//! Every tensor of a recipe is global: it has one value, whatever devices there are. A placement says what a device stores of it. The
//! per-device values of a collective are the `n` equal blocks of a dim, as `n` devices along an axis have them: block `r` is that of
//! the device at coordinate `r`. So a collective is a function of a global tensor, `all_reduce(x)[i] = sum_r x[r * k + i]`, with the
//! gradient of that function, and of a placement of its result. JAX means the same by `shard_map` around one collective, PyTorch by
//! `redistribute` of a DTensor. Along an axis of one device there is one block, and every collective is the identity.
//!
//! There are three primitives, which keep the shape: [`PLACE`], a view, [`MOVE_BLOCKS`] and [`MEET`]. The planner's pass `shard` makes
//! exchanges of them.

use super::{Args, Class, Grad, Op, join, movement, one, reduce};
use crate::DType;
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::mesh::Axis;
use crate::shape::Shape;
use smallvec::{SmallVec, smallvec};

pub static OPS: &[&Op] = &[
    &PLACE,
    &SHARD,
    &REPLICATE,
    &ALL_REDUCE,
    &REDUCE_SCATTER,
    &ALL_GATHER,
    &ALL_TO_ALL,
    &BROADCAST,
    &MOVE_BLOCKS,
    &SHIFT,
    &SEND_RECV,
    &MEET,
    &BARRIER,
];

/// The dim of a placement that splits nothing.
const WHOLE: i64 = -1;

/// The same tensor, of which each device along an axis has a block of a dim, or all of it. `attrs`: [axis, dim or -1]. Recorded only
/// for an axis with several devices.
pub static PLACE: Op = Op {
    name: "place",
    shard: Some(crate::sharding::same_dims),
    class: Class::View(|input, _, _| Some(*input)),
    infer: |i| Ok(i.inputs[0]),
    // The gradient of a block is a block; that of a gathered tensor is placed as its readers need it.
    grad: Grad::Rule(|g, c| {
        Ok(smallvec![Some(if c.attrs[1] == WHOLE { c.grad } else { g.push(&PLACE, &[c.grad], c.attrs)? })])
    }),
    ..Op::BASE
};

/// The axis along which a node places its input, and the dim that it splits; `None` for any other node.
pub fn placed(op: &Op, attrs: &[i64]) -> Option<(Axis, Option<usize>)> {
    (op == &PLACE).then(|| (Axis::ALL[attrs[0] as usize], usize::try_from(attrs[1]).ok()))
}

/// No device sends a block to that one, which gets zeros.
const NOBODY: i64 = -1;

/// The same blocks of a dim in another order. `attrs`: [dim, axis, the block that each block gets, or -1 for zeros]. No block goes to two.
/// XLA calls the exchange of its blocks a collective permute.
pub static MOVE_BLOCKS: Op = Op {
    name: "move_blocks",
    shard: Some(crate::sharding::linear_along_other_dims),
    class: Class::Fused(|g, x, attrs| {
        let (dim, senders) = (attrs[0] as usize, &attrs[2..]);
        let shape = g.shape(x[0]);
        let size = shape.dims()[dim] / senders.len().max(1);
        let mut blocks: SmallVec<[NodeId; 8]> = SmallVec::new();
        for from in senders {
            blocks.push(match usize::try_from(*from) {
                Ok(from) => g.slice(x[0], dim, from * size, (from + 1) * size, 1)?,
                Err(_) => {
                    let zero = g.constant_like(0.0, x[0]);
                    g.expand(zero, shape.with(dim, size))?
                }
            });
        }
        Ok(smallvec![join::cat(g, &blocks, dim)?])
    }),
    infer: |i| Ok(i.inputs[0]),
    // The gradient of a block goes back to where the block came from.
    grad: Grad::Rule(|g, c| {
        let mut attrs: SmallVec<[i64; 8]> = c.attrs.into();
        attrs[2..].fill(NOBODY);
        for (to, from) in c.attrs[2..].iter().enumerate() {
            if let Ok(from) = usize::try_from(*from) {
                attrs[2 + from] = to as i64;
            }
        }
        Ok(smallvec![Some(g.push(&MOVE_BLOCKS, &[c.grad], &attrs)?)])
    }),
    ..Op::BASE
};

/// What a [`MOVE_BLOCKS`] does: its axis and dim, and for each block the one that it gets, if it is not zeros.
pub fn moved(op: &Op, attrs: &[i64]) -> Option<(Axis, usize, SmallVec<[Option<usize>; 8]>)> {
    let senders = |attrs: &[i64]| attrs.iter().map(|from| usize::try_from(*from).ok()).collect();
    (op == &MOVE_BLOCKS).then(|| (Axis::ALL[attrs[1] as usize], attrs[0] as usize, senders(&attrs[2..])))
}

/// The same tensor, which no device along the axis reads before all have computed theirs. `attrs`: [axis]. Recorded only for an axis with
/// several devices.
pub static MEET: Op = Op {
    name: "meet",
    shard: Some(crate::sharding::same_dims),
    class: Class::View(|input, _, _| Some(*input)),
    infer: |i| Ok(i.inputs[0]),
    grad: Grad::Rule(|_, c| Ok(smallvec![Some(c.grad)])),
    ..Op::BASE
};

/// The axis along which devices meet at a node.
pub fn meets(op: &Op, attrs: &[i64]) -> Option<Axis> {
    (op == &MEET).then(|| Axis::ALL[attrs[0] as usize])
}

/// Whether an op is recorded for an axis of the mesh.
pub fn names_axis(op: &Op) -> bool {
    [&PLACE, &MOVE_BLOCKS, &MEET].into_iter().any(|known| op == known)
}

/// Places a tensor along an axis: split in a dim, or whole.
pub fn place(g: &mut Graph, x: NodeId, axis: Axis, dim: Option<usize>) -> Result<NodeId> {
    if g.mesh.size(axis) == 1 {
        return Ok(x);
    }
    g.push(&PLACE, &[x], &[axis as i64, dim.map_or(WHOLE, |d| d as i64)])
}

/// The axis that argument `i` names.
fn axis(a: &Args, i: usize) -> Result<Axis> {
    let found = Axis::ALL.into_iter().find(|axis| axis.name() == a.str(i));
    found.ok_or_else(|| Error::argument(a.op.name, format!("there is no axis {:?}", a.str(i))))
}

/// A dim of `x` as blocks of the devices along an axis.
struct Blocks {
    axis: Axis,
    dim: usize,
    /// The number of blocks, and the size of each.
    count: usize,
    size: usize,
}

impl Blocks {
    /// Finds the blocks of the dim that argument `i` names, and checks that they are equal.
    fn of(g: &Graph, a: &Args, x: NodeId, axis: Axis, i: usize) -> Result<Blocks> {
        let (shape, count) = (g.shape(x), g.mesh.size(axis));
        let dim = shape.axis(a.op.name, a.int(i)?)?;
        let size = shape.dims()[dim];
        if !size.is_multiple_of(count) {
            let name = axis.name();
            let message = format!(
                "dim {dim} of shape {shape} has {size} elements, which are not {count} equal blocks ({name}={count})"
            );
            return Err(Error::shape(a.op.name, message).hint(format!(
                "each device along {name} has one block: pad the dim to a multiple of {count}, or name another dim"
            )));
        }
        Ok(Blocks { axis, dim, count, size: size / count })
    }

    /// `x` with its blocks in a dim of their own, in front of dim `self.dim`, and one on each device.
    fn apart(&self, g: &mut Graph, x: NodeId) -> Result<NodeId> {
        let x = place(g, x, self.axis, Some(self.dim))?;
        let dims = g.shape(x);
        let mut apart: SmallVec<[usize; 8]> = dims.dims().into();
        apart[self.dim] = self.size;
        apart.insert(self.dim, self.count);
        movement::reshape(g, x, Shape::new(&apart)?)
    }
}

/// Combines the blocks of a dim, element by element.
fn combined(g: &mut Graph, a: &Args, blocks: &Blocks, x: NodeId, how: &str) -> Result<NodeId> {
    let dtype = g.dtype(x);
    if dtype == DType::Bool || how == "mean" && !dtype.is_float() {
        let message = format!("the {how} of {dtype} blocks");
        return Err(Error::dtype(a.op.name, message).hint("x:to(\"f32\") makes floats of them, x:to(\"i64\") integers"));
    }
    let (apart, dims) = (blocks.apart(g, x)?, [blocks.dim]);
    match how {
        "max" => return g.max(apart, &dims, false),
        "min" => return reduce::over(g, &reduce::AMIN, apart, &dims, false),
        _ => {}
    }
    // As `sum` adds: integers in i64, 16-bit floats in f32, rounded once.
    let wide = g.cast(apart, dtype.sum())?;
    let sum = reduce::over(g, &reduce::SUM, wide, &dims, false)?;
    let sum = g.cast(sum, dtype)?;
    if how == "mean" { g.mul_c(sum, 1.0 / blocks.count as f64) } else { Ok(sum) }
}

/// The tensor, the axis and the blocks of a collective whose dim is argument `dim`; `None` along an axis of one device.
fn blocks(g: &Graph, a: &Args, dim: usize) -> Result<(NodeId, Axis, Option<Blocks>)> {
    let (x, axis) = (a.tensor(0)?, axis(a, 1)?);
    let found = Blocks::of(g, a, x, axis, dim)?;
    Ok((x, axis, Some(found).filter(|b| b.count > 1)))
}

pub static SHARD: Op = Op {
    name: "shard",
    sig: "x: tensor, *, pp: int?, dp: int?, shard: int?, cp: int?, ep: int?, tp: int?",
    doc: "x (...) -> x, of which each device along a named axis of the mesh stores a block of the dim given for the axis:\n\
          `x:shard{ dp = 0 }`. The value is the same; the placement decides what is stored and sent. Blocks are of equal size, the\n\
          last ones padded if the axis does not divide the dim. An axis of one device splits nothing. The gradient is placed alike.",
    call: Some(|g, a| {
        let mut x = a.tensor(0)?;
        let shape = g.shape(x);
        let given = |k: usize| a.opt_int(k + 1);
        if (0..Axis::ALL.len()).all(|k| given(k).is_none()) {
            let names = Axis::ALL.map(Axis::name).join(", ");
            return Err(Error::argument("shard", "no axis of the mesh is named").hint(format!(
                "x:shard{{ dp = 0 }} splits dim 0 along dp; the axes are {names}, and x:full() joins all blocks"
            )));
        }
        for (k, axis) in Axis::ALL.into_iter().enumerate() {
            let Some(dim) = given(k) else { continue };
            let dim = shape.axis("shard", dim)?;
            x = place(g, x, axis, Some(dim))?;
        }
        Ok(one(x))
    }),
    samples: &["f(4,3), dp=0", "f(4,3), dp=0, tp=-1"],
    smooth: true,
    ..Op::BASE
};

pub static REPLICATE: Op = Op {
    name: "replicate",
    sig: "x: tensor",
    doc: "x (...) -> x, of which each device of the mesh stores all elements: joins the blocks of `shard`, and completes sums.\n\
          `x:full()` is the same.",
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        Axis::ALL.into_iter().try_fold(x, |x, axis| place(g, x, axis, None)).map(one)
    }),
    samples: &["f(4,3)"],
    smooth: true,
    ..Op::BASE
};

pub static ALL_REDUCE: Op = Op {
    name: "all_reduce",
    sig: "x: tensor, axis: 'pp'|'dp'|'shard'|'cp'|'ep'|'tp', *, dim: int = 0, op: 'sum'|'max'|'min'|'mean' = 'sum'",
    doc: "x (..., n k, ...) -> (..., k, ...): the n blocks of dim `dim`, one for each of the n devices along the axis, combined\n\
          element by element; every device stores the result. Dtypes: those of `sum` and `amax`, the result has that of x;\n\
          16-bit floats are summed in f32. The axis has to divide the dim. Along an axis of one device it is x.",
    call: Some(|g, a| {
        let (x, axis, Some(blocks)) = blocks(g, a, 2)? else { return a.tensor(0).map(one) };
        let y = combined(g, a, &blocks, x, a.str(3))?;
        place(g, y, axis, None).map(one)
    }),
    samples: &["f(4,3), 'dp'", "f(4,3), 'tp', dim=1, op='max'"],
    smooth: true,
    ..Op::BASE
};

pub static REDUCE_SCATTER: Op = Op {
    name: "reduce_scatter",
    sig: "x: tensor, axis: 'pp'|'dp'|'shard'|'cp'|'ep'|'tp', *, dim: int = 0, scatter: int = 0, op: 'sum'|'max'|'min'|'mean' = 'sum'",
    doc: "x (..., n k, ...) -> (..., k, ...): the same value as `all_reduce`, of which each of the n devices along the axis stores\n\
          a block of dim `scatter`. Along an axis of one device it is x.",
    call: Some(|g, a| {
        let (x, axis, Some(blocks)) = blocks(g, a, 2)? else { return a.tensor(0).map(one) };
        let y = combined(g, a, &blocks, x, a.str(4))?;
        let to = g.shape(y).axis("reduce_scatter", a.int(3)?)?;
        place(g, y, axis, Some(to)).map(one)
    }),
    samples: &["f(4,3), 'dp'", "f(4,3), 'tp', dim=1, scatter=1, op='mean'"],
    smooth: true,
    ..Op::BASE
};

pub static ALL_GATHER: Op = Op {
    name: "all_gather",
    sig: "x: tensor, axis: 'pp'|'dp'|'shard'|'cp'|'ep'|'tp'",
    doc: "x (...) -> x, of which each device along the axis stores all elements: the blocks that they had are joined. `x:full()`\n\
          gathers along all axes.",
    call: Some(|g, a| {
        let (x, axis) = (a.tensor(0)?, axis(a, 1)?);
        place(g, x, axis, None).map(one)
    }),
    samples: &["f(4,3), 'dp'"],
    smooth: true,
    ..Op::BASE
};

pub static ALL_TO_ALL: Op = Op {
    name: "all_to_all",
    sig: "x: tensor, axis: 'pp'|'dp'|'shard'|'cp'|'ep'|'tp', from: int, to: int",
    doc: "x (...) -> x: each device along the axis had a block of dim `from` and has one of dim `to` then: from a split of sequences\n\
          to one of heads, say. The value is the same. Blocks are padded if the axis does not divide a dim.",
    call: Some(|g, a| {
        let (x, axis) = (a.tensor(0)?, axis(a, 1)?);
        let shape = g.shape(x);
        let (from, to) = (shape.axis("all_to_all", a.int(2)?)?, shape.axis("all_to_all", a.int(3)?)?);
        let x = place(g, x, axis, Some(from))?;
        place(g, x, axis, Some(to)).map(one)
    }),
    samples: &["f(4,3), 'dp', 0, 1", "f(2,3,4), 'cp', -1, 0"],
    smooth: true,
    ..Op::BASE
};

pub static BROADCAST: Op = Op {
    name: "broadcast",
    sig: "x: tensor, axis: 'pp'|'dp'|'shard'|'cp'|'ep'|'tp', *, root: int = 0, dim: int = 0",
    doc: "x (..., n k, ...) -> (..., k, ...): block `root` of the n blocks of dim `dim`, that of the device at coordinate `root`\n\
          along the axis; every device stores it. `root` counts from 0. Along an axis of one device it is x.",
    call: Some(|g, a| {
        let (x, axis, blocks) = blocks(g, a, 3)?;
        let (root, n) = (a.int(2)?, g.mesh.size(axis));
        if !(0..n as i64).contains(&root) {
            let name = axis.name();
            return Err(Error::argument("broadcast", format!("there is no device {root} along {name}, which has {n}"))
                .hint(format!("root is from 0 to {}", n - 1)));
        }
        let Some(blocks) = blocks else { return Ok(one(x)) };
        // All blocks but one are made zeros, and added: a device sends one block and not all of them. The negative zero changes no
        // element. What cannot be added is gathered.
        if !g.dtype(x).is_float() {
            let start = root as usize * blocks.size;
            let own = g.slice(x, blocks.dim, start, start + blocks.size, 1)?;
            return place(g, own, axis, None).map(one);
        }
        let apart = blocks.apart(g, x)?;
        let shape = g.shape(apart);
        let number = g.iota_along(blocks.count, blocks.dim, shape.rank())?;
        let root = g.int_constant(root);
        let own = g.eq(number, root)?;
        let nothing = g.constant_like(-0.0, apart);
        let (own, nothing) = (g.expand(own, shape)?, g.expand(nothing, shape)?);
        let kept = g.where_(own, apart, nothing)?;
        let y = reduce::over(g, &reduce::SUM, kept, &[blocks.dim], false)?;
        place(g, y, axis, None).map(one)
    }),
    samples: &["f(4,3), 'dp'", "f(4,3), 'tp', dim=1"],
    smooth: true,
    ..Op::BASE
};

/// Moves the blocks of a dim, and leaves each device the one that it gets.
fn moved_blocks(g: &mut Graph, x: NodeId, blocks: &Blocks, senders: &[i64]) -> Result<NodeId> {
    let attrs: SmallVec<[i64; 8]> = [blocks.dim as i64, blocks.axis as i64].iter().chain(senders).copied().collect();
    if senders.iter().copied().eq(0..blocks.count as i64) {
        return place(g, x, blocks.axis, Some(blocks.dim));
    }
    let x = place(g, x, blocks.axis, Some(blocks.dim))?;
    let y = g.push(&MOVE_BLOCKS, &[x], &attrs)?;
    place(g, y, blocks.axis, Some(blocks.dim))
}

pub static SHIFT: Op = Op {
    name: "shift",
    sig: "x: tensor, axis: 'pp'|'dp'|'shard'|'cp'|'ep'|'tp', *, by: int = 1, wrap: bool = true, dim: int = 0",
    doc: "x (..., n k, ...) -> the same shape: the n blocks of dim `dim`, one for each of the n devices along the axis, `by` places\n\
          further on: the device at coordinate r gets the block of r - by. With `wrap` the first ones get those of the last, else\n\
          zeros. `by` may be negative. The axis has to divide the dim. Each device keeps its block. The gradient goes back.",
    call: Some(|g, a| {
        let (x, axis) = (a.tensor(0)?, axis(a, 1)?);
        let blocks = Blocks::of(g, a, x, axis, 4)?;
        let (n, by) = (blocks.count as i64, a.int(2)?);
        let sender = |to: i64| match to.checked_sub(by) {
            _ if a.bool(3) => (to - by.rem_euclid(n)).rem_euclid(n),
            Some(from) if (0..n).contains(&from) => from,
            _ => NOBODY,
        };
        let senders: SmallVec<[i64; 8]> = (0..n).map(sender).collect();
        moved_blocks(g, x, &blocks, &senders).map(one)
    }),
    samples: &["f(4,3), 'dp'", "f(4,3), 'tp', by=-1, dim=1"],
    smooth: true,
    ..Op::BASE
};

pub static SEND_RECV: Op = Op {
    name: "send_recv",
    sig: "x: tensor, axis: 'pp'|'dp'|'shard'|'cp'|'ep'|'tp', to: ints, *, dim: int = 0",
    doc: "x (..., n k, ...) -> the same shape: of the n blocks of dim `dim`, one for each of the n devices along the axis, that of the\n\
          device at coordinate r goes to the device at coordinate to[r + 1], or to none if that is -1. Who gets none has zeros.\n\
          Coordinates count from 0, and no two devices send to the same one. The axis has to divide the dim. Each device keeps its\n\
          block. The gradient of a block goes back to its sender. JAX calls this `ppermute`.",
    call: Some(|g, a| {
        let (x, axis, to) = (a.tensor(0)?, axis(a, 1)?, a.ints(2)?);
        let blocks = Blocks::of(g, a, x, axis, 3)?;
        let (n, name) = (blocks.count, axis.name());
        if to.len() != n {
            return Err(Error::argument(
                "send_recv",
                format!("`to` has {} receivers, and {name} has {n} devices", to.len()),
            )
            .hint(
                "give a receiver for each device, in their order, or -1 for none; pl.mesh() has the sizes of the mesh",
            ));
        }
        let mut senders: SmallVec<[i64; 8]> = smallvec![NOBODY; n];
        for (from, to) in to.iter().enumerate().filter(|(_, to)| **to != NOBODY) {
            let Some(known) = usize::try_from(*to).ok().and_then(|to| senders.get_mut(to)) else {
                return Err(Error::argument(
                    "send_recv",
                    format!("there is no device {to} along {name}, which has {n}"),
                )
                .hint(format!("receivers are from 0 to {}, and -1 is none", n - 1)));
            };
            if *known != NOBODY {
                return Err(Error::argument(
                    "send_recv",
                    format!("devices {known} and {from} both send to device {to}"),
                )
                .hint("name each receiver once; all_reduce and reduce_scatter combine blocks of several devices"));
            }
            *known = from as i64;
        }
        moved_blocks(g, x, &blocks, &senders).map(one)
    }),
    samples: &["f(4,3), 'dp', [0]", "f(4,3), 'tp', [0], dim=1"],
    smooth: true,
    ..Op::BASE
};

pub static BARRIER: Op = Op {
    name: "barrier",
    sig: "x: tensor, axis: 'dp'|'shard'|'cp'|'ep'|'tp'?",
    doc: "x (...) -> x, which no device along the axis reads before all of them have computed their part of it; without an axis, no\n\
          device of the mesh. Stages of a pipeline (`pp`) are not waited for. Ops are recorded and run when a value is read, so a\n\
          barrier orders what follows from its result: `pl.barrier(x):item()` waits for all devices. The gradient does not wait.",
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let given = if a.is_none(1) { None } else { Some(axis(a, 1)?) };
        let several = |axis: &Axis| *axis != Axis::Pp && g.mesh.size(*axis) > 1 && given.is_none_or(|one| one == *axis);
        let axes: SmallVec<[Axis; 2]> = Axis::ALL.into_iter().filter(several).collect();
        axes.into_iter().try_fold(x, |x, axis| g.push(&MEET, &[x], &[axis as i64])).map(one)
    }),
    samples: &["f(4,3)", "f(4,3), 'dp'"],
    smooth: true,
    ..Op::BASE
};
