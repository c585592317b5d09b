//! Emits fused row and column reductions in one pass (norm backward), and row kernels whose column weights a thread
//! loads once for all of its rows.
//!
//! A block processes a chunk of rows, as for column reductions. Strands of the block process interleaved rows. Each
//! strand holds its row in registers, as in `row`, together with the accumulators of its columns. If registers do not
//! suffice for both, the passes over a row recompute shared values, one vector at a time. While a row is computed,
//! cp.async stages the next ones in shared memory; each thread reads only what it copied itself.

use super::col::{cell, col_stores, combine};
use super::emitter::Emitter;
use super::expr;
use super::launch_template::LaunchTemplate;
use super::loop_nest::{Indexing, LoopNest};
use super::row::{live_across, passes, register_words, row_vector_width};
use super::split_row::alloc_scratch;
use crate::launch::Props;
use crate::schedule::access::{self, Access};
use crate::schedule::reduction_order::{self, BLOCK, CHUNK, OCTET};
use crate::schedule::region_analysis::RegionAnalysis;
use perilune_plan::ir::{Code, Level};
use std::collections::BTreeSet;

/// Registers for elements if two blocks share a multiprocessor, and if one block has all of it.
const ROOM: [usize; 2] = [96, 192];
/// The same if only one pack of a row is in registers at a time.
const PACKED: [usize; 2] = [112, 208];
/// Shared memory of a block that is not available to staged rows.
const RESERVED: usize = 2048;
/// Minimum threads for this strategy to be profitable, and threads per block.
const THREADS: [usize; 2] = [64, 256];

