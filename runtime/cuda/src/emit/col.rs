//! Emits column reductions.
//!
//! A warp, or part of one, processes a tile of columns. Strands process interleaved rows, and chunks of rows go to
//! different blocks. The partial results of chunks are stored in the workspace, and a second launch combines them.

use super::emitter::Emitter;
use super::expr;
use super::launch_template::LaunchTemplate;
use super::loop_nest::{Indexing, LoopNest};
use super::row::row_vector_width;
use super::split_row::{Saved, alloc_scratch, load_saved};
use super::writer::Writer;
use crate::schedule::reduction_order::{self, Columns, OCTET};
use crate::schedule::region_analysis::RegionAnalysis;
use perilune_core::DType;
use perilune_plan::ir::{Code, Level};
use std::collections::BTreeSet;

const THREADS: usize = 256;
const STRIPS: usize = 16;
/// Packs that a thread loads before it uses the first one: this many loads in flight saturate the memory bandwidth.
const AHEAD: usize = 8;

/// Emits the column reductions of a region, and the full stores that have not been emitted.
pub fn lower(analysis: &RegionAnalysis, stores: &[usize], saved: &Saved, scratch: &mut usize) -> Vec<LaunchTemplate> {
    let r = analysis.region;
    let cut = reduction_order::columns(r.batch, r.rows, r.cols);
    let feeds: Vec<usize> =
        analysis.needed().into_iter().filter(|i| matches!(analysis.code(*i), Code::ReduceCol(..))).collect();
    let lanes = reduction_order::lanes(r.cols);
    let roots = feeds.iter().copied().chain(stores.iter().map(|k| r.stores[*k].0 as usize));
    let set = super::split_row::dependencies(analysis, roots);
    let v = row_vector_width(analysis, &set);
    let width = lanes * OCTET;
    let tiles = r.cols.div_ceil(width);
    // Adjacent tiles in a block of threads, with the same number in each block where possible.
    let units = r.batch * tiles;
    let groups = units.div_ceil(THREADS / (lanes * cut.strands));
    let beside = units.div_ceil(groups);
    let threads = (beside * lanes * cut.strands).next_multiple_of(32);
    let joins = cut.chunks > 1;
    let cells: Vec<usize> = if joins {
        feeds.iter().map(|_| alloc_scratch(scratch, cut.chunks * r.batch * r.cols * 8)).collect()
    } else {
        vec![]
    };

    let mut g = Emitter::new(analysis, Some(r.cols), v);
    let t = g.position();
    g.declare("batch", r.batch);
    g.declare("rows", r.rows);
    g.declare("cols", r.cols);
    g.declare("tiles", tiles);
    g.declare("groups", groups);
    g.declare("chunk_rows", cut.chunk);
    let strands = cut.strands;
    g.prologue(&set);
    g.text.line(format!("const u32 lane = threadIdx.x % {lanes}, part = threadIdx.x / {lanes};"));
    g.text.line(format!("const u32 strand = part % {strands}, beside = part / {strands};"));
    g.text.line(format!("const {t} chunk = block / groups, unit = (block - chunk * groups) * {beside} + beside;"));
    g.text.line(format!("const bool live = beside < {beside} && unit < batch * tiles;"));
    g.text.line(format!("const {t} b = live ? unit / tiles : 0, tile = live ? unit - b * tiles : 0;"));
    g.text.line(format!("const {t} origin = tile * {width} + lane * {v}, limit = live ? cols : 0;"));
    g.text.line(format!("const {t} stop = (chunk + 1) * chunk_rows < rows ? (chunk + 1) * chunk_rows : rows;"));
    g.partials(&feeds);
    // Rows of a strand that are loaded together. If maps are computed and stored too, arithmetic takes as long as
    // memory access, and more concurrent threads achieve more than longer ones.
    let stored = |i: &&usize| matches!(analysis.code(**i), Code::Load { source, .. } if source.value().is_some());
    let loads: Vec<usize> = set.iter().filter(|i| stored(i) && analysis.level(**i) == Level::Full).copied().collect();
    let small = loads.iter().all(|i| g.dtype(*i).size() <= 2);
    let runs = OCTET / v;
    let together = if stores.is_empty() { (AHEAD / (loads.len().max(1) * runs)).clamp(1, AHEAD) } else { 1 };
    let row_step = strands;
    // The next row is loaded to registers while the current one is processed.
    let early = together == 1 && small && loads.len() <= 2 && loads.iter().all(|i| g.can_stage(*i));
    let row = Indexing {
        decl: g.walked(t, format!("origin + k * {}", lanes * v), false),
        guard: "at < limit".into(),
        partial: false,
        full: false,
        columns: OCTET,
    };
    let ask = |g: &mut Emitter, y: &str| {
        g.text.open(format!("if ({y} < stop)"));
        g.text.line(format!("const {t} ahead = b * rows + {y};"));
        g.row_begin("ahead", "f");
        g.prefetch_words(runs, &row, "f");
        g.text.close();
    };
    if early {
        g.declare_prefetch(&loads, runs);
        ask(&mut g, "chunk * chunk_rows + strand");
    } else if together == 1 {
        g.text.line("#pragma unroll 2");
    }
    g.text.open(format!("for ({t} y = chunk * chunk_rows + strand; y < stop; y += {})", together * row_step));
    if early {
        g.unpack_words_now(runs);
        ask(&mut g, &format!("y + {row_step}"));
    }
    let mut decl =
        vec![format!("const {t} down = y + k / {runs} * {row_step}, row = b * rows + (down < stop ? down : y);")];
    decl.extend(g.walked(t, format!("origin + k % {runs} * {}", lanes * v), g.ragged()));
    decl.extend(Writer::aside(
        &mut g,
        |g| &mut g.text,
        |g| {
            g.row_start(&set);
            load_saved(g, &set, saved);
        },
    ));
    let guard = if together == 1 { "at < limit" } else { "at < limit && down < stop" };
    let full = together == 1 && r.cols.is_multiple_of(width);
    let indexing = Indexing { decl, guard: guard.into(), partial: g.ragged(), full, columns: OCTET };
    let none = BTreeSet::new();
    let packs = together * runs;
    let live_in = if early { loads.iter().copied().collect() } else { BTreeSet::new() };
    g.loop_nest(&LoopNest {
        packs,
        indexing: &indexing,
        live_in: &live_in,
        live_out: &none,
        feeds: &feeds,
        stores,
        assumed_false: &none,
    });
    g.text.close();
    for (n, &i) in feeds.iter().enumerate() {
        finish(&mut g, i, (strands, lanes, threads), cells.get(n).copied(), n == 0);
    }
    let stage = g.template("col", groups * cut.chunks, threads, if early { threads } else { THREADS });
    // Other warps hide the arithmetic, so use as many as the registers allow.
    let resident = if together == 1 && small && loads.len() <= 2 { 4 } else { 2 };
    let mut out = vec![LaunchTemplate { resident, ..stage }];
    if joins {
        out.push(combine(analysis, &feeds, &cells, cut));
    }
    out
}

