//! Emits row reductions where one block, or part of one, computes a row.
//!
//! Two strategies, by the registers that a thread needs. *Registers*: a thread loads its elements once and keeps what
//! later passes need. *Recompute*: each pass loops over the row and recomputes what it needs, from shared memory
//! (`row_smem`) or, if a row does not fit there, from device memory. Both follow `schedule::reduction_order`.

use super::emitter::{Emitter, vector_width};
use super::expr;
use super::launch_template::LaunchTemplate;
use super::loop_nest::{Indexing, LoopNest};
use super::row_col_reduce;
use super::row_smem;
use super::split_row;
use crate::launch::Props;
use crate::schedule::access::{self, Access, Reading};
use crate::schedule::reduction_order::{self, BLOCK, CHUNK, OCTET};
use crate::schedule::region_analysis::{RegionAnalysis, operands};
use perilune_plan::ir::{Code, Level};
use std::collections::{BTreeSet, HashMap};

/// Maximum chunks that a block of threads holds.
const MAX_CHUNKS: usize = 4;

/// Assigns reductions and stores to passes over the elements.
pub struct Passes {
    pub feeds: Vec<Vec<usize>>,
    pub stores: Vec<Vec<usize>>,
}

/// The passes of a region.
pub fn passes(analysis: &RegionAnalysis) -> Passes {
    let last = analysis.last_pass();
    let (mut feeds, mut stores) = (vec![Vec::new(); last + 1], vec![Vec::new(); last + 1]);
    for i in analysis.needed() {
        if analysis.is_reduction(i) {
            feeds[analysis.depth[analysis.operand(i)]].push(i);
        }
    }
    for k in analysis.full_stores() {
        let pass = if analysis.over_load[k] { last } else { analysis.depth[analysis.region.stores[k].0 as usize] };
        stores[pass].push(k);
    }
    Passes { feeds, stores }
}

/// The longest packs for the rows of a region. The last pack of a row may be partial, even if the row length is not a
/// multiple of the pack, provided that rows begin at multiples of a pack wherever they are read and stored.
pub fn row_vector_width(analysis: &RegionAnalysis, set: &BTreeSet<usize>) -> usize {
    let mut v = vector_width(analysis, set, OCTET);
    let cols = analysis.region.cols;
    let read = |i: &usize| match analysis.code(*i) {
        Code::Load { source, layout } if source.value().is_some() && analysis.level(*i) == Level::Full => {
            Some(access::full(layout, Some(cols), v))
                .filter(|r| !matches!(r.access, Access::Invariant | Access::RowWise))
        }
        _ => None,
    };
    let reads: Vec<Reading> = set.iter().filter_map(read).collect();
    let spaced = analysis.full_stores().next().is_some() || reads.iter().any(|r| r.lead.iter().any(|d| d.1 != 0));
    let fits = reads.iter().all(|r| r.access == Access::Vector)
        && analysis.full_stores().all(|k| analysis.pitch(k).is_some_and(|pitch| pitch.is_multiple_of(v)));
    if spaced && fits {
        return v;
    }
    while !cols.is_multiple_of(v) {
        v /= 2;
    }
    v
}

pub fn lower(
    analysis: &RegionAnalysis,
    props: &Props,
    many: bool,
    saved: &BTreeSet<usize>,
    scratch: &mut usize,
) -> Vec<LaunchTemplate> {
    let r = analysis.region;
    let rows = r.batch * r.rows;
    let reduces = analysis.needed().iter().any(|i| matches!(analysis.code(*i), Code::ReduceRow(..)));
    let few = r.cols > CHUNK && (rows < 2 * props.sms as usize || !reduces);
    if many || few {
        return split_row::lower(analysis, saved, scratch);
    }
    match row_col_reduce::lower(analysis, props, scratch) {
        Some(stages) if saved.is_empty() => stages,
        _ => vec![row_per_block(analysis, props, saved, scratch)],
    }
}

