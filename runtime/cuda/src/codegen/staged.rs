//! Rows too long for registers that fit in shared memory: memory is read once, however many passes there are.
//!
//! A few blocks of threads on each multiprocessor take row after row. Each thread copies to shared memory what it alone
//! reads there, in every pass, so that nobody waits for anybody: `cp.async` brings a pack of the next row as soon as the last
//! pass is through with the one in its place, and one block computes while the other's row arrives. A barrier stands only
//! where a reduction joins the warps.
//!
//! Rows of 16-bit floats with `exp` in them wait in registers instead (`held`), and shared memory keeps `exp` (`keep`). What
//! holds for one column only is left to the thread that has it (`element`).

use super::body::Body;
use super::element::Asked;
use super::emit::Emit;
use super::expr;
use super::held::Held;
use super::keep;
use super::pass::{Pass, Place};
use super::row::{Passes, row_pack};
use super::space::{self, BLOCK, CHUNK, OCTET};
use super::stage::Stage;
use crate::launch::Props;
use perilune_core::ops::ReduceFn;
use perilune_plan::ir::{Code, Level};
use std::collections::BTreeSet;

/// Threads that share a chunk.
const TEAM: usize = 256;
/// Chunks that one warp can join.
const MAX_CHUNKS: usize = 32;
/// Teams of a multiprocessor.
const MAX_TEAMS: usize = 4;
/// Registers for the elements that a thread works on at a time: of the 64 that it has where 1,024 share a multiprocessor,
/// and of 128.
const ROOM: [usize; 2] = [24, 80];
/// Registers of a multiprocessor.
const REGISTERS: usize = 65536;
/// Shared memory of a multiprocessor that a block takes for itself.
const RESERVED: usize = 1024;

