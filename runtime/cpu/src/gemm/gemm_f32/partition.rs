//! Partitions a batch of products into tasks and tiles. The length of a chunk of K determines the bits; everything else
//! here affects only speed.

use crate::gemm::GemmShape;

/// Steps of K that are summed before they are added to the result.
pub const CHUNK: usize = 256;
/// Maximum columns of a task: one tile or more on any instruction set.
const COLS: usize = 64;
/// Minimum rows of a task: enough reuse to make packing the right operand profitable.
pub const ROWS: usize = 48;
/// Minimum multiply-adds of a task.
const OPS: usize = 1 << 18;
/// Elements of the packed left operand that one task uses.
const PACKED_PART: usize = 1 << 18;
/// Where the last task of a thread is split, in eighths of its tiles: a thread that finishes first takes parts of another
/// thread's last task, so these parts are small.
const TAIL: [usize; 5] = [0, 4, 6, 7, 8];
/// The number of split points.
const TAIL_CUTS: usize = TAIL.len() - 2;
/// All tiles of a task, in eighths.
pub const WHOLE: usize = TAIL[TAIL_CUTS + 1];

/// The length of a chunk.
pub fn chunk(k: usize) -> usize {
    k.div_ceil(k.div_ceil(CHUNK)).next_multiple_of(16)
}

/// Columns of a task: about equal for all tasks, in whole vectors.
fn columns(n: usize) -> usize {
    n.div_ceil(n.div_ceil(COLS)).next_multiple_of(16)
}

/// The tasks of a batch of products.
pub struct Partition {
    pub rows: usize,
    pub cols: usize,
    pub row_parts: usize,
    col_parts: usize,
    /// Whole products in a task, if products are not split.
    pub group: usize,
    /// Whether consecutive tasks share rows instead of columns.
    by_rows: bool,
    /// Number of threads whose last tasks are split again; 0 if none are.
    tails: usize,
}

impl Partition {
    pub fn new(s: GemmShape, threads: usize) -> Partition {
        let target = 4 * threads;
        let ops = s.m * s.n * s.k;
        let by_rows = s.m >= s.n;
        if s.batch >= target || ops < 2 * OPS || threads == 1 {
            let group = (OPS / ops).clamp(1, s.batch.div_ceil(target).max(1));
            return Partition { rows: s.m, cols: s.n, row_parts: 1, col_parts: 1, group, by_rows, tails: 0 };
        }
        let col_parts = s.n.div_ceil(COLS);
        let most = s.m.div_ceil(ROWS).min(ops / (col_parts * OPS)).max(1);
        // Use few parts, because each packs its columns of the right operand. Splitting the last tasks restores the
        // balance.
        let row_parts = (2 * threads).div_ceil(s.batch * col_parts).max(if by_rows { threads } else { 1 });
        let rows = s.m.div_ceil(row_parts.min(most));
        let partition = Partition {
            rows,
            cols: columns(s.n),
            row_parts: s.m.div_ceil(rows),
            col_parts,
            group: 1,
            by_rows,
            tails: 0,
        };
        partition.with_tails(s, threads)
    }

    /// Partitions for a packed left operand: the rows of a task stay in the L2 cache from task to task.
    pub fn packed(s: GemmShape, threads: usize) -> Partition {
        let parts = s.m.div_ceil((PACKED_PART / s.k).max(ROWS)).max(threads).min(s.m.div_ceil(ROWS));
        let rows = s.m.div_ceil(parts);
        let (row_parts, col_parts) = (s.m.div_ceil(rows), s.n.div_ceil(COLS));
        let partition = Partition { rows, cols: columns(s.n), row_parts, col_parts, group: 1, by_rows: true, tails: 0 };
        partition.with_tails(s, threads)
    }

    fn with_tails(self, s: GemmShape, threads: usize) -> Partition {
        let pays = threads > 1 && self.count(s.batch) >= threads && self.rows * self.cols * s.k >= 4 * OPS;
        Partition { tails: if pays { threads } else { 0 }, ..self }
    }

    /// Returns the number of tasks.
    pub fn count(&self, batch: usize) -> usize {
        batch.div_ceil(self.group) * self.row_parts * self.col_parts
    }

    /// Returns the number of tasks when the last task of each thread's part (`TaskQueue`) is split.
    pub fn parts(&self, batch: usize) -> usize {
        self.count(batch) + self.tails * TAIL_CUTS
    }

    /// The task that a part belongs to, and the part's range of tiles in eighths.
    pub fn task_of(&self, v: usize, batch: usize) -> (usize, usize, usize) {
        let start = |k: usize| self.count(batch) * k / self.tails + k * TAIL_CUTS;
        match (0..self.tails).rev().find(|k| start(*k) <= v) {
            Some(k) => {
                let (task, end) = (v - k * TAIL_CUTS, start(k + 1) - k * TAIL_CUTS - TAIL_CUTS);
                let split = (task + 1).saturating_sub(end);
                if task + 1 < end { (task, 0, WHOLE) } else { (end - 1, TAIL[split], TAIL[split + 1]) }
            }
            None => (v, 0, WHOLE),
        }
    }

    /// Matrix, row part and column part of a task. For a group, the matrix is its first.
    pub fn block_of(&self, t: usize) -> (usize, usize, usize) {
        let (k, t) = (t / (self.row_parts * self.col_parts), t % (self.row_parts * self.col_parts));
        let (i, j) = if self.by_rows {
            (t / self.col_parts, t % self.col_parts)
        } else {
            (t % self.row_parts, t / self.row_parts)
        };
        (k * self.group, i, j)
    }
}

/// The tiles of `m` rows, of about equal height.
#[derive(Clone, Copy)]
pub struct RowTiles {
    pub tiles: usize,
    /// Rows of a tile, and the number of leading tiles with one more row.
    low: usize,
    more: usize,
}

impl RowTiles {
    pub fn new(m: usize, tallest: usize) -> RowTiles {
        let tiles = m.div_ceil(tallest);
        RowTiles { tiles, low: m / tiles, more: m % tiles }
    }

    /// First row and number of rows of a tile.
    pub fn tile(self, t: usize) -> (usize, usize) {
        (t * self.low + t.min(self.more), self.low + usize::from(t < self.more))
    }
}