/// For each pass, the registers that it computes and later ones read.
pub fn live_across(analysis: &RegionAnalysis, passes: &Passes, g: &Emitter) -> Vec<BTreeSet<usize>> {
    let count = passes.feeds.len();
    let roots = |d: usize| -> Vec<usize> {
        let stores = passes.stores[d].iter().map(|k| analysis.region.stores[*k].0 as usize);
        passes.feeds[d].iter().map(|i| analysis.operand(*i)).chain(stores).collect()
    };
    // A register is computed in the first pass that needs it.
    let mut pass_of: HashMap<usize, usize> = HashMap::new();
    for d in 0..count {
        for i in analysis.closure(roots(d), |i| analysis.level(i) == Level::Row) {
            if analysis.level(i) == Level::Full && !g.is_one(i) && !g.is_column_index(i) {
                pass_of.entry(i).or_insert(d);
            }
        }
    }
    let mut out = vec![BTreeSet::new(); count];
    let mut read = |i: usize, by: usize| {
        if let Some(&d) = pass_of.get(&i).filter(|d| **d < by) {
            out[d].insert(i);
        }
    };
    for (&user, &by) in &pass_of {
        operands(analysis.code(user)).iter().for_each(|a| read(*a as usize, by));
    }
    for d in 0..count {
        roots(d).into_iter().for_each(|i| read(i, d));
    }
    out
}

fn row_per_block(
    analysis: &RegionAnalysis,
    props: &Props,
    saved: &BTreeSet<usize>,
    scratch: &mut usize,
) -> LaunchTemplate {
    let r = analysis.region;
    let (rows, cols) = (r.batch * r.rows, r.cols);
    let set = analysis.needed();
    let v = row_vector_width(analysis, &set);
    let passes = passes(analysis);
    let (lanes, warps, chunks) =
        (reduction_order::lanes(cols), reduction_order::warps(cols), reduction_order::chunks(cols));
    let mut g = Emitter::new(analysis, Some(cols), v);
    g.declare("rows", rows);
    g.declare("cols", cols);
    g.prologue(&set);
    let live_out = live_across(analysis, &passes, &g);
    // Elements per thread, if the threads hold them all.
    let blocks_each = cols.min(CHUNK).div_ceil(BLOCK * warps);
    let threads = 32 * warps * if chunks <= MAX_CHUNKS { chunks } else { 1 };
    let live_in = register_words(analysis, &passes, &live_out, &g) * blocks_each * OCTET;
    let room = match threads {
        0..=256 => 112,
        257..=512 => 64,
        _ => 28,
    };
    let registers = chunks <= MAX_CHUNKS && live_in <= room;
    if !registers && let Some(stage) = row_smem::lower(analysis, props, &passes, saved, scratch) {
        return stage;
    }
    let chunks_held = if registers { chunks } else { 1 };
    let in_warp = warps * chunks_held == 1;
    let t = g.position();
    // Declare the row of a thread and its columns.
    if in_warp {
        g.text.line(format!("const u32 lane = threadIdx.x % {lanes};"));
        g.text.line(format!("const {t} mine = ({t})block * (blockDim.x / {lanes}) + threadIdx.x / {lanes};"));
    } else {
        g.text.line("const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;");
        g.text.line(format!("const {t} mine = block;"));
    }
    g.text.line("const bool live = mine < rows;");
    g.text.line(format!("const {t} row = live ? mine : 0, limit = live ? cols : 0;"));
    let origin = match (in_warp, chunks_held) {
        (true, _) => format!("lane * {v}"),
        (false, 1) => format!("warp * {BLOCK} + lane * {v}"),
        _ => format!("warp / 8 * {CHUNK} + warp % 8 * {BLOCK} + lane * {v}"),
    };
    g.text.line(format!("const {t} origin = {origin};"));
    g.row_start(&set);
    g.row_maps(&set, 0);
    let runs = OCTET / v;
    let spread = format!("k / {runs} * {} + k % {runs} * {}", BLOCK * warps, lanes * v);
    let leader = if in_warp { "lane == 0" } else { "threadIdx.x == 0" };
    if registers {
        let indexing = Indexing {
            decl: g.walked(t, format!("origin + {spread}"), g.ragged()),
            guard: "at < limit".into(),
            partial: g.ragged(),
            full: cols == OCTET * blocks_each * lanes * warps * chunks_held,
            columns: OCTET,
        };
        let (mut live_in, none) = (BTreeSet::new(), BTreeSet::new());
        for d in 0..passes.feeds.len() {
            g.partials(&passes.feeds[d]);
            g.loop_nest(&LoopNest {
                packs: blocks_each * runs,
                indexing: &indexing,
                live_in: &live_in,
                live_out: &live_out[d],
                feeds: &passes.feeds[d],
                stores: &passes.stores[d],
                assumed_false: &none,
            });
            live_in.extend(live_out[d].iter().copied());
            reduce_registers(&mut g, &passes.feeds[d], v, lanes, warps, chunks_held);
            g.row_maps(&set, d + 1);
        }
    } else {
        let looped = chunks > 1;
        for d in 0..passes.feeds.len() {
            recompute_pass(&mut g, &passes, d, RowLoop { v, lanes, warps, looped, spread: &spread });
            g.row_maps(&set, d + 1);
        }
    }
    g.save(saved, rows, scratch, leader);
    if analysis.stores(Level::Row).next().is_some() {
        g.text.open(format!("if (live && {leader})"));
        g.row_stores();
        g.text.close();
    }
    let strategy = if registers { "row" } else { "rows_recompute" };
    if in_warp {
        // If there are few rows, small blocks spread them over more multiprocessors.
        let warps_wanted = rows.div_ceil(32 / lanes);
        let threads = if warps_wanted >= 4096 {
            256
        } else if warps_wanted >= 512 {
            128
        } else {
            32
        };
        return g.template(strategy, rows.div_ceil(threads / lanes), threads, 256);
    }
    // 256 threads hold the strips of chunks, as for long rows.
    let threads = 32 * warps * chunks_held;
    g.template(strategy, rows, threads, threads)
}