/// One launch for all rows, or `None` where they do not fit or the order of `space.rs` is not that of eight warps.
pub fn stage(
    body: &Body,
    props: &Props,
    passes: &Passes,
    saved: &BTreeSet<usize>,
    scratch: &mut usize,
) -> Option<Stage> {
    let r = body.region;
    let (rows, cols) = (r.batch * r.rows, r.cols);
    let chunks = space::chunks(cols);
    let set = body.needed();
    let v = row_pack(body, &set);
    let last = (0..passes.feeds.len()).rfind(|d| !passes.feeds[*d].is_empty() || !passes.stores[*d].is_empty())?;
    if space::warps(cols) * 32 != TEAM || chunks > MAX_CHUNKS {
        return None;
    }
    let mut g = Emit::new(body, Some(cols), v);
    g.declare("rows", rows);
    g.declare("cols", cols);
    g.prologue(&set);
    let of_row = |i: &usize| matches!(body.code(*i), Code::Load { .. }) && body.level(*i) == Level::Full;
    let loads: Vec<usize> =
        set.iter().copied().filter(|i| of_row(i) && g.can_stage(*i) && g.differs_by_row(*i)).collect();
    let cells = 8 * chunks.max(MAX_TEAMS);
    let partials: usize = passes.feeds.iter().flatten().map(|i| 2 * cells * g.dtype(*i).compute().size()).sum();
    let (words, all) = (words(body, passes, &g), props.shared_bytes as usize + RESERVED);
    let each = |g: &Emit| loads.iter().map(|i| g.staged_bytes(*i)).sum::<usize>() + partials + RESERVED;
    if loads.is_empty() || each(&g) > all || words * OCTET > ROOM[1] {
        return None;
    }
    let packs = OCTET / v;
    let light = words * OCTET <= ROOM[0] && packs <= 2;
    let most = if light { MAX_TEAMS } else { 2 };
    // Kept where a row fits once more as f32 and itself in registers: shared memory for both is slower than `exp` again.
    let kept = keep::kept(body, passes, &g, &loads);
    g.kept = kept.map(|k| k.0);
    let resident = |g: &Emit| if 2 * each(g) <= all { 2 } else { 1 };
    let mut held = None;
    if light && g.kept.is_some() && each(&g) <= all {
        let (resident, room) = (resident(&g), |teams: usize| REGISTERS / (teams * TEAM));
        let teams = teams(cols, resident, most);
        held = Held::new(&g, props, &loads, cols, teams, room(teams * resident)).map(|h| (h, teams));
    }
    if held.is_none() {
        g.kept = None;
    }
    let resident = resident(&g);
    let teams = held.as_ref().map_or(most / resident, |h| h.1);
    let held = held.map(|h| h.0);
    g.in_registers = held.is_some();
    // Signed, so that compilers see what differs by a constant only.
    let t = g.index_type();
    g.text.line("const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 8, team = threadIdx.x / 256;");
    g.text.line(format!("const {t} origin = warp * {BLOCK} + lane * {v};"));
    let shared_bytes = g.stage_rows(&loads, 1);
    g.staged_rows("stage", "0", "0", 1);
    let all_feeds: Vec<usize> = passes.feeds.iter().flatten().copied().collect();
    // What one thread finds needs no partials, and what rounds nothing one of each warp.
    let (picks, sums): (Vec<usize>, Vec<usize>) = all_feeds.into_iter().partition(|i| g.picks(*i).is_some());
    let exact = |i: usize| matches!(body.code(i), Code::ReduceRow(ReduceFn::Max | ReduceFn::Min, _));
    for &i in &picks {
        g.text.line(format!("__shared__ f32 pick{i}[2];"));
    }
    for &i in &sums {
        let (c, cells) = (expr::computed(g.dtype(i)), 8 * if exact(i) { teams } else { chunks });
        g.text.line(format!("__shared__ {c} part{i}[2][{cells}];"));
    }
    // A thread begins at its own column, so that its first pack needs no guard; nor does another of a whole block.
    let full = packs == 1 || cols.is_multiple_of(BLOCK);
    let place = Place {
        decl: g.walked(t, format!("b + k * {}", 32 * v), g.ragged()),
        guard: if full { "true" } else { "at < end" }.into(),
        partial: g.ragged(),
        full,
        columns: OCTET,
    };
    type Step<'s> = &'s mut dyn FnMut(&mut Emit, usize, &Place);
    let each_chunk = |g: &mut Emit, begin: &dyn Fn(&mut Emit), step: Step, end: &dyn Fn(&mut Emit)| match &held {
        Some(h) => h.each_chunk(g, begin, step, end),
        None => {
            g.text.open(format!("for ({t} m = team; m < {chunks}; m += {teams})"));
            g.text
                .line(format!("const {t} begin = m * {CHUNK}, end = begin + {CHUNK} < cols ? begin + {CHUNK} : cols;"));
            begin(g);
            g.text.open(format!("for ({t} b = begin + origin; b < end; b += {})", 8 * BLOCK));
            step(g, packs, &place);
            g.text.close();
            end(g);
            g.text.close();
        }
    };
    let bring = |g: &mut Emit| {
        let step: Step = match held.is_some() {
            true => &mut |g, packs, place| g.fetch_held(packs, place, "f"),
            false => &mut |g, packs, place| g.copy_ahead(packs, place, "f", "stage"),
        };
        each_chunk(g, &|_| (), step, &|_| ());
    };

    let position = g.position();
    g.text.line(format!("const {position} first = block;"));
    g.row_begin("first", "f");
    if let Some(h) = &held {
        h.declare(&mut g);
    }
    bring(&mut g);
    g.text.line("u32 flip = 0;");
    g.text.open(format!("for ({position} row = first; row < rows; row += blocks, flip ^= 1)"));
    g.text.line("const bool live = true, more = row + blocks < rows;");
    g.text.line(format!("const {position} next = more ? row + blocks : row;"));
    g.row_start(&set);
    g.row_begin("next", "f");
    g.fetch_rows("more && threadIdx.x == 0", "f");
    g.row_maps(&set, 0);
    if held.is_none() {
        g.text.line("copied();");
    }
    let owner = format!("at / {CHUNK} % {teams} * {TEAM} + at / {BLOCK} % 8 * 32 + at % {} / {v}", 32 * v);
    let mut declared = BTreeSet::new();
    for d in 0..passes.feeds.len() {
        let (feeds, stores) = (&passes.feeds[d], &passes.stores[d]);
        let kept = kept.filter(|_| g.kept.is_some());
        let keep: BTreeSet<usize> = kept.iter().filter(|k| k.1 == d).map(|k| k.0.reg).collect();
        let kept_before: BTreeSet<usize> = kept.iter().filter(|k| k.1 < d).map(|k| k.0.reg).collect();
        let (apart, columns) = keep::columns(body, passes, &g, d, &picks);
        let asked = Asked { feeds, stores, held: &kept_before, apart: &apart };
        for c in &columns {
            if declared.insert(c.name) {
                c.declare(&mut g, &owner);
            }
            c.before(&mut g, &asked);
        }
        let walked: Vec<usize> = feeds.iter().copied().filter(|i| !picks.contains(i)).collect();
        if !walked.is_empty() || !stores.is_empty() || !keep.is_empty() || d == last {
            let (once, by_chunk): (Vec<usize>, Vec<usize>) = walked.iter().partition(|i| exact(**i));
            let (pairs, single): (Vec<usize>, Vec<usize>) = once.iter().partition(|i| g.pairs(**i).is_some());
            let pairs = if by_chunk.is_empty() && single.is_empty() && stores.is_empty() { pairs } else { vec![] };
            for &i in once.iter().filter(|i| !pairs.contains(i)) {
                g.partial(i, OCTET);
            }
            for &i in &pairs {
                g.start_pairs(i);
            }
            let feeds: Vec<usize> = walked.iter().copied().filter(|i| !pairs.contains(i)).collect();
            let fold = |g: &mut Emit, i: usize, at: &str| {
                let (f, c) = (expr::functor(g.reduction(i)), expr::computed(g.dtype(i)));
                g.text.line(format!("const {c} w{i} = fold_lanes<{f}, {v}, 32>(a{i});"));
                g.text.line(format!("if (lane == 0) part{i}[flip][8 * {at} + warp] = w{i};"));
            };
            let mut step = |g: &mut Emit, packs: usize, place: &Place| {
                if !feeds.is_empty() || !stores.is_empty() || !keep.is_empty() {
                    let (held, keep, feeds, apart) = (&kept_before, &keep, &feeds[..], &apart);
                    g.pass(&Pass { packs, place, held, keep, feeds, stores, apart });
                }
                for &i in &pairs {
                    g.join_pairs(i, packs, place);
                }
                if d == last && held.is_none() {
                    g.text.open("if (more)");
                    g.copy_ahead(packs, place, "f", "stage");
                    g.text.close();
                }
            };
            let begin = |g: &mut Emit| g.partials(&by_chunk);
            let end = |g: &mut Emit| by_chunk.iter().for_each(|i| fold(g, *i, "m"));
            each_chunk(&mut g, &begin, &mut step, &end);
            for &i in &pairs {
                g.end_pairs(i);
            }
            once.iter().for_each(|i| fold(&mut g, *i, "team"));
        }
        for c in &columns {
            c.after(&mut g, &asked);
        }
        // The partials of a row lie where those of the last but one did: a barrier was between.
        if !feeds.is_empty() {
            g.text.line("__syncthreads();");
        }
        // No later pass reads the row: the next one can come.
        if held.is_some() && !keep.is_empty() {
            bring(&mut g);
        }
        for &i in feeds {
            let (d, f) = (g.dtype(i), expr::functor(g.reduction(i)));
            if g.picks(i).is_some() {
                let name = columns.iter().find(|c| c.picks(&g, i)).map_or(i, |c| c.name);
                // Summed with zeros, which -0 does not outlive.
                let x = expr::rounded(d, format!("0.0f + pick{i}[flip]"));
                g.text.line(format!("const f32 r{i} = column{name} < cols ? {x} : 0.0f;"));
                continue;
            }
            let (c, id) = (expr::computed(d), expr::identity(g.reduction(i), d));
            let x = match exact(i) {
                true => format!("fold_exact<{f}, {}>(part{i}[flip], {id})", 8 * teams),
                false => format!("fold_chunks<{f}, {chunks}>(part{i}[flip], {id})"),
            };
            g.text.line(format!("const {c} r{i} = {};", expr::rounded(d, x)));
        }
        g.row_maps(&set, d + 1);
    }
    g.save(saved, rows, scratch, "threadIdx.x == 0");
    if body.stores(Level::Row).next().is_some() {
        g.text.open("if (threadIdx.x == 0)");
        g.row_stores();
        g.text.close();
    }
    g.text.close();
    let threads = teams * TEAM;
    let out = g.stage("row_staged", rows.min(resident * props.sms as usize), threads, threads);
    Some(Stage { resident: resident as u32, shared_bytes: shared_bytes as u32, ..out })
}

