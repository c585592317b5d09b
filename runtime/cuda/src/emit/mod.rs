//! Emits CUDA C++ for fused regions.
//!
//! A region becomes one or more launches. Strategies: `map` (elementwise), `transpose` (large transposed copies), `row` (row reductions in registers), `row_smem` (long rows in
//! shared memory), `split_row` (a row over several blocks), `col` (column reductions), `row_col_reduce` (both in one pass). Shared parts:
//! `emitter` (names and sizes), `load` (reads), `loop_nest` (loops over a thread's elements), `cp_async`, `register_prefetch`,
//! `smem_intermediates`, `half2` and `one_hot`. `launch_template` turns text into launches, of one region or of many. The order of
//! additions comes from `schedule::reduction_order`.

mod col;
mod cp_async;
mod emitter;
mod expr;
mod half2;
mod launch_template;
mod load;
mod loop_nest;
mod map;
mod one_hot;
mod register_prefetch;
mod row;
mod row_col_reduce;
mod row_smem;
mod smem_intermediates;
mod split_row;
mod transpose;
mod writer;

pub use expr::function;

use crate::launch::{Props, Work};
use crate::schedule::region_analysis::{RegionAnalysis, overlap};
use launch_template::LaunchTemplate;
use perilune_core::error::Result;
use perilune_plan::ir::{Code, Level, Program, Region, Storage, ValueId};
use std::collections::BTreeSet;

/// The launches of regions with one body: a single region, or all regions of a `Kernel::Multi`.
pub fn regions(program: &Program, regions: &[Region], props: &Props) -> Result<Work> {
    let mut work = Work::default();
    let many = regions.len() > 1;
    if let [r] = regions
        && let Some(launch) = transpose::lower(program, r)
    {
        work.launches.push(launch);
        return Ok(work);
    }
    let mut all: Vec<Vec<LaunchTemplate>> = Vec::new();
    for r in regions.iter().filter(|r| r.numel() > 0 && !r.stores.is_empty()) {
        let mut templates = lower(&RegionAnalysis::new(program, r), props, many, &mut work.scratch_bytes);
        let is_state = |v: ValueId| matches!(program.values[v.0 as usize].storage, Storage::Input(_));
        if r.writes().any(is_state) {
            templates.iter_mut().for_each(|t| t.halts = true);
        }
        all.push(templates);
    }
    if !many {
        work.launches = all.iter().flatten().map(LaunchTemplate::single).collect();
        return Ok(work);
    }
    // Stage by stage: a stage reads what the previous one stored in the workspace. Regions whose texts differ
    // nevertheless (for example in alignment) get separate launches.
    let depth = all.iter().map(Vec::len).max().unwrap_or(0);
    for k in 0..depth {
        let mut groups: Vec<Vec<&LaunchTemplate>> = Vec::new();
        for s in all.iter().filter_map(|list| list.get(k)) {
            match groups.iter_mut().find(|g| g[0].alike(s)) {
                Some(g) => g.push(s),
                None => groups.push(vec![s]),
            }
        }
        work.launches.extend(groups.into_iter().map(|g| match g[..] {
            [one] => one.single(),
            _ => LaunchTemplate::many(&g),
        }));
    }
    Ok(work)
}

fn lower(analysis: &RegionAnalysis, props: &Props, many: bool, scratch: &mut usize) -> Vec<LaunchTemplate> {
    let by_col = analysis.has(Level::Col);
    // The row strategies also pad rows with zeros.
    let by_row = analysis.has(Level::Row) || (!by_col && analysis.full_stores().any(|k| analysis.pitch(k).is_some()));
    match (by_row, by_col) {
        (false, false) => map::lower(analysis, props, many),
        (true, false) => row::lower(analysis, props, many, &BTreeSet::new(), scratch),
        (false, true) => {
            let stores: Vec<usize> = analysis.full_stores().collect();
            col::lower(analysis, &stores, &split_row::Saved::new(), scratch)
        }
        (true, true) => {
            let both = if many { None } else { row_col_reduce::lower(analysis, props, scratch) };
            both.unwrap_or_else(|| rows_then_columns(analysis, props, many, scratch))
        }
    }
}

/// The stores that overwrite what the second launch loads: for the columns, and for such stores themselves.
fn late_stores(analysis: &RegionAnalysis, cols: &[usize]) -> Vec<usize> {
    let mut late: Vec<usize> = Vec::new();
    loop {
        let roots = late.iter().map(|k| analysis.region.stores[*k].0 as usize);
        let loaded: Vec<ValueId> = split_row::dependencies(analysis, cols.iter().copied().chain(roots))
            .into_iter()
            .filter_map(|i| match analysis.code(i) {
                Code::Load { source, .. } => source.value(),
                _ => None,
            })
            .collect();
        let overwrites = |k: &usize| loaded.iter().any(|v| overlap(analysis.program, *v, analysis.region.stores[*k].1));
        let found: Vec<usize> = analysis.full_stores().filter(overwrites).collect();
        if found.len() == late.len() {
            return late;
        }
        late = found;
    }
}

