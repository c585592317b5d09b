//! Chooses a costly intermediate (`exp` in softmax) that one pass stores in shared memory for later passes, in place of the staged row.

use super::cp_async::SmemIntermediate;
use super::emitter::Emitter;
use super::expr;
use super::one_hot::{OneHotColumn, group_by_column};
use super::row::Passes;
use crate::schedule::region_analysis::RegionAnalysis;
use perilune_plan::ir::{Code, Level};
use std::collections::BTreeSet;

/// Minimum FLOPs per element for storing a value, which costs one store and one load for every four elements.
const COSTLY: usize = 8;

/// The roots of pass `d`.
pub fn roots(analysis: &RegionAnalysis, passes: &Passes, d: usize) -> Vec<usize> {
    let stores = passes.stores[d].iter().map(|k| analysis.region.stores[*k].0 as usize);
    passes.feeds[d].iter().map(|i| analysis.operand(*i)).chain(stores).collect()
}

/// Selects the costly register that one pass computes and a later one reads again (`exp`, in rows of softmax and
/// cross-entropy), and the pass that computes it. It replaces a staged load that later passes read only through it.
pub fn kept(
    analysis: &RegionAnalysis,
    passes: &Passes,
    g: &Emitter,
    loads: &[usize],
) -> Option<(SmemIntermediate, usize)> {
    let count = passes.feeds.len();
    let dependencies = |roots: Vec<usize>, kept: Option<usize>| {
        analysis.closure(roots, |i| Some(i) == kept || analysis.level(i) == Level::Row)
    };
    let needs: Vec<BTreeSet<usize>> = (0..count).map(|d| dependencies(roots(analysis, passes, d), None)).collect();
    let cost = |i: usize| -> usize {
        let of = |j: &usize| match analysis.code(*j) {
            Code::Map(f, _) if analysis.level(*j) == Level::Full => f.flops(),
            _ => 0,
        };
        dependencies(vec![i], None).iter().map(of).sum()
    };
    let plain = |i: usize| {
        let whole = analysis.level(i) == Level::Full && !g.is_one(i) && !matches!(analysis.code(i), Code::Load { .. });
        let fixed = dependencies(vec![i], None).iter().all(|j| g.column(*j, "0").is_none());
        whole && fixed && expr::computed(g.dtype(i)) == "f32"
    };
    let mut found: Option<(usize, SmemIntermediate, usize)> = None;
    for d in 0..count {
        for &i in needs[d].iter().filter(|i| plain(**i)) {
            let first = needs[..d].iter().all(|n| !n.contains(&i));
            // Read directly, not only through another such register.
            let again = needs[d + 1..].iter().any(|n| n.contains(&i));
            if !first || !again || cost(i) < COSTLY || found.is_some_and(|f| f.0 > cost(i)) {
                continue;
            }
            let late =
                |j: usize| (d + 1..count).any(|e| dependencies(roots(analysis, passes, e), Some(i)).contains(&j));
            let fits = |j: &usize| g.dtype(*j).is_half() && !late(*j);
            if let Some(load) = loads.iter().copied().find(fits) {
                found = Some((cost(i), SmemIntermediate { reg: i, load }, d));
            }
        }
    }
    found.map(|(_, kept, d)| (kept, d))
}

/// Returns the comparisons that hold for one column and can be omitted from pass `d`, since only its reductions in
/// `picks` depend on them, and all columns that need separate treatment.
pub fn columns(
    analysis: &RegionAnalysis,
    passes: &Passes,
    g: &Emitter,
    d: usize,
    picks: &[usize],
) -> (BTreeSet<usize>, Vec<OneHotColumn>) {
    let need = |roots: Vec<usize>| -> BTreeSet<usize> {
        let all = analysis.closure(roots, |i| analysis.level(i) == Level::Row);
        all.into_iter().filter(|i| g.column(*i, "0").is_some()).collect()
    };
    let (one, sums): (Vec<usize>, Vec<usize>) = passes.feeds[d].iter().partition(|i| picks.contains(i));
    let bound = need(sums.iter().map(|i| analysis.operand(*i)).collect());
    let mut out: BTreeSet<usize> = need(roots(analysis, passes, d)).difference(&bound).copied().collect();
    let all: BTreeSet<usize> = out.iter().copied().chain(one.iter().filter_map(|i| g.picks(*i))).collect();
    let groups = group_by_column(g, &all);
    out.retain(|i| !bound.contains(i));
    (out, groups)
}
