//! Fixes how an iteration space is cut, and thereby the order of additions, as a function of its shape alone.
//!
//! Rows. A row is cut into chunks of [`CHUNK`] elements, a chunk into blocks of [`BLOCK`] neighbours; block `b` belongs to warp
//! `b % warps(cols)`. Element `s` of each block of a warp accumulates in slot `s`, in order of the blocks, from the identity. The 256
//! slots of a warp reduce in the order of `kernels/device/reduce.cuh`, then the warps in a balanced tree, all in the compute type.
//! Chunk `m` is added to strip `m % 256`, in order, and strips reduce in a balanced tree: f32 in f64.
//!
//! Columns. Rows are cut into chunks, a chunk into `strands`: row `r` of it belongs to strand `r % strands`, which adds in order from
//! the identity, in the compute type. Strands of a chunk combine in order, chunk `k` is added to strip `k % 16`, and strips reduce in a
//! balanced tree: f32 in f64.
//!
//! Where each element lives (registers, one block or several, vectors of which width) is left to the kernels.

use std::cmp::max;

/// Elements of a row that one warp holds side by side.
pub const BLOCK: usize = 256;
/// Elements of a row that fold in the compute type.
pub const CHUNK: usize = 8192;
/// What a thread has of a block.
pub const OCTET: usize = 8;
/// Rows that a strand of a column reduction adds at most.
const STRAND: usize = 256;
/// Chunks that a column reduction is cut into for parallelism: two for each multiprocessor of a large GPU. Half as many where
/// rows are wide enough for blocks beside each other, and where eight rows beside each other, with the sums of their columns,
/// fill a multiprocessor's registers. Constants, so that results do not depend on the GPU.
const COL_CHUNKS: [usize; 2] = [264, 132];
/// Rows of a chunk at least: a partial is written and read again, in eight bytes each, which must not be most of what moves.
const LEAST_ROWS: usize = 16;

/// Lanes that hold a block: fewer than 32 for short rows.
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

/// How a column reduction is cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Columns {
    pub strands: usize,
    /// Rows of a chunk: a multiple of `strands`.
    pub chunk: usize,
    pub chunks: usize,
}

pub fn columns(batch: usize, rows: usize, cols: usize) -> Columns {
    let most = 256 / (lanes(cols) * warps(cols));
    let strands = most.min(rows.div_ceil(2).next_power_of_two());
    let assumed_false = max(1, batch * cols.div_ceil(CHUNK));
    // Enough chunks to fill a GPU, but two rows for each strand; and no more rows than a strand may add.
    let most_chunks = COL_CHUNKS[usize::from(matches!(cols, 513..=1024 | 4097..))];
    let wanted = (most_chunks / assumed_false).min(rows.div_ceil(LEAST_ROWS.max(2 * strands)));
    let chunks = max(wanted, rows.div_ceil(STRAND * strands)).max(1);
    let chunk = rows.div_ceil(chunks).next_multiple_of(strands).max(strands);
    Columns { strands, chunk, chunks: rows.div_ceil(chunk).max(1) }
}