/// Rows first, then columns, which recompute their operands from the saved results of row reductions. Stores that
/// overwrite what the second launch loads wait for it.
fn rows_then_columns(analysis: &RegionAnalysis, props: &Props, many: bool, scratch: &mut usize) -> Vec<LaunchTemplate> {
    let program = analysis.program;
    let cols: Vec<usize> = analysis.needed().into_iter().filter(|i| analysis.level(*i) == Level::Col).collect();
    let late = late_stores(analysis, &cols);
    let late_roots = late.iter().map(|k| analysis.region.stores[*k].0 as usize);
    let saved: BTreeSet<usize> = split_row::dependencies(analysis, cols.into_iter().chain(late_roots))
        .into_iter()
        .filter(|i| matches!(analysis.code(*i), Code::ReduceRow(..)))
        .collect();
    let mut first = analysis.region.clone();
    first.stores = (0..analysis.region.stores.len())
        .filter(|k| !late.contains(k) && analysis.level(analysis.region.stores[*k].0 as usize) != Level::Col)
        .map(|k| analysis.region.stores[k])
        .collect();
    // Saved values count as needed, even if no store needs them.
    let first = RegionAnalysis { roots: saved.clone(), ..RegionAnalysis::new(program, &first) };
    let at = *scratch;
    let mut out = row::lower(&first, props, many, &saved, scratch);
    let places = saved
        .iter()
        .enumerate()
        .map(|(n, i)| (*i, split_row::cell(at, n, analysis.region.batch * analysis.region.rows)));
    out.extend(col::lower(analysis, &late, &places.collect(), scratch));
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use perilune_core::ops::ReduceFn;
    use perilune_core::ops::elementwise::MapFn;
    use perilune_core::{DType, Layout, Shape};
    use perilune_plan::ir::{Instr, Origin, Source, Value};
    use std::sync::Arc;

    /// A gradient of rows and of columns, stored in the place of `old`, and a sum with `old` in the place of `x`, which the columns load:
    /// the sum waits for the columns, and so does what would overwrite its summand.
    #[test]
    fn a_store_over_what_a_late_store_loads_is_late_too() {
        let (rows, cols) = (4, 8);
        let shape = Shape::of(&[rows, cols]);
        let value = |at: usize| {
            let storage = Storage::Arena(at * shape.numel() * 4);
            Value { shape, dtype: DType::F32, storage, origin: Origin::NONE }
        };
        // x, old, and the two results in their memory.
        let [x, old, dx, sum] = [0, 1, 2, 3].map(ValueId);
        let column = Value { shape: Shape::of(&[cols]), ..value(4) };
        let program = |of_dx: usize| Program {
            values: vec![value(0), value(1), value(of_dx), value(0), column.clone()],
            kernels: Vec::new(),
            in_flight: Vec::new(),
            inputs: Vec::new(),
            outputs: Vec::new(),
            slots: Vec::new(),
            starts: Vec::new(),
            results: Vec::new(),
            arena_bytes: 0,
            live_bytes: 0,
            exchanges: Vec::new(),
            stages: Vec::new(),
            route: Default::default(),
        };
        let full = |code: Code, level| Instr { code, dtype: DType::F32, level, origin: Origin::NONE };
        let load = |v| Code::Load { source: Source::Value(v), layout: Arc::new(Layout::contiguous(shape).collapse()) };
        let body = vec![
            full(load(x), Level::Full),
            full(load(old), Level::Full),
            full(Code::ReduceRow(ReduceFn::Sum, 0), Level::Row),
            full(Code::Broadcast(2), Level::Full),
            full(Code::Map(MapFn::Mul, [0, 3].into_iter().collect()), Level::Full),
            full(Code::Map(MapFn::Add, [4, 1].into_iter().collect()), Level::Full),
            full(Code::ReduceCol(ReduceFn::Sum, 0), Level::Col),
        ];
        let stores = vec![(4, dx), (5, sum), (6, ValueId(4))];
        let region = Region { batch: 1, rows, cols, body, stores, origin: Origin::NONE };
        let late = |of_dx: usize| late_stores(&RegionAnalysis::new(&program(of_dx), &region), &[6]);
        assert_eq!(late(1), [0, 1]);
        assert_eq!(late(2), [1], "dx has memory of its own");
    }
}