/// Returns the launches, or `None` if rows are too long or too few.
pub fn lower(analysis: &RegionAnalysis, props: &Props, scratch: &mut usize) -> Option<Vec<LaunchTemplate>> {
    let r = analysis.region;
    let cols = r.cols;
    let (lanes, warps) = (reduction_order::lanes(cols), reduction_order::warps(cols));
    let group = lanes * warps;
    let set = analysis.needed();
    let v = vector_width_of_f32(analysis, &set);
    let passes = passes(analysis);
    let mut g = Emitter::new(analysis, Some(cols), v);
    g.declare("cols", cols);
    g.prologue(&set);
    let mut live_out = live_across(analysis, &passes, &g);
    let sums: Vec<usize> = set.iter().copied().filter(|i| matches!(analysis.code(*i), Code::ReduceCol(..))).collect();
    let loads = |g: &Emitter, by_row: bool| -> Vec<usize> {
        let full = |i: &usize| matches!(analysis.code(*i), Code::Load { .. }) && analysis.level(*i) == Level::Full;
        set.iter().copied().filter(|i| full(i) && g.can_stage(*i) && g.differs_by_row(*i) == by_row).collect()
    };
    let mut once = loads(&g, false);
    // Without column reductions, the benefit is that weights are loaded once.
    if sums.is_empty() && once.is_empty() {
        return None;
    }
    let each = cols.div_ceil(BLOCK * warps) * OCTET;
    let words = |i: &usize| g.dtype(*i).compute().size() / 4;
    let live_in = register_words(analysis, &passes, &live_out, &g) * each;
    let staying = |once: &[usize]| sums.iter().chain(once).map(words).sum::<usize>() * each;
    // With column reductions, they stay in registers only if that leaves room for two blocks.
    if !sums.is_empty() && staying(&once) + live_in > ROOM[0] {
        once.clear();
    }
    let stay = staying(&once);
    let need = stay + live_in;
    // Registers of passes that keep nothing for later ones and proceed pack by pack.
    let by_row = |f: &Vec<usize>| f.iter().filter(|i| matches!(analysis.code(**i), Code::ReduceRow(..))).count();
    let nothing = vec![BTreeSet::new(); live_out.len()];
    let pack = register_words(analysis, &passes, &nothing, &g) + passes.feeds.iter().map(by_row).max().unwrap_or(0);
    let least = stay + pack * OCTET;
    let strands = |rows: usize| match sums.is_empty() {
        true => (THREADS[1] / group).max(1),
        false => reduction_order::columns(r.batch, rows, cols).strands,
    };
    let staged: usize = loads(&g, true).iter().map(|i| g.staged_bytes(*i)).sum::<usize>() * strands(r.rows);
    let room = |resident: usize| props.shared_bytes as usize / resident - RESERVED;
    // Passes recompute shared values if that lets two blocks share a multiprocessor, or lets one block hold a row at
    // all. Without column reductions, one block at a time waits for memory no longer than two. If the whole block has
    // one row, two blocks were slower (rows of 4,096: 631 us instead of 478).
    let two = least <= PACKED[0] && !sums.is_empty() && strands(r.rows) > 1 && 2 * staged <= room(2);
    let (resident, again) = match () {
        () if need <= ROOM[0] => (2, false),
        () if two => (2, true),
        () if need <= ROOM[1] => (1, false),
        () if least <= PACKED[1] => (1, true),
        () => return None,
    };
    if again {
        live_out = nothing;
    }
    let (batch, rows, cut) = match sums.is_empty() {
        true => {
            let (rows, strands) = (r.batch * r.rows, strands(r.rows));
            let chunk = rows.div_ceil(resident * props.sms as usize).next_multiple_of(strands);
            (1, rows, reduction_order::Columns { strands, chunk, chunks: rows.div_ceil(chunk.max(1)) })
        }
        false => (r.batch, r.rows, reduction_order::columns(r.batch, r.rows, cols)),
    };
    let strands = cut.strands;
    let (threads, blocks) = (group * strands, batch * cut.chunks);
    let fits = cols <= CHUNK && (THREADS[0]..=THREADS[1]).contains(&threads) && threads.is_multiple_of(32);
    if !fits || 2 * blocks < props.sms as usize {
        return None;
    }
    g.declare("rows", rows);
    g.declare("chunks", cut.chunks);
    g.declare("chunk_rows", cut.chunk);
    let runs = OCTET / v;
    let spread = |k: &str| format!("{k} / {runs} * {} + {k} % {runs} * {}", BLOCK * warps, lanes * v);
    let whole = each * group == cols && rows.is_multiple_of(strands);
    let indexing = Indexing {
        decl: g.walked(g.position(), format!("origin + {}", spread("k")), g.ragged()),
        guard: if whole { "true" } else { "at < limit" }.into(),
        partial: g.ragged(),
        full: whole,
        columns: each,
    };
    let packs = each / v;

    let t = g.position();
    g.text.line(format!("const u32 lane = threadIdx.x % {}, warp = threadIdx.x / 32;", lanes.min(32)));
    let strand = if strands == 1 { "0".into() } else { format!("threadIdx.x / {group}") };
    g.text.line(format!("const u32 strand = {strand};"));
    let origin = if warps == 1 { String::new() } else { format!("warp % {warps} * {BLOCK} + ") };
    g.text.line(format!("const {t} origin = {origin}lane * {v};"));
    g.text.line(format!("const {t} b = block / chunks, chunk = block - b * chunks, begin = chunk * chunk_rows;"));
    g.text.line(format!("const {t} stop = begin + chunk_rows < rows ? begin + chunk_rows : rows;"));
    for &i in &sums {
        g.partial(i, each);
    }
    let loads = loads(&g, true);
    g.load_once(&once, packs, &indexing);
    let staged = g.stage_rows(&loads, strands);
    let widest = sums.iter().map(|i| g.dtype(*i).compute().size()).max().unwrap_or(0);
    let combined = if strands > 1 { each * threads * widest } else { 0 };
    let depth = [3, 2].into_iter().find(|d| (d * staged).max(combined) <= room(resident))?;
    let shared_bytes = (depth * staged).max(combined);
    for &i in passes.feeds.iter().flatten().filter(|i| warps > 1 && matches!(analysis.code(**i), Code::ReduceRow(..))) {
        let c = expr::computed(g.dtype(i));
        g.text.line(format!("__shared__ {c} part{i}[2][{}];", threads / 32));
    }
    let ahead = |g: &mut Emitter, y: &str, flip: &str| {
        g.text.open(format!("if ({y} < stop)"));
        g.text.line(format!("const {t} ahead = b * rows + {y}, limit = cols;"));
        g.row_begin("ahead", "f");
        g.staged_rows("to", flip, "strand", strands);
        g.cp_async(packs, &indexing, "f", "to");
        g.text.close();
        g.text.line("cp_async_commit();");
    };
    for k in 0..depth - 1 {
        ahead(&mut g, &format!("begin + strand + {}", k * strands), &k.to_string());
    }
    let next = |y: &str| format!("const {t} next = b * rows + ({y} < stop ? {y} : stop - 1);");
    g.text.line(next("begin + strand"));
    g.row_early(&set, "next");
    g.text.line("u32 flip = 0, set = 0;");
    g.text.open(format!("for ({t} y = begin; y < stop; y += {strands}, flip ^= 1)"));
    g.text.line("const bool live = y + strand < stop;");
    g.text.line(format!("const {t} row = b * rows + (live ? y + strand : y), limit = live ? cols : 0;"));
    g.text.line(format!("cp_async_wait<{}>();", depth - 2));
    // The buffer of the previous row.
    ahead(&mut g, &format!("y + strand + {}", (depth - 1) * strands), &format!("(set == 0 ? {} : set - 1)", depth - 1));
    g.staged_rows("stage", "set", "strand", strands);
    g.text.line(format!("set = set == {} ? 0 : set + 1;", depth - 1));
    g.row_start(&set);
    g.text.line(next(&format!("y + strand + {strands}")));
    g.row_early(&set, "next");
    g.row_maps(&set, 0);
    let (mut live_in, none): (BTreeSet<usize>, BTreeSet<usize>) = (once.iter().copied().collect(), BTreeSet::new());
    for d in 0..passes.feeds.len() {
        let rows: Vec<usize> =
            passes.feeds[d].iter().copied().filter(|i| matches!(analysis.code(*i), Code::ReduceRow(..))).collect();
        g.partials(&rows);
        let (feeds, stores) = (&passes.feeds[d], &passes.stores[d]);
        let pass = LoopNest {
            packs,
            indexing: &indexing,
            live_in: &live_in,
            live_out: &live_out[d],
            feeds,
            stores,
            assumed_false: &none,
        };
        match again {
            false => g.loop_nest(&pass),
            true => vector_by_vector(&mut g, &pass, &spread, &once),
        }
        live_in.extend(live_out[d].iter().copied());
        fold(&mut g, &rows, lanes, warps);
        g.row_maps(&set, d + 1);
    }
    if analysis.stores(Level::Row).next().is_some() {
        g.text.open(format!("if (live && threadIdx.x % {group} == 0)"));
        g.row_stores();
        g.text.close();
    }
    g.text.close();

    let joins = cut.chunks > 1 && !sums.is_empty();
    let cells: Vec<usize> =
        sums.iter().filter(|_| joins).map(|_| alloc_scratch(scratch, cut.chunks * batch * cols * 8)).collect();
    for (n, &i) in sums.iter().enumerate() {
        finish(&mut g, i, each, (group, strands), cells.get(n).copied(), &spread(&format!("(k / {v})")));
    }
    let strategy = if sums.is_empty() { "row_loop" } else { "row_col" };
    let first = g.template(strategy, blocks, threads, threads);
    let first = LaunchTemplate { resident: resident as u32, shared_bytes: shared_bytes as u32, ..first };
    let join = joins.then(|| combine(analysis, &sums, &cells, cut));
    Some(std::iter::once(first).chain(join).collect())
}

