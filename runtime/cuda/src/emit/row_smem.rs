//! Emits row reductions over rows that fit in shared memory but not in registers; any number of passes reads device
//! memory once.
//!
//! A few blocks on each multiprocessor loop over the rows. Each thread copies only what it reads itself, so copies need
//! no barrier. cp.async loads a vector of the next row as soon as the last pass has consumed the one in its place, and
//! one block computes while another's row arrives. Barriers are only needed where a reduction combines warps.
//!
//! Rows of 16-bit floats with `exp` stay in registers instead (`register_prefetch`), and shared memory holds the
//! results of `exp` (`smem_intermediates`). The thread that owns a one-hot column corrects it (`one_hot`).

use super::emitter::Emitter;
use super::expr;
use super::launch_template::LaunchTemplate;
use super::loop_nest::{Indexing, LoopNest};
use super::one_hot::LoopWork;
use super::register_prefetch::RegisterPrefetch;
use super::row::{Passes, row_vector_width};
use super::smem_intermediates;
use crate::launch::Props;
use crate::schedule::reduction_order::{self, BLOCK, CHUNK, OCTET};
use crate::schedule::region_analysis::RegionAnalysis;
use perilune_core::ops::ReduceFn;
use perilune_plan::ir::{Code, Level};
use std::collections::BTreeSet;

/// Threads that share a chunk.
const TEAM: usize = 256;
/// Maximum chunks that one warp can combine.
const MAX_CHUNKS: usize = 32;
/// Maximum teams per multiprocessor.
const MAX_TEAMS: usize = 4;
/// Registers for the elements that a thread processes at a time: of the 64 that it has if 1,024 threads share a
/// multiprocessor, and of 128.
const ROOM: [usize; 2] = [24, 80];
/// Registers of a multiprocessor.
const REGISTERS: usize = 65536;
/// Shared memory of a multiprocessor that each block reserves.
const RESERVED: usize = 1024;

