//! Decides which regions with three loops over rows run as a software pipeline (`loops::row_pipeline`).

use super::*;
use crate::loops::fused_interpreter::{FusedOp, Opcode, Operand};
use crate::loops::row_pipeline::{self, FirstStage};
use crate::loops::superinstructions;
use perilune_plan::ir::LANES;

impl Compiler<'_> {
    /// The pipeline of a list, if it reads dense f32 rows from memory and writes with non-temporal stores.
    pub(super) fn pipeline(&self, list: &mut List) -> Option<RowPipeline> {
        let columns = list.ops.iter().any(|s| matches!(s, TileOp::ReduceColumns { .. }));
        if self.segmented || columns || !self.space.cols.is_multiple_of(LANES) {
            return None;
        }
        let mut at = Vec::new();
        let mut ops: Vec<Box<[FusedOp]>> = Vec::new();
        let mut first = FirstStage::Fused;
        for (k, s) in list.ops.iter().enumerate() {
            match s {
                TileOp::Bind { .. }
                | TileOp::BindOutput { .. }
                | TileOp::Store { row: true, .. }
                | TileOp::Gather { row: true, .. } => {}
                TileOp::Loop { shape: LoopShape::PerRow, .. } => {}
                TileOp::Loop { out, args, shape: LoopShape::Reduce, round: None, fusable: Some(fusable), .. }
                    if at.is_empty() =>
                {
                    let load = FusedOp { opcode: Opcode::Load, operand: Operand::View(args[0]) };
                    if let Fusable::Max = fusable {
                        first = FirstStage::Max;
                    }
                    ops.push(Box::new([load, FusedOp { opcode: Opcode::Sum, operand: Operand::Sum(0, *out) }]));
                    at.push(k);
                }
                TileOp::Fused { ops: all, shape: LoopShape::Rows, .. } => {
                    ops.push(all[superinstructions::prefetch_len(all)..].into());
                    at.push(k);
                }
                _ => return None,
            }
        }
        let (at, ops): ([usize; 3], [Box<[FusedOp]>; 3]) = (at.try_into().ok()?, ops.try_into().ok()?);
        let nt = ops[2].iter().any(|l| l.opcode == Opcode::StoreNt);
        let kernel = row_pipeline::find(self.isa, first, [&ops[0], &ops[1], &ops[2]]).filter(|_| nt)?;
        let dense = list.ops[..at[0]].iter().filter_map(|s| match s {
            TileOp::Bind { view, stride: RowStride::Dense, .. } => Some(*view),
            _ => None,
        });
        let prefetched: Box<[View]> = dense.take(2).collect();
        if prefetched.is_empty() {
            return None;
        }
        // Ops that are the same for all blocks come first.
        let invariant = |s: &TileOp| matches!(s, TileOp::Bind { stride: RowStride::Zero, .. });
        list.ops[..at[0]].sort_by_key(|s| !invariant(s));
        let count = list.ops[..at[0]].iter().take_while(|s| invariant(s)).count();
        Some(RowPipeline { invariant: count, at, ops, prefetched, kernel })
    }
}
