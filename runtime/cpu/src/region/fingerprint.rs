//! Serializes a compiled region: see `crate::fingerprint`.

use super::load::{Constant, Load};
use super::*;
use crate::fingerprint::Words;
use crate::loops::fused_interpreter::{FusedOp, Opcode, Operand};

fn loop_shape(s: LoopShape) -> usize {
    match s {
        LoopShape::Flat => 0,
        LoopShape::Rows => 1,
        LoopShape::PerRow => 2,
        LoopShape::Reduce => 3,
    }
}

fn opcode(op: Opcode) -> usize {
    match op {
        Opcode::PrefetchNear => 0,
        Opcode::PrefetchNext => 1,
        Opcode::Load => 2,
        Opcode::Store => 3,
        Opcode::StoreNt => 4,
        Opcode::Sum => 5,
        Opcode::Add => 6,
        Opcode::AddBroadcast => 7,
        Opcode::Sub => 8,
        Opcode::SubBroadcast => 9,
        Opcode::Rsub => 10,
        Opcode::RsubBroadcast => 11,
        Opcode::Mul => 12,
        Opcode::MulBroadcast => 13,
        Opcode::Div => 14,
        Opcode::DivBroadcast => 15,
        Opcode::Rdiv => 16,
        Opcode::RdivBroadcast => 17,
        Opcode::Square => 18,
        Opcode::Neg => 19,
        Opcode::Abs => 20,
        Opcode::Relu => 21,
        Opcode::Sqrt => 22,
        Opcode::Rsqrt => 23,
        Opcode::Reciprocal => 24,
        Opcode::Exp => 25,
        Opcode::Tanh => 26,
        Opcode::Sigmoid => 27,
        Opcode::Sigmoid2 => 28,
        Opcode::Sigmoid2Rest => 29,
        Opcode::Erf => 30,
    }
}

fn fused_ops(list: &[FusedOp], w: &mut Words) {
    w.put(list.len());
    for l in list {
        w.put(opcode(l.opcode));
        match l.operand {
            Operand::None => w.put(0),
            Operand::View(v) => w.list.extend([1, u64::from(v)]),
            Operand::RowBroadcast(v) => w.list.extend([2, u64::from(v)]),
            Operand::Local(k) => w.list.extend([3, u64::from(k)]),
            Operand::Sum(k, v) => w.list.extend([4, u64::from(k), u64::from(v)]),
        }
    }
}

fn row_stride(p: RowStride, w: &mut Words) {
    match p {
        RowStride::Dense => w.put(0),
        RowStride::Zero => w.put(1),
        RowStride::Elements(stride) => {
            w.put(2);
            w.signed(stride);
        }
    }
}

fn fusable(f: &Option<Fusable>, w: &mut Words) {
    match f {
        None => w.put(0),
        Some(Fusable::Map(f, broadcast)) => {
            w.put(1);
            w.put(f.code());
            w.put(usize::from(broadcast.x) + 2 * usize::from(broadcast.y));
        }
        Some(Fusable::Sum) => w.put(2),
        Some(Fusable::Max) => w.put(3),
    }
}

fn constant(c: &Constant, w: &mut Words) {
    w.source(&c.source);
    w.signed(c.at);
    w.dtype(c.dtype);
}

fn load(l: &Load, w: &mut Words) {
    w.source(&l.source);
    w.layout(&l.layout);
    w.dtype(l.dtype);
    w.put(usize::from(l.pack.is_some()));
}