/// Returns one launch for all rows, or `None` if they do not fit or `schedule::reduction_order` does not use eight
/// warps for them.
pub fn lower(
    analysis: &RegionAnalysis,
    props: &Props,
    passes: &Passes,
    saved: &BTreeSet<usize>,
    scratch: &mut usize,
) -> Option<LaunchTemplate> {
    let r = analysis.region;
    let (rows, cols) = (r.batch * r.rows, r.cols);
    let chunks = reduction_order::chunks(cols);
    let set = analysis.needed();
    let v = row_vector_width(analysis, &set);
    let last = (0..passes.feeds.len()).rfind(|d| !passes.feeds[*d].is_empty() || !passes.stores[*d].is_empty())?;
    if reduction_order::warps(cols) * 32 != TEAM || chunks > MAX_CHUNKS {
        return None;
    }
    let mut g = Emitter::new(analysis, Some(cols), v);
    g.declare("rows", rows);
    g.declare("cols", cols);
    g.prologue(&set);
    let of_row = |i: &usize| matches!(analysis.code(*i), Code::Load { .. }) && analysis.level(*i) == Level::Full;
    let loads: Vec<usize> =
        set.iter().copied().filter(|i| of_row(i) && g.can_stage(*i) && g.differs_by_row(*i)).collect();
    let cells = 8 * chunks.max(MAX_TEAMS);
    let partials: usize = passes.feeds.iter().flatten().map(|i| 2 * cells * g.dtype(*i).compute().size()).sum();
    let (words, all) = (words(analysis, passes, &g), props.shared_bytes as usize + RESERVED);
    let each = |g: &Emitter| loads.iter().map(|i| g.staged_bytes(*i)).sum::<usize>() + partials + RESERVED;
    if loads.is_empty() || each(&g) > all || words * OCTET > ROOM[1] {
        return None;
    }
    let packs = OCTET / v;
    let light = words * OCTET <= ROOM[0] && packs <= 2;
    let most = if light { MAX_TEAMS } else { 2 };
    // Keep the intermediate if a row fits in shared memory as f32 and also in registers. Shared memory for both is
    // slower than a second `exp`.
    let kept = smem_intermediates::kept(analysis, passes, &g, &loads);
    g.intermediate = kept.map(|k| k.0);
    let resident = |g: &Emitter| if 2 * each(g) <= all { 2 } else { 1 };
    let mut prefetch = None;
    if light && g.intermediate.is_some() && each(&g) <= all {
        let (resident, room) = (resident(&g), |teams: usize| REGISTERS / (teams * TEAM));
        let teams = teams(cols, resident, most);
        prefetch = RegisterPrefetch::new(&g, props, &loads, cols, teams, room(teams * resident)).map(|h| (h, teams));
    }
    if prefetch.is_none() {
        g.intermediate = None;
    }
    let resident = resident(&g);
    let teams = prefetch.as_ref().map_or(most / resident, |h| h.1);
    let prefetch = prefetch.map(|h| h.0);
    g.in_registers = prefetch.is_some();
    // Signed, so that compilers recognise indices that differ by a constant.
    let t = g.index_type();
    g.text.line("const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 8, team = threadIdx.x / 256;");
    g.text.line(format!("const {t} origin = warp * {BLOCK} + lane * {v};"));
    let shared_bytes = g.stage_rows(&loads, 1);
    g.staged_rows("stage", "0", "0", 1);
    let all_feeds: Vec<usize> = passes.feeds.iter().flatten().copied().collect();
    // Sums with a single nonzero element need no partials; a reduction without rounding needs one per warp.
    let (picks, sums): (Vec<usize>, Vec<usize>) = all_feeds.into_iter().partition(|i| g.picks(*i).is_some());
    let exact = |i: usize| matches!(analysis.code(i), Code::ReduceRow(ReduceFn::Max | ReduceFn::Min, _));
    for &i in &picks {
        g.text.line(format!("__shared__ f32 pick{i}[2];"));
    }
    for &i in &sums {
        let (c, cells) = (expr::computed(g.dtype(i)), 8 * if exact(i) { teams } else { chunks });
        g.text.line(format!("__shared__ {c} part{i}[2][{cells}];"));
    }
    // A thread begins at its own column, so its first pack needs no guard; nor do further packs of a whole block.
    let full = packs == 1 || cols.is_multiple_of(BLOCK);
    let indexing = Indexing {
        decl: g.walked(t, format!("b + k * {}", 32 * v), g.ragged()),
        guard: if full { "true" } else { "at < end" }.into(),
        partial: g.ragged(),
        full,
        columns: OCTET,
    };
    type Step<'s> = &'s mut dyn FnMut(&mut Emitter, usize, &Indexing);
    let each_chunk =
        |g: &mut Emitter, begin: &dyn Fn(&mut Emitter), step: Step, end: &dyn Fn(&mut Emitter)| match &prefetch {
            Some(h) => h.each_chunk(g, begin, step, end),
            None => {
                g.text.open(format!("for ({t} m = team; m < {chunks}; m += {teams})"));
                g.text.line(format!(
                    "const {t} begin = m * {CHUNK}, end = begin + {CHUNK} < cols ? begin + {CHUNK} : cols;"
                ));
                begin(g);
                g.text.open(format!("for ({t} b = begin + origin; b < end; b += {})", 8 * BLOCK));
                step(g, packs, &indexing);
                g.text.close();
                end(g);
                g.text.close();
            }
        };
    let load_next_row = |g: &mut Emitter| {
        let step: Step = match prefetch.is_some() {
            true => &mut |g, packs, indexing| g.prefetch_registers(packs, indexing, "f"),
            false => &mut |g, packs, indexing| g.cp_async(packs, indexing, "f", "stage"),
        };
        each_chunk(g, &|_| (), step, &|_| ());
    };

    let position = g.position();
    g.text.line(format!("const {position} first = block;"));
    g.row_begin("first", "f");
    if let Some(h) = &prefetch {
        h.declare(&mut g);
    }
    load_next_row(&mut g);
    g.text.line("u32 flip = 0;");
    g.text.open(format!("for ({position} row = first; row < rows; row += blocks, flip ^= 1)"));
    g.text.line("const bool live = true, more = row + blocks < rows;");
    g.text.line(format!("const {position} next = more ? row + blocks : row;"));
    g.row_start(&set);
    g.row_begin("next", "f");
    g.prefetch_l2_rows("more && threadIdx.x == 0", "f");
    g.row_maps(&set, 0);
    if prefetch.is_none() {
        g.text.line("cp_async_wait_all();");
    }
    let owner = format!("at / {CHUNK} % {teams} * {TEAM} + at / {BLOCK} % 8 * 32 + at % {} / {v}", 32 * v);
    let mut declared = BTreeSet::new();
    for d in 0..passes.feeds.len() {
        let (feeds, stores) = (&passes.feeds[d], &passes.stores[d]);
        let kept = kept.filter(|_| g.intermediate.is_some());
        let live_out: BTreeSet<usize> = kept.iter().filter(|k| k.1 == d).map(|k| k.0.reg).collect();
        let kept_before: BTreeSet<usize> = kept.iter().filter(|k| k.1 < d).map(|k| k.0.reg).collect();
        let (assumed_false, columns) = smem_intermediates::columns(analysis, passes, &g, d, &picks);
        let asked = LoopWork { feeds, stores, live_in: &kept_before, assumed_false: &assumed_false };
        for c in &columns {
            if declared.insert(c.name) {
                c.declare(&mut g, &owner);
            }
            c.before(&mut g, &asked);
        }
        let walked: Vec<usize> = feeds.iter().copied().filter(|i| !picks.contains(i)).collect();
        if !walked.is_empty() || !stores.is_empty() || !live_out.is_empty() || d == last {
            let (once, by_chunk): (Vec<usize>, Vec<usize>) = walked.iter().partition(|i| exact(**i));
            let (half2_source, single): (Vec<usize>, Vec<usize>) =
                once.iter().partition(|i| g.half2_source(**i).is_some());
            let half2_source =
                if by_chunk.is_empty() && single.is_empty() && stores.is_empty() { half2_source } else { vec![] };
            for &i in once.iter().filter(|i| !half2_source.contains(i)) {
                g.partial(i, OCTET);
            }
            for &i in &half2_source {
                g.half2_init(i);
            }
            let feeds: Vec<usize> = walked.iter().copied().filter(|i| !half2_source.contains(i)).collect();
            let fold = |g: &mut Emitter, i: usize, at: &str| {
                let (f, c) = (expr::functor(g.reduction(i)), expr::computed(g.dtype(i)));
                g.text.line(format!("const {c} w{i} = reduce_lanes<{f}, {v}, 32>(a{i});"));
                g.text.line(format!("if (lane == 0) part{i}[flip][8 * {at} + warp] = w{i};"));
            };
            let mut step = |g: &mut Emitter, packs: usize, indexing: &Indexing| {
                if !feeds.is_empty() || !stores.is_empty() || !live_out.is_empty() {
                    let (live_in, live_out, feeds, assumed_false) =
                        (&kept_before, &live_out, &feeds[..], &assumed_false);
                    g.loop_nest(&LoopNest { packs, indexing, live_in, live_out, feeds, stores, assumed_false });
                }
                for &i in &half2_source {
                    g.half2_combine(i, packs, indexing);
                }
                if d == last && prefetch.is_none() {
                    g.text.open("if (more)");
                    g.cp_async(packs, indexing, "f", "stage");
                    g.text.close();
                }
            };
            let begin = |g: &mut Emitter| g.partials(&by_chunk);
            let end = |g: &mut Emitter| by_chunk.iter().for_each(|i| fold(g, *i, "m"));
            each_chunk(&mut g, &begin, &mut step, &end);
            for &i in &half2_source {
                g.half2_finish(i);
            }
            once.iter().for_each(|i| fold(&mut g, *i, "team"));
        }
        for c in &columns {
            c.after(&mut g, &asked);
        }
        // Partial results are double-buffered by row, so one barrier per row suffices.
        if !feeds.is_empty() {
            g.text.line("__syncthreads();");
        }
        // No later pass reads the row, so the next one can be loaded.
        if prefetch.is_some() && !live_out.is_empty() {
            load_next_row(&mut g);
        }
        for &i in feeds {
            let (d, f) = (g.dtype(i), expr::functor(g.reduction(i)));
            if g.picks(i).is_some() {
                let name = columns.iter().find(|c| c.picks(&g, i)).map_or(i, |c| c.name);
                // The sum includes zeros, which turn -0 into +0.
                let x = expr::rounded(d, format!("0.0f + pick{i}[flip]"));
                g.text.line(format!("const f32 r{i} = column{name} < cols ? {x} : 0.0f;"));
                continue;
            }
            let (c, id) = (expr::computed(d), expr::identity(g.reduction(i), d));
            let x = match exact(i) {
                true => format!("reduce_exact<{f}, {}>(part{i}[flip], {id})", 8 * teams),
                false => format!("reduce_chunks<{f}, {chunks}>(part{i}[flip], {id})"),
            };
            g.text.line(format!("const {c} r{i} = {};", expr::rounded(d, x)));
        }
        g.row_maps(&set, d + 1);
    }
    g.save(saved, rows, scratch, "threadIdx.x == 0");
    if analysis.stores(Level::Row).next().is_some() {
        g.text.open("if (threadIdx.x == 0)");
        g.row_stores();
        g.text.close();
    }
    g.text.close();
    let threads = teams * TEAM;
    let out = g.template("row_smem", rows.min(resident * props.sms as usize), threads, threads);
    Some(LaunchTemplate { resident: resident as u32, shared_bytes: shared_bytes as u32, ..out })
}

