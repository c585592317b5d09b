//! How a region without reductions is cut into rows: as one run if its loads allow, else along the dims of its loads.

use super::Grid;
use super::load::{Class, classify};
use perilune_core::Layout;

/// What a load of that class costs on a grid; lower is better.
fn price(layout: &Layout, grid: &Grid) -> usize {
    match classify(layout, grid) {
        Class::Constant | Class::Dense => 0,
        Class::Col { dense: true } | Class::Rows(_) | Class::Row(_) => 1,
        Class::Col { dense: false } => 2,
        Class::General => 8,
    }
}

/// The cheapest cut of `n` elements for the loads with these layouts.
pub fn choose(n: usize, layouts: &[Layout]) -> Grid {
    let flat = Grid { batch: 1, rows: 1, cols: n };
    let mut best = (layouts.iter().map(|l| price(l, &flat)).sum::<usize>(), flat);
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
            let grid = Grid { batch: 1, rows: n / cols, cols };
            let cost = layouts.iter().map(|l| price(l, &grid)).sum::<usize>();
            if cost < best.0 || (cost == best.0 && best.1.cols != n && cols > best.1.cols && cols <= super::ROWS_LIMIT)
            {
                best = (cost, grid);
            }
        }
    }
    best.1
}