/// Teams of a block, of at most `most` on a multiprocessor: chunks shared out most evenly, and three teams hide what one
/// alone would wait for.
fn teams(cols: usize, resident: usize, most: usize) -> usize {
    let busy = |teams: usize| {
        let of = |team: usize| (team..space::chunks(cols)).step_by(teams).map(|m| CHUNK.min(cols - m * CHUNK)).sum();
        let longest: usize = (0..teams).map(of).max().unwrap_or(1);
        // In thousandths.
        1000 * cols / (teams * longest) * (teams * resident).min(3)
    };
    (1..=most / resident).max_by_key(|n| busy(*n)).unwrap_or(1)
}

/// Registers of 4 bytes that an element takes at most in one pass.
fn words(body: &Body, passes: &Passes, g: &Emit) -> usize {
    let size = |i: usize| body.region.body[i].dtype.compute().size().div_ceil(4);
    let of_pass = |d: usize| {
        let stores: Vec<usize> = passes.stores[d].iter().map(|k| body.region.stores[*k].0 as usize).collect();
        let roots = passes.feeds[d].iter().map(|i| body.operand(*i)).chain(stores.iter().copied());
        let loads = body.closure(roots, |i| body.level(i) == Level::Row).into_iter().filter(|i| {
            let load = matches!(body.code(*i), Code::Load { .. }) && body.level(*i) == Level::Full;
            load && !g.is_one(*i) && !g.is_ramp(*i)
        });
        let all: BTreeSet<usize> = loads.chain(stores).collect();
        all.into_iter().map(size).sum::<usize>()
    };
    (0..passes.feeds.len()).map(of_pass).max().unwrap_or(0).max(1)
}