/// Maximum 4-byte registers that a thread needs in one pass per element: for what it loads, stores and keeps, and for
/// what earlier passes kept that this pass or a later one reads.
pub fn register_words(analysis: &RegionAnalysis, passes: &Passes, live_out: &[BTreeSet<usize>], g: &Emitter) -> usize {
    // A 16-bit float widened to f32 is the register that it was loaded to.
    let same = |mut i: usize| {
        while let Code::Cast(a) = analysis.code(i)
            && analysis.region.body[*a as usize].dtype.compute() == analysis.region.body[i].dtype
        {
            i = *a as usize;
        }
        i
    };
    let words = |i: usize| analysis.region.body[i].dtype.compute().size().div_ceil(4);
    let (mut fresh, mut read) = (Vec::new(), Vec::new());
    for d in 0..live_out.len() {
        let before: BTreeSet<usize> = live_out[..d].iter().flatten().copied().collect();
        let stores = passes.stores[d].iter().map(|k| analysis.region.stores[*k].0 as usize);
        let roots = passes.feeds[d]
            .iter()
            .map(|i| analysis.operand(*i))
            .chain(stores.clone())
            .chain(live_out[d].iter().copied());
        let need = analysis.closure(roots, |i| before.contains(&i) || analysis.level(i) == Level::Row);
        let loads = need
            .iter()
            .copied()
            .filter(|i| matches!(analysis.code(*i), Code::Load { .. }) && analysis.level(*i) == Level::Full)
            .filter(|i| !g.is_one(*i) && !g.is_column_index(*i));
        fresh.push(loads.chain(stores).chain(live_out[d].iter().copied()).map(same).collect::<BTreeSet<usize>>());
        read.push(need.intersection(&before).copied().map(same).collect::<BTreeSet<usize>>());
    }
    let of_pass = |d: usize| {
        let kept: BTreeSet<usize> = live_out[..d].iter().flatten().copied().map(same).collect();
        let later = kept.into_iter().filter(|i| read[d..].iter().any(|r| r.contains(i)));
        fresh[d].iter().copied().chain(later).collect::<BTreeSet<usize>>().into_iter().map(words).sum()
    };
    (0..live_out.len()).map(of_pass).max().unwrap_or(0).max(1)
}

/// Reduces the partial results of elements in registers to the reductions' registers.
fn reduce_registers(g: &mut Emitter, feeds: &[usize], v: usize, lanes: usize, warps: usize, chunks: usize) {
    let in_warp = warps * chunks == 1;
    for &i in feeds {
        let (d, f) = (g.dtype(i), expr::functor(g.reduction(i)));
        let c = expr::computed(d);
        g.text.line(format!("const {c} w{i} = reduce_lanes<{f}, {v}, {lanes}>(a{i});"));
        if in_warp {
            let x = expr::rounded(d, format!("w{i}"));
            g.text.line(format!("const {c} r{i} = {x};"));
        } else {
            g.text.line(format!("__shared__ {c} part{i}[{}];", warps * chunks));
            g.text.line(format!("if (lane == 0) part{i}[warp] = w{i};"));
        }
    }
    if in_warp || feeds.is_empty() {
        return;
    }
    g.text.line("__syncthreads();");
    for &i in feeds {
        let (d, f) = (g.dtype(i), expr::functor(g.reduction(i)));
        let (c, w) = (expr::computed(d), expr::wide(d));
        let chunk = |m: usize| format!("({w})reduce_warps<{f}, {warps}>(part{i} + {})", m * warps);
        let join = |a: String, b: String| format!("{f}::combine({a}, {b})");
        let total = match chunks {
            1 => format!("reduce_warps<{f}, {warps}>(part{i})"),
            2 => join(chunk(0), chunk(1)),
            3 => join(join(chunk(0), chunk(1)), chunk(2)),
            _ => join(join(chunk(0), chunk(1)), join(chunk(2), chunk(3))),
        };
        let x = expr::rounded(d, format!("({c}){total}"));
        g.text.line(format!("const {c} r{i} = {x};"));
    }
}