/// Teams per block, with at most `most` per multiprocessor. Balances the chunks over teams; three teams suffice to hide
/// latency.
fn teams(cols: usize, resident: usize, most: usize) -> usize {
    let busy = |teams: usize| {
        let of = |team: usize| {
            (team..reduction_order::chunks(cols)).step_by(teams).map(|m| CHUNK.min(cols - m * CHUNK)).sum()
        };
        let longest: usize = (0..teams).map(of).max().unwrap_or(1);
        // In thousandths.
        1000 * cols / (teams * longest) * (teams * resident).min(3)
    };
    (1..=most / resident).max_by_key(|n| busy(*n)).unwrap_or(1)
}

/// Maximum 4-byte registers per element in one pass.
fn words(analysis: &RegionAnalysis, passes: &Passes, g: &Emitter) -> usize {
    let size = |i: usize| analysis.region.body[i].dtype.compute().size().div_ceil(4);
    let of_pass = |d: usize| {
        let stores: Vec<usize> = passes.stores[d].iter().map(|k| analysis.region.stores[*k].0 as usize).collect();
        let roots = passes.feeds[d].iter().map(|i| analysis.operand(*i)).chain(stores.iter().copied());
        let loads = analysis.closure(roots, |i| analysis.level(i) == Level::Row).into_iter().filter(|i| {
            let load = matches!(analysis.code(*i), Code::Load { .. }) && analysis.level(*i) == Level::Full;
            load && !g.is_one(*i) && !g.is_column_index(*i)
        });
        let all: BTreeSet<usize> = loads.chain(stores).collect();
        all.into_iter().map(size).sum::<usize>()
    };
    (0..passes.feeds.len()).map(of_pass).max().unwrap_or(0).max(1)
}
