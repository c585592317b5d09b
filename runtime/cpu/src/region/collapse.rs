//! Collapses the dims of a region without reductions to rows and columns: to one row if its loads allow it, otherwise
//! along the dims of its loads.

use super::IterSpace;
use super::load::{AccessPattern, classify};
use perilune_core::Layout;

/// The relative cost of a load in an iteration space.
fn cost_of(layout: &Layout, space: &IterSpace) -> usize {
    match classify(layout, space) {
        AccessPattern::Constant | AccessPattern::Dense => 0,
        AccessPattern::ColumnVector { dense: true } | AccessPattern::StridedRows(_) | AccessPattern::RowScalar(_) => 1,
        AccessPattern::ColumnVector { dense: false } => 2,
        AccessPattern::General => 8,
    }
}

/// The cheapest iteration space of `n` elements for loads with these layouts.
pub fn choose(n: usize, layouts: &[Layout]) -> IterSpace {
    let flat = IterSpace { batch: 1, rows: 1, cols: n };
    let mut best = (layouts.iter().map(|l| cost_of(l, &flat)).sum::<usize>(), flat);
    if best.0 == 0 || n == 0 {
        return flat;
    }
    for l in layouts {
        let l = l.collapse();
        let mut cols = 1;
        for &d in l.shape.dims().iter().rev() {
            cols *= d;
            if cols < 16 || cols == n {
                continue;
            }
            let space = IterSpace { batch: 1, rows: n / cols, cols };
            let cost = layouts.iter().map(|l| cost_of(l, &space)).sum::<usize>();
            if cost < best.0 || (cost == best.0 && best.1.cols != n && cols > best.1.cols && cols <= super::ROWS_LIMIT)
            {
                best = (cost, space);
            }
        }
    }
    best.1
}