struct RowLoop<'a> {
    v: usize,
    lanes: usize,
    warps: usize,
    /// Whether rows have more than one chunk.
    looped: bool,
    spread: &'a str,
}

/// Emits pass `d` as a loop over the row.
fn recompute_pass(g: &mut Emitter, passes: &Passes, d: usize, w: RowLoop) {
    let t = g.position();
    let (feeds, stores) = (&passes.feeds[d], &passes.stores[d]);
    if feeds.is_empty() && stores.is_empty() {
        return;
    }
    let RowLoop { v, lanes, warps, looped, spread } = w;
    let in_warp = warps == 1;
    for &i in feeds.iter().filter(|_| !in_warp) {
        let c = expr::computed(g.dtype(i));
        g.text.line(format!("__shared__ {c} part{i}[{warps}];"));
    }
    if looped {
        for &i in feeds {
            let (x, wide) = (expr::identity(g.reduction(i), g.dtype(i)), expr::wide(g.dtype(i)));
            g.text.line(format!("{wide} t{i} = {x};"));
        }
        g.text.open(format!("for ({t} begin = 0, m = 0; begin < cols; begin += {CHUNK}, m++)"));
        g.text.line(format!("const {t} end = begin + {CHUNK} < limit ? begin + {CHUNK} : limit;"));
    } else {
        if !feeds.is_empty() {
            // These names belong to this pass; results are declared outside.
            for &i in feeds {
                g.text.line(format!("{} w{i};", expr::computed(g.dtype(i))));
            }
        }
        g.text.open("");
        g.text.line(format!("const {t} begin = 0, end = limit;"));
    }
    g.partials(feeds);
    let unroll = 2;
    g.text.open(format!("for ({t} b = begin; b < end; b += {})", unroll * BLOCK * warps));
    let indexing = Indexing {
        decl: g.walked(t, format!("b + origin + {spread}"), g.ragged()),
        guard: "at < end".into(),
        partial: g.ragged(),
        full: false,
        columns: OCTET,
    };
    let none = BTreeSet::new();
    g.loop_nest(&LoopNest {
        packs: unroll * (OCTET / v),
        indexing: &indexing,
        live_in: &none,
        live_out: &none,
        feeds,
        stores,
        assumed_false: &none,
    });
    g.text.close();
    for &i in feeds {
        let (f, c) = (expr::functor(g.reduction(i)), expr::computed(g.dtype(i)));
        let head = if looped { format!("const {c} ") } else { String::new() };
        g.text.line(format!("{head}w{i} = reduce_lanes<{f}, {v}, {lanes}>(a{i});"));
    }
    if !feeds.is_empty() && !in_warp {
        for &i in feeds {
            g.text.line(format!("if (lane == 0) part{i}[warp] = w{i};"));
        }
        g.text.line("__syncthreads();");
        for &i in feeds.iter().filter(|_| looped) {
            let (f, wide) = (expr::functor(g.reduction(i)), expr::wide(g.dtype(i)));
            g.text.line(format!("const {wide} u{i} = reduce_warps<{f}, {warps}>(part{i});"));
            g.text.line(format!("if (threadIdx.x == (m & 255)) t{i} = {f}::combine(t{i}, u{i});"));
        }
        if looped {
            // The next chunk writes to the same memory.
            g.text.line("__syncthreads();");
        }
    }
    g.text.close();
    for &i in feeds {
        let (dtype, f) = (g.dtype(i), expr::functor(g.reduction(i)));
        let (c, wide) = (expr::computed(dtype), expr::wide(dtype));
        let total = if looped {
            g.text.line(format!("__shared__ {wide} strip{i}[8];"));
            format!("({c})reduce_strips<{f}>(t{i}, strip{i})")
        } else if in_warp {
            format!("w{i}")
        } else {
            format!("reduce_warps<{f}, {warps}>(part{i})")
        };
        let x = expr::rounded(dtype, total);
        g.text.line(format!("const {c} r{i} = {x};"));
    }
}
