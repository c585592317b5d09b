//! Partitions an iteration space for reductions, which determines the order of additions, as a function of its shape
//! alone.
//!
//! Rows. A row is partitioned into chunks of [`CHUNK`] elements, and a chunk into blocks of [`BLOCK`] adjacent
//! elements; block `b` belongs to warp `b % warps(cols)`. Element `s` of each block of a warp accumulates in slot `s`,
//! in order of the blocks, from the identity. The 256 slots of a warp reduce in the order of
//! `kernels/device/reduce.cuh`, then the warps in a balanced tree, all in the compute type. Chunk `m` is added to strip
//! `m % 256`, in order, and strips reduce in a balanced tree: f32 in f64.
//!
//! Columns. Rows are partitioned into chunks, and a chunk into `strands`: row `r` of the chunk belongs to strand `r %
//! strands`, which adds in order from the identity, in the compute type. Strands of a chunk combine in order, chunk `k`
//! is added to strip `k % 16`, and strips reduce in a balanced tree: f32 in f64.
//!
//! The kernels decide where each element is stored (in registers, in one block or several, in vectors of which width).

use std::cmp::max;

/// Elements of a row that one warp holds side by side.
pub const BLOCK: usize = 256;
/// Elements of a row that are folded in the compute type.
pub const CHUNK: usize = 8192;
/// Elements of a block per thread.
pub const OCTET: usize = 8;
/// Maximum rows that a strand of a column reduction adds.
const STRAND: usize = 256;
/// Chunks of a column reduction, for parallelism: two for each multiprocessor of a large GPU. The second number applies
/// if rows are wide enough for several adjacent blocks, and if eight adjacent rows with their column sums fill a
/// multiprocessor's registers. They are constants, so that results do not depend on the GPU.
const COL_CHUNKS: [usize; 2] = [264, 132];
/// Minimum rows of a chunk: writing and reading a partial of eight bytes must not dominate the memory traffic.
const LEAST_ROWS: usize = 16;

/// Lanes that hold a block; fewer than 32 for short rows.
pub fn lanes(cols: usize) -> usize {
    cols.div_ceil(OCTET).next_power_of_two().clamp(1, 32)
}

/// Warps that share a chunk.
pub fn warps(cols: usize) -> usize {
    match cols {
        0..=1024 => 1,
        _ => 8,
    }
}

pub fn chunks(cols: usize) -> usize {
    cols.div_ceil(CHUNK)
}

/// The partition of a column reduction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Columns {
    pub strands: usize,
    /// Rows per chunk: a multiple of `strands`.
    pub chunk: usize,
    pub chunks: usize,
}

pub fn columns(batch: usize, rows: usize, cols: usize) -> Columns {
    let most = 256 / (lanes(cols) * warps(cols));
    let strands = most.min(rows.div_ceil(2).next_power_of_two());
    let units = max(1, batch * cols.div_ceil(CHUNK));
    // Enough chunks to fill a GPU, but at least two rows per strand, and at most as many rows as a strand may add.
    let most_chunks = COL_CHUNKS[usize::from(matches!(cols, 513..=1024 | 4097..))];
    let wanted = (most_chunks / units).min(rows.div_ceil(LEAST_ROWS.max(2 * strands)));
    let chunks = max(wanted, rows.div_ceil(STRAND * strands)).max(1);
    let chunk = rows.div_ceil(chunks).next_multiple_of(strands).max(strands);
    Columns { strands, chunk, chunks: rows.div_ceil(chunk).max(1) }
}
