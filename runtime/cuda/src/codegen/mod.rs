//! From regions to CUDA text.
//!
//! A region becomes one or more stages, each a launch: a pure map (`map`), rows with all their reductions (`row`, long
//! ones `staged` in shared memory, or over several launches `split`), column reductions (`col`, with those of
//! rows in one walk `both`). `space` fixes the order of additions, `emit`, `load`, `wait` and `pass` write what all of
//! them have in common, `stage` turns text into launches, of one region or of many.

mod body;
mod both;
mod col;
mod element;
mod emit;
mod expr;
mod held;
mod index;
mod keep;
mod load;
mod map;
mod pairs;
mod pass;
mod row;
mod space;
mod split;
mod stage;
mod staged;
mod text;
mod wait;

pub use expr::function;

use crate::launch::{Props, Work};
use body::{Body, overlap};
use perilune_core::error::Result;
use perilune_plan::ir::{Code, Level, Program, Region};
use stage::Stage;
use std::collections::BTreeSet;

/// The launches of regions with one body: one region, or the many of a `Kernel::Multi`.
pub fn regions(program: &Program, regions: &[Region], props: &Props) -> Result<Work> {
    let mut work = Work::default();
    let many = regions.len() > 1;
    let mut all: Vec<Vec<Stage>> = Vec::new();
    for r in regions.iter().filter(|r| r.numel() > 0 && !r.stores.is_empty()) {
        all.push(stages(&Body::new(program, r), props, many, &mut work.scratch_bytes));
    }
    if !many {
        work.launches = all.iter().flatten().map(Stage::single).collect();
        return Ok(work);
    }
    // Stage by stage: what one leaves in the workspace the next one reads. Regions whose texts differ after all (in
    // alignment, say) take a launch each.
    let depth = all.iter().map(Vec::len).max().unwrap_or(0);
    for k in 0..depth {
        let mut groups: Vec<Vec<&Stage>> = Vec::new();
        for s in all.iter().filter_map(|list| list.get(k)) {
            match groups.iter_mut().find(|g| g[0].alike(s)) {
                Some(g) => g.push(s),
                None => groups.push(vec![s]),
            }
        }
        work.launches.extend(groups.into_iter().map(|g| match g[..] {
            [one] => one.single(),
            _ => Stage::many(&g),
        }));
    }
    Ok(work)
}

fn stages(body: &Body, props: &Props, many: bool, scratch: &mut usize) -> Vec<Stage> {
    let by_col = body.has(Level::Col);
    // Zeros behind a row are the row's business, too.
    let by_row = body.has(Level::Row) || (!by_col && body.full_stores().any(|k| body.pitch(k).is_some()));
    match (by_row, by_col) {
        (false, false) => map::stages(body, props, many),
        (true, false) => row::stages(body, props, many, &BTreeSet::new(), scratch),
        (false, true) => {
            let stores: Vec<usize> = body.full_stores().collect();
            col::stages(body, &stores, &split::Saved::new(), scratch)
        }
        (true, true) => {
            let both = if many { None } else { both::stages(body, props, scratch) };
            both.unwrap_or_else(|| rows_then_columns(body, props, many, scratch))
        }
    }
}

/// Rows first; then columns, which compute again what they reduce from the saved results of row reductions. Stores over
/// something that the columns load wait for them.
fn rows_then_columns(body: &Body, props: &Props, many: bool, scratch: &mut usize) -> Vec<Stage> {
    let program = body.program;
    let cols: Vec<usize> = body.needed().into_iter().filter(|i| body.level(*i) == Level::Col).collect();
    let loaded: Vec<_> = split::reach(body, cols.iter().copied())
        .into_iter()
        .filter_map(|i| match body.code(i) {
            Code::Load { source: perilune_plan::ir::Source::Value(v), .. } => Some(*v),
            _ => None,
        })
        .collect();
    let late: Vec<usize> =
        body.full_stores().filter(|k| loaded.iter().any(|v| overlap(program, *v, body.region.stores[*k].1))).collect();
    let late_roots = late.iter().map(|k| body.region.stores[*k].0 as usize);
    let saved: BTreeSet<usize> = split::reach(body, cols.into_iter().chain(late_roots))
        .into_iter()
        .filter(|i| matches!(body.code(*i), Code::ReduceRow(..)))
        .collect();
    let mut first = body.region.clone();
    first.stores = (0..body.region.stores.len())
        .filter(|k| !late.contains(k) && body.level(body.region.stores[*k].0 as usize) != Level::Col)
        .map(|k| body.region.stores[k])
        .collect();
    // What is saved counts as needed, though no store asks for it.
    let first = Body { roots: saved.clone(), ..Body::new(program, &first) };
    let at = *scratch;
    let mut out = row::stages(&first, props, many, &saved, scratch);
    let places = saved.iter().enumerate().map(|(n, i)| (*i, split::cell(at, n, body.region.batch * body.region.rows)));
    out.extend(col::stages(body, &late, &places.collect(), scratch));
    out
}
