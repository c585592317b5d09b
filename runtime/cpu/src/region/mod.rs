//! Compiles and runs fused regions on a tile interpreter.
//!
//! A region becomes a few straight-line lists of [`TileOp`]s, each one vector loop over a tile, resolved to a function
//! pointer when the region is compiled. A register is a [`loops::Arg`]: a tile in scratch memory that fits the L1
//! cache, memory itself if a load needs no conversion, or an output that no other register shares. There are two
//! schedules:
//!
//! - rows of at most [`ROWS_LIMIT`] elements run in blocks of whole rows, reductions included (`run::blocks`);
//! - longer rows run in segments, one pass (*phase*) up to each level of row reductions; later phases recompute
//!   registers or read saved ones (`run::segments`). If there are few rows, threads share their chunks phase by phase.
//!
//! A region without reductions is collapsed to rows whose length suits its loads (`collapse`).

mod collapse;
mod compile;
mod fingerprint;
mod load;
mod pack_transposed;
mod row_pipeline;
mod run;
mod tile_op;

use crate::loops::fused_interpreter::FusedOp;
use crate::loops::reduce::Reduction;
use crate::loops::{self, Kernel};
use crate::worker_pool::{SendPtr, WorkerPool};
use load::{Constant, Load};
use tile_op::{Fusable, LoopShape, RowStride, TileOp};

pub use compile::compile;
pub use load::walk;
pub use run::run_many;

/// Maximum length of a row that fits one tile.
const ROWS_LIMIT: usize = 4096;
/// Maximum elements of a tile (unless one row has more); the minimum is `MIN_TILE`.
const MAX_TILE: usize = 4096;
const MIN_TILE: usize = 512;
/// Elements of a block in a row pipeline.
const PIPELINE_TILE: usize = 1536;
/// Total size of the tiles of a region: most of an L1 cache.
const L1_BYTES: usize = 32 << 10;
/// Minimum bytes of a result for non-temporal stores: later readers would miss the caches anyway.
const NT_STORE_BYTES: usize = 8 << 20;
/// Minimum bytes read by a region for prefetches.
const PREFETCH_BYTES: usize = 1 << 17;
/// Minimum work of a kernel, in nanoseconds, for more than one thread.
pub const PARALLEL_NS: f64 = 30_000.0;

/// Tasks of a region per thread. Tasks are no shorter than `TASK_NS` nanoseconds and no longer than eight times that:
/// small tasks balance the load when one thread finishes first.
const TASKS_PER_THREAD: usize = 32;
const TASK_NS: f64 = 2_500.0;

/// The arguments of a program run.
pub struct Context<'a> {
    /// The address of each value of the program.
    pub values: &'a [SendPtr<u8>],
    pub slots: &'a [u64],
    pub pool: &'a WorkerPool,
    /// The other devices of the mesh.
    pub peers: Option<&'a dyn perilune_plan::Peers>,
}

impl Context<'_> {
    /// Where a part of a generated tensor begins: the number in that slot, 0 for a whole tensor.
    pub fn start(&self, slot: Option<u32>) -> u64 {
        slot.map_or(0, |slot| self.slots[slot as usize])
    }
}

/// An iteration space: `batch * rows` rows of `cols` elements.
#[derive(Clone, Copy, Debug)]
struct IterSpace {
    batch: usize,
    rows: usize,
    cols: usize,
}

/// A register: its index in the table of views.
type View = u16;

/// The ops between two levels of row reductions. A region that runs in blocks has one phase.
struct Phase {
    ops: Vec<TileOp>,
    /// The views that are tiles, and their offsets in scratch memory.
    tiles: Vec<(View, usize)>,
    /// The row reductions that this phase feeds.
    reductions: Vec<u16>,
    /// Ops that run once those rows are complete, on one element per row.
    row_ops: Vec<TileOp>,
}

struct RowReduction {
    loops: Reduction,
    out: View,
    size: usize,
    round: Option<Kernel>,
    /// Offsets of its 16 lanes and its total in scratch memory.
    lanes: usize,
    total: usize,
}

struct ColReduction {
    loops: Reduction,
    size: usize,
    round: Option<Kernel>,
    /// Value, element size and loop of each store.
    stores: Vec<(u32, usize, Kernel)>,
}

/// A loop-invariant tile, filled once by each worker.
struct Hoisted {
    view: View,
    at: usize,
    source: HoistedSource,
}

enum HoistedSource {
    /// Every element equals the constant of a view.
    Fill(View, Kernel),
    /// Row 0 of a load, `copies` times; the step of the view is 0 if there is one copy.
    Load(u16, usize),
}

/// Three loops over rows that run as a pipeline, each one block behind the previous loop (`loops::row_pipeline`).
struct RowPipeline {
    /// Number of leading ops that are the same for all blocks.
    invariant: usize,
    /// The indices of the three loops in the phase. The ops before the first only bind memory.
    at: [usize; 3],
    ops: [Box<[FusedOp]>; 3],
    prefetched: Box<[View]>,
    kernel: loops::row_pipeline::PipelineLoop,
}

/// A compiled region.
pub struct Region {
    /// A bool: if it is false, the region stores nothing and is skipped.
    predicate: Option<Constant>,
    space: IterSpace,
    /// Whether rows are split into segments.
    segmented: bool,
    /// Rows of a block (1 if segmented) and elements of a tile.
    block_rows: usize,
    tile: usize,
    views: usize,
    constants: Vec<(View, Constant)>,
    loads: Vec<Load>,
    hoisted: Vec<Hoisted>,
    /// Views with one element per row: element size, and offset in scratch memory unless threads share rows.
    row_views: Vec<(View, usize, usize)>,
    prologue: Vec<TileOp>,
    phases: Vec<Phase>,
    row_reductions: Vec<RowReduction>,
    col_reductions: Vec<ColReduction>,
    pipeline: Option<Box<RowPipeline>>,
    scratch: usize,
    /// Number of registers saved from phase to phase.
    saved: usize,
    /// Estimated nanoseconds of one element.
    cost: f64,
}

impl Region {
    /// Estimated time on one thread, in nanoseconds.
    pub fn work(&self) -> f64 {
        self.cost * (self.space.batch * self.space.rows * self.space.cols) as f64
    }
}
