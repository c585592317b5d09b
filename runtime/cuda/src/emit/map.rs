//! Emits elementwise regions: each thread computes a vector of adjacent elements.
//!
//! If a thread loads few bytes and computes much, it processes several vectors at a time, issues all their loads before
//! the first use, and strides over the elements with the grid.

use super::emitter::{Emitter, vector_width};
use super::launch_template::LaunchTemplate;
use super::loop_nest::{Indexing, LoopNest};
use crate::launch::Props;
use crate::schedule::region_analysis::RegionAnalysis;
use perilune_core::ops::elementwise::MapFn;
use perilune_plan::ir::{Code, Level, Source};
use std::collections::BTreeSet;

const THREADS: usize = 256;
/// Bytes that a compute-heavy thread should have in flight before it waits; one pack suffices at half of that.
const IN_FLIGHT: usize = 64;
/// Minimum blocks per multiprocessor in that case.
const RESIDENT: u32 = 4;
/// Minimum work of an element that counts as heavy.
const HEAVY: usize = 16;
/// Maximum work of one thread's elements; beyond it, more packs only lengthen the text.
const MAX_WORK: usize = 1024;

pub fn lower(analysis: &RegionAnalysis, props: &Props, many: bool) -> Vec<LaunchTemplate> {
    let n = analysis.region.numel();
    let set = analysis.needed();
    let most = if set.iter().all(|i| analysis.region.body[*i].dtype.size() == 1) { 16 } else { 8 };
    let v = vector_width(analysis, &set, most);
    let mut g = Emitter::new(analysis, None, v);
    let stores: Vec<usize> = analysis.full_stores().collect();
    let unroll = if stores.len() > 1 { 1 } else { unroll(analysis, &set, v) };
    g.declare("n", n);
    g.prologue(&set);
    g.row_start(&set);
    let t = g.position();
    g.text.line(format!("const {t} step = ({t})blocks * {THREADS};"));
    g.text.open(format!(
        "for ({t} first = ({t})block * {THREADS} + threadIdx.x; first * {v} < n; first += step * {unroll})"
    ));
    let partial = !n.is_multiple_of(v);
    let mut decl = vec![format!("const {t} at = (first + k * step) * {v};")];
    if partial {
        decl.push(format!("const {t} left = n - at;"));
    }
    let indexing = Indexing {
        decl,
        guard: "at < n".into(),
        partial,
        full: false,
        columns: crate::schedule::reduction_order::OCTET,
    };
    let none = BTreeSet::new();
    g.loop_nest(&LoopNest {
        packs: unroll,
        indexing: &indexing,
        live_in: &none,
        live_out: &none,
        feeds: &[],
        stores: &stores,
        assumed_false: &none,
    });
    g.text.close();
    let packs = n.div_ceil(v);
    let blocks = match many || unroll == 1 {
        true => packs.div_ceil(THREADS * unroll),
        false => packs.div_ceil(THREADS).min(props.sms as usize * 16),
    };
    let stage = g.template("map", blocks, THREADS, THREADS);
    // Adjacent packs must not reduce the number of warps that hide their arithmetic.
    let resident = if unroll > 1 { RESIDENT } else { 1 };
    vec![LaunchTemplate { resident, ..stage }]
}

/// Number of packs that a thread processes at a time.
fn unroll(analysis: &RegionAnalysis, set: &BTreeSet<usize>, v: usize) -> usize {
    let (mut bytes, mut work) = (0, 0);
    for &i in set {
        let instr = &analysis.region.body[i];
        match &instr.code {
            Code::Load { source, layout } if source.value().is_some() && layout.strides().iter().any(|s| *s != 0) => {
                bytes += v * instr.dtype.size();
            }
            Code::Load { source: Source::Uniform { .. }, .. } => work += 40,
            // These take hundreds of instructions each, for rare arguments: NVRTC takes 0.45 s for four vectors, 0.2 s
            // for one.
            Code::Map(MapFn::Sin | MapFn::Cos | MapFn::Tan | MapFn::Pow, _) => return 1,
            Code::Map(f, _) if instr.level == Level::Full => work += f.flops(),
            _ => work += 1,
        }
    }
    if 2 * bytes >= IN_FLIGHT || work < HEAVY {
        return 1;
    }
    let wanted = IN_FLIGHT.checked_div(bytes).unwrap_or(1).clamp(1, 4);
    let room = (MAX_WORK / (work.max(1) * v)).max(1);
    // 1, 2 or 4, to limit the number of distinct texts.
    [4, 2, 1].into_iter().find(|u| *u <= wanted && *u <= room).unwrap_or(1)
}
