//! Declares the instruction set of the tile interpreter.

use super::View;
use crate::loops::Kernel;
use crate::loops::fused_interpreter::{FusedLoop, FusedOp};
use crate::loops::map::RowBroadcast;
use perilune_core::ops::elementwise::MapFn;

/// What the fused interpreter can compute instead of a loop, all in f32.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fusable {
    Map(MapFn, RowBroadcast),
    /// The sum of a row.
    Sum,
    /// The maximum of a row; only the first stage of a row pipeline computes it.
    Max,
}

/// The elements that a loop covers in a block of `k` rows and `w` columns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LoopShape {
    /// `k * w` elements in one run.
    Flat,
    /// `k` rows of `w` elements.
    Rows,
    /// `k` elements, one per row.
    PerRow,
    /// `k` rows of `w` elements, reduced to `k` elements.
    Reduce,
}

/// The row stride of a block in memory.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum RowStride {
    /// The row length: elements in iteration order.
    Dense,
    /// Zero: every row is the same.
    Zero,
    /// That many elements.
    Elements(isize),
}

/// An instruction of the tile interpreter.
pub(super) enum TileOp {
    /// Binds a register to memory: `offset` elements into a value.
    Bind { view: View, value: u32, offset: isize, size: u8, stride: RowStride },
    /// Loads through a layout or from a generator, into a tile or (if `row`) as one element per row.
    Gather { view: View, load: u16, row: bool },
    /// Binds a register to the memory that holds it from phase to phase, a whole row long.
    BindSaved { view: View, slot: u16, size: u8 },
    /// Binds a result directly to its output.
    BindOutput { view: View, value: u32, size: u8 },
    /// Runs a loop, then rounds its result.
    Loop {
        kernel: Kernel,
        out: View,
        args: [View; 3],
        shape: LoopShape,
        round: Option<Kernel>,
        /// What the loop computes, if the fused interpreter can replace it.
        fusable: Option<Fusable>,
    },
    /// Runs several f32 functions at once (`loops::fused_interpreter`).
    Fused { kernel: FusedLoop, ops: Box<[FusedOp]>, shape: LoopShape },
    /// Accumulates a segment of a row in the lanes of a row reduction.
    ReduceLanes { view: View, reduction: u16 },
    /// Accumulates rows in the partial of a column reduction.
    ReduceColumns { view: View, reduction: u16 },
    /// Converts a register to the dtype of a value and stores it.
    Store { view: View, value: u32, size: u8, kernel: Kernel, row: bool },
}
