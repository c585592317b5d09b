//! Rows too long for registers that fit in shared memory: memory is read once, however many passes there are.
//!
//! A few blocks of threads on each multiprocessor take row after row. Each thread copies to shared memory what it alone
//! reads there, in every pass, so that nobody waits for anybody: `cp.async` brings a pack of the next row as soon as the last
//! pass is through with the one in its place, and one block computes while the other's row arrives. A barrier stands only
//! where a reduction joins the warps.

use super::body::Body;
use super::emit::{Emit, Pass, Place};
use super::expr;
use super::row::{Passes, row_pack};
use super::space::{self, BLOCK, CHUNK, OCTET};
use super::stage::Stage;
use crate::launch::Props;
use perilune_plan::ir::{Code, Level};
use std::collections::BTreeSet;

/// Threads that share a chunk.
const TEAM: usize = 256;
/// Chunks that one warp can join.
const MAX_CHUNKS: usize = 32;
/// Registers for the elements that a thread works on at a time: of the 64 that it has where 1,024 share a multiprocessor,
/// and of 128.
const ROOM: [usize; 2] = [24, 80];
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
    let partials: usize = passes.feeds.iter().flatten().map(|i| 2 * 8 * chunks * g.dtype(*i).compute().size()).sum();
    let bytes = loads.iter().map(|i| g.staged_bytes(*i)).sum::<usize>();
    let (words, all) = (words(body, passes, &g), props.shared_bytes as usize + RESERVED);
    let each = bytes + partials + RESERVED;
    if loads.is_empty() || each > all || words * OCTET > ROOM[1] {
        return None;
    }
    let packs = OCTET / v;
    let light = words * OCTET <= ROOM[0] && packs <= 2;
    let resident = if 2 * each <= all { 2 } else { 1 };
    let teams = if light { 4 / resident } else { 2 / resident };
    let t = g.position();
    g.text.line("const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 8, team = threadIdx.x / 256;");
    g.text.line(format!("const {t} origin = warp * {BLOCK} + lane * {v};"));
    let shared_bytes = g.stage_rows(&loads, 1);
    g.staged_rows("stage", "0", "0", 1);
    // What one thread finds needs no partials.
    let picks: Vec<usize> = passes.feeds.iter().flatten().copied().filter(|i| g.picks(*i).is_some()).collect();
    for &i in &picks {
        g.text.line(format!("__shared__ f32 pick{i}[2];"));
    }
    for &i in passes.feeds.iter().flatten().filter(|i| !picks.contains(i)) {
        let c = expr::computed(g.dtype(i));
        g.text.line(format!("__shared__ {c} part{i}[2][{}];", 8 * chunks));
    }
    // A thread begins at its own column, so that its first pack needs no guard; nor does another of a whole block.
    let decl = format!("const {t} at = b + k * {};", 32 * v);
    let full = packs == 1 || cols.is_multiple_of(BLOCK);
    let guard = if full { "true" } else { "at < end" };
    let place = Place { decl: vec![decl], guard: guard.into(), partial: false, full, columns: OCTET };
    let chunk = |g: &mut Emit| {
        g.text.open(format!("for ({t} m = team; m < {chunks}; m += {teams})"));
        g.text.line(format!("const {t} begin = m * {CHUNK}, end = begin + {CHUNK} < cols ? begin + {CHUNK} : cols;"));
    };
    let walk = |g: &mut Emit| g.text.open(format!("for ({t} b = begin + origin; b < end; b += {})", 8 * BLOCK));

    g.text.line(format!("const {t} first = block;"));
    g.row_begin("first", "f");
    chunk(&mut g);
    walk(&mut g);
    g.copy_ahead(packs, &place, "f", "stage");
    g.text.close();
    g.text.close();
    g.text.line("u32 flip = 0;");
    g.text.open(format!("for ({t} row = first; row < rows; row += blocks, flip ^= 1)"));
    g.text.line("const bool live = true, more = row + blocks < rows;");
    g.text.line(format!("const {t} next = more ? row + blocks : row;"));
    g.row_start(&set);
    g.row_begin("next", "f");
    g.row_maps(&set, 0);
    g.text.line("copied();");
    let none = BTreeSet::new();
    for d in 0..passes.feeds.len() {
        let (feeds, stores) = (&passes.feeds[d], &passes.stores[d]);
        if !feeds.is_empty() || !stores.is_empty() {
            chunk(&mut g);
            let parts: Vec<usize> = feeds.iter().copied().filter(|i| !picks.contains(i)).collect();
            g.partials(&parts);
            walk(&mut g);
            g.pass(&Pass { packs, place: &place, held: &none, keep: &none, feeds, stores, picks: &picks });
            if d == last {
                g.text.open("if (more)");
                g.copy_ahead(packs, &place, "f", "stage");
                g.text.close();
            }
            g.text.close();
            for &i in feeds.iter().filter(|i| !picks.contains(i)) {
                let (f, c) = (expr::functor(g.reduction(i)), expr::computed(g.dtype(i)));
                g.text.line(format!("const {c} w{i} = fold_lanes<{f}, {v}, 32>(a{i});"));
                g.text.line(format!("if (lane == 0) part{i}[flip][8 * m + warp] = w{i};"));
            }
            g.text.close();
        }
        // The partials of a row lie where those of the last but one did: a barrier was between.
        if !feeds.is_empty() {
            g.text.line("__syncthreads();");
        }
        for &i in feeds {
            let (d, f) = (g.dtype(i), expr::functor(g.reduction(i)));
            if let Some(found) = g.picks(i) {
                // Summed with zeros, which -0 does not outlive.
                g.text.line(format!("f32 r{i} = 0.0f;"));
                g.text.open("");
                g.text.line(format!("const {t} at = 0;"));
                let x = expr::rounded(d, format!("0.0f + pick{i}[flip]"));
                g.text.line(format!("if ({found}cols) r{i} = {x};"));
                g.text.close();
                continue;
            }
            let (c, id) = (expr::computed(d), expr::identity(g.reduction(i), d));
            let x = expr::rounded(d, format!("fold_chunks<{f}, {chunks}>(part{i}[flip], {id})"));
            g.text.line(format!("const {c} r{i} = {x};"));
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
