//! Emits row reductions split over several blocks: few long rows, or rows of many regions in one launch.
//!
//! Each block processes a chunk of a row. For each level of reductions, one launch stores partial results of the chunks
//! in the workspace and another combines them; a last launch computes the elementwise results. Each launch reads
//! earlier reductions from the workspace and recomputes per-row maps. The number of warps per chunk is a kernel
//! parameter, so that rows of all lengths share the text.

use super::emitter::Emitter;
use super::expr;
use super::launch_template::{LaunchTemplate, ParamValue};
use super::loop_nest::{Indexing, LoopNest};
use super::row::{passes, row_vector_width};
use crate::schedule::reduction_order::{self, BLOCK, CHUNK, OCTET};
use crate::schedule::region_analysis::RegionAnalysis;
use perilune_plan::ir::{Code, Level};
use std::collections::{BTreeSet, HashMap};

const THREADS: usize = 256;
/// Bytes of a partial or total in the workspace.
const CELL: usize = 8;

/// Allocates workspace at `scratch`; returns its start.
pub fn alloc_scratch(scratch: &mut usize, nbytes: usize) -> usize {
    let at = *scratch;
    *scratch = (at + nbytes).next_multiple_of(256);
    at
}

/// The offset of the `n`-th saved result after byte `at`, each with `rows` rows.
pub fn cell(at: usize, n: usize, rows: usize) -> usize {
    at + n * (rows * CELL).next_multiple_of(256)
}

impl Emitter<'_> {
    /// The address of the workspace at byte `at`, as cells of a type.
    pub fn cells(&mut self, ctype: &str, at: usize) -> String {
        self.scratch = true;
        let at = self.fields.number("z", ParamValue::I64(at as i64));
        format!("(({ctype}*)(scratch + {at}))")
    }

    /// Stores the results of row reductions in `set` to the workspace, ordered as in `set`, for other launches.
    pub fn save(&mut self, set: &BTreeSet<usize>, rows: usize, scratch: &mut usize, leader: &str) {
        if set.is_empty() {
            return;
        }
        self.text.open(format!("if (live && {leader})"));
        for &i in set {
            let cells = self.cells(expr::computed(self.dtype(i)), alloc_scratch(scratch, rows * CELL));
            self.text.line(format!("{cells}[row] = r{i};"));
        }
        self.text.close();
    }
}

/// The workspace offsets of saved row reductions.
pub type Saved = HashMap<usize, usize>;

/// Loads the saved results that `set` needs, and computes its maps over rows.
pub fn load_saved(g: &mut Emitter, set: &BTreeSet<usize>, saved: &Saved) {
    let depth = set.iter().map(|i| g.analysis.depth[*i]).max().unwrap_or(0);
    for d in 0..=depth {
        for &i in set.iter().filter(|i| g.analysis.depth[**i] == d) {
            if let (Code::ReduceRow(..), Some(&at)) = (g.analysis.code(i), saved.get(&i)) {
                let c = expr::computed(g.dtype(i));
                let cells = g.cells(c, at);
                g.text.line(format!("const {c} r{i} = {cells}[row];"));
            }
        }
        g.row_maps(set, d);
    }
}

/// The instructions that `roots` depend on, up to saved reductions.
pub fn dependencies(analysis: &RegionAnalysis, roots: impl IntoIterator<Item = usize>) -> BTreeSet<usize> {
    analysis.closure(roots, |i| matches!(analysis.code(i), Code::ReduceRow(..)))
}

pub fn lower(analysis: &RegionAnalysis, live_out: &BTreeSet<usize>, scratch: &mut usize) -> Vec<LaunchTemplate> {
    let r = analysis.region;
    let (rows, cols) = (r.batch * r.rows, r.cols);
    let chunks = reduction_order::chunks(cols);
    let passes = passes(analysis);
    let v = row_vector_width(analysis, &analysis.needed());
    // The caller's results come first and in order: see `Emitter::save`.
    let mut saved = Saved::new();
    for &i in live_out {
        saved.insert(i, alloc_scratch(scratch, rows * CELL));
    }
    for i in analysis.needed() {
        if matches!(analysis.code(i), Code::ReduceRow(..)) && !saved.contains_key(&i) {
            saved.insert(i, alloc_scratch(scratch, rows * CELL));
        }
    }
    let full: Vec<usize> = analysis.full_stores().collect();
    let row_values: Vec<usize> = analysis.stores(Level::Row).map(|k| r.stores[k].0 as usize).collect();
    let mut out = Vec::new();
    for (d, feeds) in passes.feeds.iter().enumerate() {
        if feeds.is_empty() {
            continue;
        }
        let partials: Vec<usize> = feeds.iter().map(|_| alloc_scratch(scratch, rows * chunks * CELL)).collect();
        out.push(partial(analysis, &saved, feeds, &partials, v));
        let last = passes.feeds[d + 1..].iter().all(Vec::is_empty) && full.is_empty();
        out.push(combine(analysis, &saved, feeds, &partials, last));
    }
    if !full.is_empty() || out.is_empty() {
        let roots = full.iter().map(|k| r.stores[*k].0 as usize).chain(row_values);
        let set = dependencies(analysis, roots);
        let mut g = start(analysis, &set, &saved, v);
        loop_chunk(&mut g, &[], &full);
        if analysis.stores(Level::Row).next().is_some() {
            g.text.open("if (m == 0 && threadIdx.x == 0)");
            g.row_stores();
            g.text.close();
        }
        out.push(g.template("rows_split", rows * chunks, THREADS, THREADS));
    }
    out
}