/// Combines the strands of a chunk, and stores the result, or a partial result in the workspace.
fn finish(
    g: &mut Emitter,
    i: usize,
    (strands, lanes, threads): (usize, usize, usize),
    cells: Option<usize>,
    first: bool,
) {
    let (d, f, v, t) = (g.dtype(i), expr::functor(g.reduction(i)), g.v, g.position());
    let (c, wide) = (expr::computed(d), expr::wide(d));
    let id = expr::identity(g.reduction(i), d);
    if strands > 1 {
        if first {
            g.text.line(format!("__shared__ u64 shared[{OCTET} * {threads}];"));
        } else {
            g.text.line("__syncthreads();");
        }
        g.text.line(format!("{c}* const strands{i} = ({c}*)shared;"));
        g.text.line("#pragma unroll");
        g.text.line(format!("for (int k = 0; k < {OCTET}; k++) strands{i}[k * {threads} + threadIdx.x] = a{i}[k];"));
        g.text.line("__syncthreads();");
        // Each strand's thread combines some of the eight columns.
        g.text.open(format!("for (u32 k = strand; k < {OCTET}; k += {strands})"));
        g.text.line(format!("{wide} total = {id};"));
        g.text.line("#pragma unroll 8");
        g.text.line(format!("for (int s = 0; s < {strands}; s++)"));
        g.text.line(format!(
            "    total = {f}::combine(total, ({wide})strands{i}[k * {threads} + (beside * {strands} + s) * {lanes} + lane]);"
        ));
    } else {
        g.text.unrolled("k", OCTET);
        g.text.line(format!("const {wide} total = {f}::combine(({wide}){id}, ({wide})a{i}[k]);"));
    }
    g.text.line(format!("const {t} at = origin + k / {v} * {} + k % {v};", lanes * v));
    match cells {
        Some(at) => {
            let cells = g.cells(cell(d, strands), at);
            g.text.line(format!("if (at < limit) {cells}[(chunk * batch + b) * cols + at] = total;"));
        }
        None => {
            g.text.open("if (at < limit)");
            let x = expr::rounded(d, format!("({c})total"));
            g.text.line(format!("const {c} result = {x};"));
            col_stores(g, i, "b * cols + at");
            g.text.close();
        }
    }
    g.text.close();
}