fn tile_op(op: &TileOp, w: &mut Words) {
    match op {
        TileOp::Bind { view, value, offset, size, stride } => {
            w.list.extend([0, u64::from(*view)]);
            w.value(*value);
            w.signed(*offset);
            w.put(usize::from(*size));
            row_stride(*stride, w);
        }
        TileOp::Gather { view, load, row } => w.list.extend([1, u64::from(*view), u64::from(*load), u64::from(*row)]),
        TileOp::BindSaved { view, slot, size } => {
            w.list.extend([2, u64::from(*view), u64::from(*slot), u64::from(*size)])
        }
        TileOp::BindOutput { view, value, size } => {
            w.list.extend([3, u64::from(*view)]);
            w.value(*value);
            w.put(usize::from(*size));
        }
        TileOp::Loop { kernel: _, out, args, shape, round, fusable: f } => {
            w.list.extend([4, u64::from(*out)]);
            w.list.extend(args.iter().map(|a| u64::from(*a)));
            w.put(loop_shape(*shape));
            w.put(usize::from(round.is_some()));
            fusable(f, w);
        }
        TileOp::Fused { kernel: _, ops, shape } => {
            w.put(5);
            fused_ops(ops, w);
            w.put(loop_shape(*shape));
        }
        TileOp::ReduceLanes { view, reduction } => w.list.extend([6, u64::from(*view), u64::from(*reduction)]),
        TileOp::ReduceColumns { view, reduction } => w.list.extend([7, u64::from(*view), u64::from(*reduction)]),
        TileOp::Store { view, value, size, kernel: _, row } => {
            w.list.extend([8, u64::from(*view)]);
            w.value(*value);
            w.list.extend([u64::from(*size), u64::from(*row)]);
        }
    }
}

fn tile_ops(list: &[TileOp], w: &mut Words) {
    w.put(list.len());
    list.iter().for_each(|op| tile_op(op, w));
}

fn pairs(list: &[(View, usize)], w: &mut Words) {
    w.put(list.len());
    for (view, at) in list {
        w.put(usize::from(*view));
        w.put(*at);
    }
}

impl Region {
    pub fn fingerprint(&self, w: &mut Words) {
        w.put(usize::from(self.predicate.is_some()));
        self.predicate.iter().for_each(|g| constant(g, w));
        for n in [self.space.batch, self.space.rows, self.space.cols, usize::from(self.segmented)] {
            w.put(n);
        }
        for n in [self.block_rows, self.tile, self.views, self.scratch, self.saved] {
            w.put(n);
        }
        w.put(self.constants.len());
        for (view, c) in &self.constants {
            w.put(usize::from(*view));
            constant(c, w);
        }
        w.put(self.loads.len());
        self.loads.iter().for_each(|l| load(l, w));
        w.put(self.hoisted.len());
        for h in &self.hoisted {
            w.put(usize::from(h.view));
            w.put(h.at);
            match h.source {
                HoistedSource::Fill(from, _) => w.list.extend([0, u64::from(from)]),
                HoistedSource::Load(load, copies) => w.list.extend([1, u64::from(load), copies as u64]),
            }
        }
        w.put(self.row_views.len());
        for (view, size, at) in &self.row_views {
            w.list.extend([u64::from(*view), *size as u64, *at as u64]);
        }
        tile_ops(&self.prologue, w);
        w.put(self.phases.len());
        for p in &self.phases {
            tile_ops(&p.ops, w);
            pairs(&p.tiles, w);
            w.put(p.reductions.len());
            w.list.extend(p.reductions.iter().map(|r| u64::from(*r)));
            tile_ops(&p.row_ops, w);
        }
        w.put(self.row_reductions.len());
        for r in &self.row_reductions {
            let round = usize::from(r.round.is_some());
            [usize::from(r.out), r.size, round, r.lanes, r.total].into_iter().for_each(|n| w.put(n));
        }
        w.put(self.col_reductions.len());
        for r in &self.col_reductions {
            [r.size, usize::from(r.round.is_some()), r.stores.len()].into_iter().for_each(|n| w.put(n));
            for (value, size, _) in &r.stores {
                w.value(*value);
                w.put(*size);
            }
        }
        w.put(usize::from(self.pipeline.is_some()));
        if let Some(r) = &self.pipeline {
            w.put(r.invariant);
            r.at.iter().for_each(|at| w.put(*at));
            r.ops.iter().for_each(|ops| fused_ops(ops, w));
            w.put(r.prefetched.len());
            w.list.extend(r.prefetched.iter().map(|v| u64::from(*v)));
        }
    }
}
