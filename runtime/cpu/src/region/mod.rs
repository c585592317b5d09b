//! Fused regions on a tile interpreter.
//!
//! A region becomes a few straight-line lists of [`Step`]s: each is one vector loop over a tile, resolved to a function
//! pointer when the region is compiled. A register is a [`loops::Arg`]: a tile in a scratch area that fits L1, or memory
//! itself where a load needs no conversion, or an output where nothing else lives there. Two ways through the space:
//!
//! - rows of at most [`ROWS_LIMIT`] elements go in blocks of whole rows, reductions included (`run::blocks`);
//! - longer rows go in segments, one pass (*phase*) up to each level of row reductions; later phases compute again what
//!   they need (`run::segments`). If rows are few, their chunks are shared among threads, phase by phase.
//!
//! A region without reductions is cut into rows as suits its loads.

mod compile;
mod grid;
mod load;
mod panel;
mod relay;
mod run;

use crate::loops::chain::{Chain, Link};
use crate::loops::map::Still;
use crate::loops::reduce::Reduction;
use crate::loops::{self, Kernel};
use crate::worker_pool::{SendPtr, WorkerPool};
use load::{Constant, Load};
use perilune_core::ops::elementwise::MapFn;

pub use compile::compile;
pub use load::walk;
pub use run::run_many;

/// Longest row that is held in one tile.
const ROWS_LIMIT: usize = 4096;
/// Tiles have at most this many elements (unless one row has more), and at least `MIN_TILE`.
const MAX_TILE: usize = 4096;
const MIN_TILE: usize = 512;
/// Elements of a block of a relay.
const RELAY_TILE: usize = 1536;
/// What the tiles of a region may take together: most of an L1 cache.
const L1_BYTES: usize = 32 << 10;
/// Results of at least this many bytes are written past the caches: whoever reads them next would hardly find them there.
const STREAM_BYTES: usize = 8 << 20;
/// Regions that read at least this many bytes ask for memory ahead of time.
const READ_AHEAD_BYTES: usize = 1 << 17;
/// Work, in nanoseconds, below which other threads are not asked.
pub const PARALLEL_NS: f64 = 30_000.0;

/// Pieces of a region that each thread finds, unless they would be shorter than `PIECE_NS` nanoseconds or longer than eight
/// times that: who is through first takes of the others', and what is left then should be little.
const PIECES: usize = 32;
const PIECE_NS: f64 = 2_500.0;

/// What a run of a program offers its kernels.
pub struct Context<'a> {
    /// Where each value of the program lies.
    pub values: &'a [SendPtr<u8>],
    pub slots: &'a [u64],
    pub pool: &'a WorkerPool,
}

/// The iteration space as it is walked: `batch * rows` rows of `cols` elements.
#[derive(Clone, Copy, Debug)]
struct Grid {
    batch: usize,
    rows: usize,
    cols: usize,
}

/// A register: its place in the table of views.
type View = u16;

/// What a chain can compute instead of a loop: all of it in f32.
#[derive(Clone, Copy, Debug)]
enum Linked {
    Map(MapFn, Still),
    /// The sum of a row.
    Sum,
    /// The largest of a row: no chain takes it, but a relay does.
    Max,
}

/// How far a loop goes within a block of `k` rows and `w` columns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Form {
    /// `k * w` elements in one run.
    Flat,
    /// `k` rows of `w` elements.
    Rows,
    /// `k` elements: one a row.
    Row,
    /// `k` rows of `w` elements to `k` elements.
    Reduce,
}

/// Where in memory a row of a block begins.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Place {
    /// In the order of the space.
    Dense,
    /// The same for every row.
    Col,
    /// Rows this many elements apart.
    Rows(isize),
}

enum Step {
    /// A register that is memory: `offset` elements into a value.
    Bind {
        view: View,
        value: u32,
        offset: isize,
        size: u8,
        place: Place,
    },
    /// A load through a layout or from a generator, into a tile or (`row`) one element a row.
    Fetch {
        view: View,
        load: u16,
        row: bool,
    },
    /// A register that one phase computes and later ones read, a row long.
    Kept {
        view: View,
        slot: u16,
        size: u8,
    },
    /// A result that goes straight to its output.
    Out {
        view: View,
        value: u32,
        size: u8,
    },
    Run {
        kernel: Kernel,
        out: View,
        args: [View; 3],
        form: Form,
        round: Option<Kernel>,
        /// What it computes, where a chain may take the step's place.
        link: Option<Linked>,
    },
    /// Several f32 functions at once (`loops::chain`).
    Chain {
        kernel: Chain,
        links: Box<[Link]>,
        form: Form,
    },
    /// A piece of a row into the lanes of a row reduction.
    Lanes {
        view: View,
        reduction: u16,
    },
    /// Rows into the partial of a column reduction.
    Columns {
        view: View,
        reduction: u16,
    },
    Store {
        view: View,
        value: u32,
        size: u8,
        kernel: Kernel,
        row: bool,
    },
}

/// The steps between two levels of row reductions. A region in blocks has one phase.
struct Phase {
    steps: Vec<Step>,
    /// Which views are tiles, and where in the scratch area.
    tiles: Vec<(View, usize)>,
    /// The row reductions that this phase feeds.
    reductions: Vec<u16>,
    /// What follows once their rows are complete, one element a row.
    row_steps: Vec<Step>,
}

struct RowReduction {
    loops: Reduction,
    out: View,
    size: usize,
    round: Option<Kernel>,
    /// Where its 16 lanes and its total lie in the scratch area.
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

/// A tile that does not depend on the block: filled once by each worker.
struct Hoisted {
    view: View,
    at: usize,
    what: HoistedKind,
}

enum HoistedKind {
    /// All elements equal to a constant's view.
    Fill(View, Kernel),
    /// Row 0 of a load, `copies` times; the step of the view is 0 if there is one copy.
    Load(u16, usize),
}

/// Three loops over the rows of a block that can run as one, each a block behind the one before it (`loops::relay`).
struct Relay {
    /// Where the steps begin that differ from block to block.
    from: usize,
    /// Which steps of the phase they are. The steps before the first only point at memory.
    at: [usize; 3],
    links: [Box<[Link]>; 3],
    asks: Box<[View]>,
    kernel: loops::relay::Relay,
}

/// A compiled region.
pub struct Region {
    /// One bool: where it is false, nothing is stored, and so nothing need be computed.
    guard: Option<Constant>,
    grid: Grid,
    /// Whether rows are cut into segments.
    segmented: bool,
    /// Rows of a block (1 if segmented) and elements of a tile.
    block_rows: usize,
    tile: usize,
    views: usize,
    constants: Vec<(View, Constant)>,
    loads: Vec<Load>,
    hoisted: Vec<Hoisted>,
    /// Views of one element a row: element size, and where in the scratch area unless rows are shared by phases.
    row_views: Vec<(View, usize, usize)>,
    before: Vec<Step>,
    phases: Vec<Phase>,
    row_reductions: Vec<RowReduction>,
    col_reductions: Vec<ColReduction>,
    relay: Option<Box<Relay>>,
    scratch: usize,
    /// How many registers are kept from phase to phase.
    kept: usize,
    /// Estimated nanoseconds of one element.
    cost: f64,
}

impl Region {
    /// Estimated time on one thread, in nanoseconds.
    pub fn work(&self) -> f64 {
        self.cost * (self.grid.batch * self.grid.rows * self.grid.cols) as f64
    }
}