pub fn col_stores(g: &mut Emitter, i: usize, at: &str) {
    let stores: Vec<usize> = g.analysis.stores(Level::Col).collect();
    for k in stores {
        let (reg, value) = g.analysis.region.stores[k];
        if reg as usize == i {
            let pointer = g.fields.pointer(value, expr::stored(g.dtype(i)));
            g.text.line(format!("narrow({pointer}[{at}], result);"));
        }
    }
}

/// The type of a chunk's partial in the workspace. A single strand keeps its compute type.
pub fn cell(d: DType, strands: usize) -> &'static str {
    if strands == 1 { expr::computed(d) } else { expr::wide(d) }
}

/// Columns of one reduction per block of the second launch.
const JOINED: usize = 16;

/// Adds up the partials of chunks, with separate blocks for each reduction. There is little work, so the number of
/// loads in flight determines the time.
pub fn combine(analysis: &RegionAnalysis, feeds: &[usize], cells: &[usize], cut: Columns) -> LaunchTemplate {
    let r = analysis.region;
    let mut g = Emitter::new(analysis, Some(r.cols), 1);
    let t = g.position();
    let tiles = (r.batch * r.cols).div_ceil(JOINED);
    g.declare("chunks", cut.chunks);
    g.declare("total_cols", r.batch * r.cols);
    g.declare("tiles", tiles);
    g.text.line(format!("const u32 x = threadIdx.x % {JOINED}, strip = threadIdx.x / {JOINED};"));
    g.text.line(format!("const {t} which = block / tiles, at = (block - which * tiles) * {JOINED} + x;"));
    for (n, (&i, &cell)) in feeds.iter().zip(cells).enumerate() {
        let (d, f) = (g.dtype(i), expr::functor(g.reduction(i)));
        let (c, wide) = (expr::computed(d), expr::wide(d));
        let (cells, id) = (g.cells(self::cell(d, cut.strands), cell), expr::identity(g.reduction(i), d));
        g.text.open(format!("if (which == {n})"));
        g.text.line(format!("__shared__ {wide} strips{i}[{STRIPS}][{JOINED}];"));
        g.text.line(format!("{wide} t{i} = {id};"));
        g.text.open("if (at < total_cols)");
        g.text.line(format!("#pragma unroll {STRIPS}"));
        g.text.line(format!(
            "for ({t} m = strip; m < chunks; m += {STRIPS}) t{i} = {f}::combine(t{i}, ({wide}){cells}[m * total_cols + at]);"
        ));
        g.text.close();
        g.text.line(format!("strips{i}[strip][x] = t{i};"));
        g.text.line("__syncthreads();");
        g.text.open("if (strip == 0 && at < total_cols)");
        g.text.line(format!("{wide} part[{STRIPS}];"));
        g.text.line("#pragma unroll");
        g.text.line(format!("for (int s = 0; s < {STRIPS}; s++) part[s] = strips{i}[s][x];"));
        let x = expr::rounded(d, format!("({c})reduce_warps<{f}, {STRIPS}>(part)"));
        g.text.line(format!("const {c} result = {x};"));
        col_stores(&mut g, i, "at");
        g.text.close();
        g.text.close();
    }
    let threads = JOINED * STRIPS;
    g.template("col_combine", feeds.len() * tiles, threads, threads)
}
