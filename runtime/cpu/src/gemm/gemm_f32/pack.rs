//! Packs GEMM operands into contiguous panels.

use super::MatrixView;
use super::partition::{CHUNK, Partition, ROWS, RowTiles, chunk};
use crate::gemm::microkernel::Microkernels;
use crate::gemm::{BatchedMatrix, GemmShape};
use crate::library::Call;
use crate::worker_pool::{SendPtr, TaskQueue};
use std::mem::MaybeUninit;

/// Minimum columns for which packing the left operand is profitable.
const PACK_COLS: usize = 256;
/// Rows at a multiple of this distance share lines of the L1 cache.
const ALIASED: usize = 1024;

/// Whether packing the left operand is profitable: many columns use it, and the addresses of its rows map to few cache
/// sets.
pub fn pack_pays(s: GemmShape, a: &BatchedMatrix<f32>) -> bool {
    let apart = (a.rows.unsigned_abs()).max(a.cols.unsigned_abs());
    s.n >= PACK_COLS && s.m >= ROWS && s.k >= CHUNK && apart.is_multiple_of(ALIASED)
}

/// Packs the left operand by tiles and chunks. The elements of one step are adjacent.
pub fn pack_left(c: &Call, t: &Microkernels, s: GemmShape, partition: &Partition, a: MatrixView, to: &mut [f32]) {
    let (tallest, chunk, to) = (t.tallest(t.by_size.len()), chunk(s.k), SendPtr(to.as_mut_ptr()));
    let tiles = partition.rows.div_ceil(tallest);
    c.pool().run(c.parallel(), partition.row_parts * tiles, |tasks: &TaskQueue| {
        let to = &to;
        while let Some(task) = tasks.claim() {
            let (first, tile) = (task / tiles * partition.rows, task % tiles);
            let row_tiles = RowTiles::new(partition.rows.min(s.m - first), tallest);
            if tile >= row_tiles.tiles {
                continue;
            }
            let (i, rows) = row_tiles.tile(tile);
            let from = a.from(first + i, 0);
            for p in (0..s.k).step_by(chunk) {
                // The chunk with its steps as rows, as in the right operand.
                let part = MatrixView { at: from.from(0, p).at, rows: from.cols, cols: from.rows };
                let len = chunk.min(s.k - p);
                // SAFETY: the rows are those of the left operand, and only this task writes their part of `to`.
                unsafe { pack_rows(t, part, len, rows, to.0.add((first + i) * s.k + p * rows), rows) };
            }
        }
    });
}

/// Copies `len` rows of `cols` columns to contiguous rows of `width`, padded with zeros.
///
/// # Safety
/// The rows must be readable, and `to` valid for `len * width` elements.
pub unsafe fn pack_rows(t: &Microkernels, from: MatrixView, len: usize, cols: usize, to: *mut f32, width: usize) {
    // SAFETY: guaranteed by the caller, in the whole function.
    unsafe {
        if cols < width {
            std::slice::from_raw_parts_mut(to.cast::<MaybeUninit<f32>>(), len * width).fill(MaybeUninit::new(0.0));
        }
        if from.cols == 1 {
            return (t.rows)(from.at, from.rows, (len, cols), to, width);
        }
        let (mut whole_p, mut whole_j) = (0, 0);
        if let (1, Some(transpose)) = (from.rows, t.transpose) {
            (whole_p, whole_j) = (len / 16 * 16, cols);
            for p in (0..whole_p).step_by(16) {
                for j in (0..cols).step_by(16) {
                    transpose(from.from(p, j).at, from.cols, 16.min(cols - j), to.add(p * width + j), width);
                }
            }
        }
        for j in 0..cols {
            for p in if j < whole_j { whole_p } else { 0 }..len {
                *to.add(p * width + j) = *from.from(p, j).at;
            }
        }
    }
}