/// Elements per pack, such that adjacent lanes read and write adjacent 16 bytes of f32, not halves of 32.
fn vector_width_of_f32(analysis: &RegionAnalysis, set: &BTreeSet<usize>) -> usize {
    let walked = |i: &usize| match analysis.code(*i) {
        Code::Load { source, layout } if source.value().is_some() && analysis.level(*i) == Level::Full => {
            let r = access::full(layout, Some(analysis.region.cols), 1);
            !matches!(r.access, Access::Invariant | Access::RowWise) && r.lead.iter().any(|d| d.1 != 0)
        }
        _ => false,
    };
    let stored = analysis.full_stores().map(|k| analysis.region.stores[k].0 as usize);
    let mut moved = set.iter().copied().filter(walked).chain(stored);
    let most = if moved.any(|i| analysis.region.body[i].dtype.size() == 4) { 4 } else { OCTET };
    row_vector_width(analysis, set).min(most)
}

/// Emits a pass that recomputes an earlier pass's values, one pack at a time, so that few registers are live.
fn vector_by_vector(g: &mut Emitter, p: &LoopNest, spread: &dyn Fn(&str) -> String, once: &[usize]) {
    let v = g.v;
    let t = g.position();
    g.text.unrolled("q", p.packs);
    // The pack's part of arrays over all packs, under the same names.
    let slots = |g: &Emitter, i: usize| match g.analysis.level(i) {
        Level::Col => format!("a{i} + q * {v}"),
        _ => format!("a{i} + q * {v} % {OCTET}"),
    };
    let mut parts: Vec<(String, &str, String)> =
        once.iter().map(|i| (format!("r{i}"), expr::computed(g.dtype(*i)), format!("r{i} + q * {v}"))).collect();
    parts.extend(p.feeds.iter().map(|i| (format!("a{i}"), expr::computed(g.dtype(*i)), slots(g, *i))));
    for (name, c, from) in &parts {
        g.text.line(format!("{c}* const {name}_q = {from};"));
    }
    g.text.open("");
    for (name, c, _) in &parts {
        g.text.line(format!("{c}* const {name} = {name}_q;"));
    }
    let indexing = Indexing {
        decl: g.walked(t, format!("origin + {}", spread("(q + k)")), p.indexing.partial),
        guard: p.indexing.guard.clone(),
        partial: p.indexing.partial,
        full: p.indexing.full,
        columns: p.indexing.columns,
    };
    g.loop_nest(&LoopNest { packs: 1, indexing: &indexing, ..*p });
    g.text.close();
    g.text.close();
}