/// Emits the common start of all launches over chunks.
fn start<'a>(analysis: &'a RegionAnalysis<'a>, set: &BTreeSet<usize>, saved: &Saved, v: usize) -> Emitter<'a> {
    let cols = analysis.region.cols;
    let mut g = Emitter::new(analysis, Some(cols), v);
    g.declare("cols", cols);
    g.declare("chunks", reduction_order::chunks(cols));
    g.declare("warps", reduction_order::warps(cols));
    g.prologue(set);
    let t = g.position();
    g.text.line("const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;");
    g.text.line(format!("const {t} row = block / chunks, m = block - row * chunks, begin = m * {CHUNK};"));
    g.text.line(format!("const {t} end = begin + {CHUNK} < cols ? begin + {CHUNK} : cols;"));
    g.text.line(format!("const {t} limit = warp < warps ? end : 0;"));
    g.row_start(set);
    load_saved(&mut g, set, saved);
    g
}

fn loop_chunk(g: &mut Emitter, feeds: &[usize], stores: &[usize]) {
    let (t, v, unroll) = (g.position(), g.v, 2);
    let runs = OCTET / v;
    g.text.line(format!("const {t} stride = warps * {BLOCK};"));
    g.text.open(format!("for ({t} b = begin + warp * {BLOCK} + lane * {v}; b < limit; b += {unroll} * stride)"));
    let indexing = Indexing {
        decl: g.walked(t, format!("b + k / {runs} * stride + k % {runs} * {}", 32 * v), g.ragged()),
        guard: "at < limit".into(),
        partial: g.ragged(),
        full: false,
        columns: OCTET,
    };
    let none = BTreeSet::new();
    g.loop_nest(&LoopNest {
        packs: unroll * runs,
        indexing: &indexing,
        live_in: &none,
        live_out: &none,
        feeds,
        stores,
        assumed_false: &none,
    });
    g.text.close();
}

fn partial(analysis: &RegionAnalysis, saved: &Saved, feeds: &[usize], partials: &[usize], v: usize) -> LaunchTemplate {
    let set = dependencies(analysis, feeds.iter().map(|i| analysis.operand(*i)));
    let mut g = start(analysis, &set, saved, v);
    g.partials(feeds);
    loop_chunk(&mut g, feeds, &[]);
    for &i in feeds {
        let (f, c) = (expr::functor(g.reduction(i)), expr::computed(g.dtype(i)));
        g.text.line(format!("const {c} w{i} = reduce_lanes<{f}, {v}, 32>(a{i});"));
        g.text.line(format!("__shared__ {c} part{i}[8];"));
        g.text.line(format!("if (lane == 0) part{i}[warp] = w{i};"));
    }
    g.text.line("__syncthreads();");
    g.text.open("if (threadIdx.x == 0)");
    for (&i, &at) in feeds.iter().zip(partials) {
        let (f, wide) = (expr::functor(g.reduction(i)), expr::wide(g.dtype(i)));
        let cells = g.cells(wide, at);
        g.text.line(format!("{cells}[block] = reduce_warps<{f}, 8>(part{i});"));
    }
    g.text.close();
    let r = analysis.region;
    g.template("rows_partial", r.batch * r.rows * reduction_order::chunks(r.cols), THREADS, THREADS)
}

/// Emits the combination of partial results; with `last`, also the stores with one element per row.
fn combine(
    analysis: &RegionAnalysis,
    saved: &Saved,
    feeds: &[usize],
    partials: &[usize],
    last: bool,
) -> LaunchTemplate {
    let r = analysis.region;
    let rows = r.batch * r.rows;
    let mut g = Emitter::new(analysis, Some(r.cols), 1);
    g.declare("chunks", reduction_order::chunks(r.cols));
    let t = g.position();
    g.text.line(format!("const {t} row = block;"));
    for (&i, &at) in feeds.iter().zip(partials) {
        let (d, f) = (g.dtype(i), expr::functor(g.reduction(i)));
        let (c, wide) = (expr::computed(d), expr::wide(d));
        let (cells, id) = (g.cells(wide, at), expr::identity(g.reduction(i), d));
        g.text.line(format!("{wide} t{i} = {id};"));
        g.text.line("#pragma unroll 8");
        g.text.line(format!(
            "for ({t} m = threadIdx.x; m < chunks; m += 256) t{i} = {f}::combine(t{i}, {cells}[row * chunks + m]);"
        ));
        g.text.line(format!("__shared__ {wide} strip{i}[8];"));
        let x = expr::rounded(d, format!("({c})reduce_strips<{f}>(t{i}, strip{i})"));
        g.text.line(format!("const {c} r{i} = {x};"));
    }
    g.text.open("if (threadIdx.x == 0)");
    for i in feeds {
        let cells = g.cells(expr::computed(g.dtype(*i)), saved[i]);
        g.text.line(format!("{cells}[row] = r{i};"));
    }
    if last {
        let set = dependencies(analysis, analysis.stores(Level::Row).map(|k| r.stores[k].0 as usize));
        g.prologue(&set);
        g.row_start(&set);
        let others: Saved = saved.iter().filter(|s| !feeds.contains(s.0)).map(|(i, at)| (*i, *at)).collect();
        load_saved(&mut g, &set, &others);
        g.row_stores();
    }
    g.text.close();
    g.template("rows_combine", rows, THREADS, THREADS)
}