/// Reduces the partials of a strand's row to the reductions' registers. A row's partials overwrite those of the row
/// before last, with a barrier in between.
fn fold(g: &mut Emitter, rows: &[usize], lanes: usize, warps: usize) {
    let v = g.v;
    for &i in rows {
        let (d, f) = (g.dtype(i), expr::functor(g.reduction(i)));
        let c = expr::computed(d);
        g.text.line(format!("const {c} w{i} = reduce_lanes<{f}, {v}, {lanes}>(a{i});"));
    }
    if warps > 1 && !rows.is_empty() {
        // One branch after all folds: separate branches would serialise the folds.
        g.text.open("if (lane == 0)");
        for i in rows {
            g.text.line(format!("part{i}[flip][warp] = w{i};"));
        }
        g.text.close();
        g.text.line("__syncthreads();");
    }
    for &i in rows {
        let (d, f) = (g.dtype(i), expr::functor(g.reduction(i)));
        let total = match warps {
            1 => format!("w{i}"),
            _ => format!("reduce_warps<{f}, {warps}>(part{i}[flip] + strand * {warps})"),
        };
        let x = expr::rounded(d, total);
        g.text.line(format!("const {} r{i} = {x};", expr::computed(d)));
    }
}

/// Combines the strands of a chunk, and stores the result, or a partial result in the workspace.
fn finish(
    g: &mut Emitter,
    i: usize,
    each: usize,
    (group, strands): (usize, usize),
    cells: Option<usize>,
    spread: &str,
) {
    let (d, f, v, t) = (g.dtype(i), expr::functor(g.reduction(i)), g.v, g.position());
    let (c, wide) = (expr::computed(d), expr::wide(d));
    let id = expr::identity(g.reduction(i), d);
    let threads = group * strands;
    if strands > 1 {
        g.text.line("__syncthreads();");
        g.text.line(format!("{c}* const strands{i} = ({c}*)staged;"));
        g.text.line("#pragma unroll");
        g.text.line(format!("for (int k = 0; k < {each}; k++) strands{i}[k * {threads} + threadIdx.x] = a{i}[k];"));
        g.text.line("__syncthreads();");
        g.text.open(format!("for (u32 k = strand; k < {each}; k += {strands})"));
        g.text.line(format!("{wide} total = {id};"));
        g.text.line("#pragma unroll");
        g.text.line(format!("for (u32 s = 0; s < {strands}; s++)"));
        let from = format!("strands{i}[k * {threads} + s * {group} + threadIdx.x % {group}]");
        g.text.line(format!("    total = {f}::combine(total, ({wide}){from});"));
    } else {
        g.text.unrolled("k", each);
        g.text.line(format!("const {wide} total = {f}::combine(({wide}){id}, ({wide})a{i}[k]);"));
    }
    g.text.line(format!("const {t} at = origin + {spread} + k % {v};"));
    g.text.open("if (at < cols)");
    match cells {
        Some(at) => {
            let cells = g.cells(cell(d, strands), at);
            g.text.line(format!("{cells}[(chunk * (blocks / chunks) + b) * cols + at] = total;"));
        }
        None => {
            let x = expr::rounded(d, format!("({c})total"));
            g.text.line(format!("const {c} result = {x};"));
            col_stores(g, i, "b * cols + at");
        }
    }
    g.text.close();
    g.text.close();
}
