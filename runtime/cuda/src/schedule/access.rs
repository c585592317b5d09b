//! Classifies how a kernel reads a layout, and turns layouts into index arithmetic.
//!
//! A layout is split at the row boundary into *lead* dims, whose part of the index is constant within a row, and *tail*
//! dims, indexed by the column. A layout that cannot be split there is indexed by the flat position. In a pure map, all
//! dims are tail dims. The emitted text depends on the number of dims and on which strides are 0 or 1, never on sizes.

use perilune_core::Layout;

/// How a load is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// One number for all elements.
    Invariant,
    /// One number for each row.
    RowWise,
    /// Aligned vectors of adjacent elements.
    Vector,
    /// Vectors whose elements have a constant stride.
    Run,
    /// Each element separately.
    Each,
}

#[derive(Clone, PartialEq, Debug)]
pub struct Reading {
    pub access: Access,
    pub offset: isize,
    /// (size, stride) of dims over rows.
    pub lead: Vec<(usize, isize)>,
    /// Dims over columns, or over all positions if `flat`.
    pub tail: Vec<(usize, isize)>,
    pub flat: bool,
}

/// Maximum position of a space or buffer for 32-bit index arithmetic, with room for a stride of the grid.
const NARROW: usize = (1 << 31) - (1 << 24);

pub fn is_wide(numel: usize, layouts: impl Iterator<Item = Layout>) -> bool {
    let far = |l: Layout| l.extent().is_some_and(|(low, high)| low.unsigned_abs().max(high.unsigned_abs()) >= NARROW);
    numel >= NARROW || layouts.into_iter().any(far)
}

type Dims = Vec<(usize, isize)>;

/// Splits the dims of a collapsed layout so that the last ones hold exactly `cols` elements, if no dim straddles that
/// boundary unevenly.
fn split(layout: &Layout, cols: usize) -> Option<(Dims, Dims)> {
    let (mut lead, mut tail) = (Vec::new(), Vec::new());
    let mut left = cols;
    for (&d, &s) in layout.shape.dims().iter().zip(layout.strides()).rev() {
        if left == 1 {
            lead.push((d, s));
        } else if left.is_multiple_of(d) {
            tail.push((d, s));
            left /= d;
        } else if d.is_multiple_of(left) {
            tail.push((left, s));
            lead.push((d / left, s * left as isize));
            left = 1;
        } else {
            return None;
        }
    }
    lead.reverse();
    tail.reverse();
    lead.retain(|d| d.0 != 1);
    (left == 1).then_some((lead, tail))
}

/// How vectors of `v` elements read a layout over a space. `cols`: the row length if rows are processed separately.
pub fn full(layout: &Layout, cols: Option<usize>, v: usize) -> Reading {
    let layout = layout.collapse();
    let dims: Dims = layout.shape.dims().iter().copied().zip(layout.strides().iter().copied()).collect();
    let mut out = Reading { access: Access::Invariant, offset: layout.offset, lead: vec![], tail: vec![], flat: false };
    if dims.iter().all(|d| d.1 == 0) {
        return out;
    }
    match cols.map(|c| split(&layout, c)) {
        Some(Some((lead, tail))) => (out.lead, out.tail) = (lead, tail),
        Some(None) => (out.tail, out.flat) = (dims, true),
        None => out.tail = dims,
    }
    if out.tail.iter().all(|d| d.1 == 0) {
        out.access = Access::RowWise;
        out.tail.clear();
        return out;
    }
    let by = |s: isize| s.unsigned_abs().is_multiple_of(v);
    let inner = out.tail[out.tail.len() - 1];
    let outer = &out.tail[..out.tail.len() - 1];
    let unbroken = outer.is_empty() || inner.0.is_multiple_of(v);
    let aligned = by(out.offset) && outer.iter().chain(&out.lead).all(|d| by(d.1));
    out.access = match (unbroken, inner.1) {
        (false, _) => Access::Each,
        (true, 1) if aligned => Access::Vector,
        _ => Access::Run,
    };
    out
}

/// How a layout with one element per row is read.
pub fn row(layout: &Layout) -> Reading {
    let layout = layout.collapse();
    let lead: Dims = layout.shape.dims().iter().copied().zip(layout.strides().iter().copied()).collect();
    let access = if lead.iter().all(|d| d.1 == 0) { Access::Invariant } else { Access::RowWise };
    Reading { access, offset: layout.offset, lead, tail: vec![], flat: false }
}

/// Multiplier and shift of a division by `d` (see `fast_divide` in `kernels/device/vec.cuh`).
pub fn reciprocal(d: usize) -> (u32, u32) {
    let s = d.max(1).next_power_of_two().trailing_zeros();
    let m = (1u64 << (31 + s)).div_ceil(d.max(1) as u64);
    (m as u32, 31 + s)
}

#[cfg(test)]
mod tests {
    use super::*;
    use perilune_core::{MAX_RANK, Shape};

    fn layout(dims: &[usize], strides: &[isize], offset: isize) -> Layout {
        let mut s = [0; MAX_RANK];
        s[..strides.len()].copy_from_slice(strides);
        Layout { shape: Shape::of(dims), strides: s, offset }
    }

    #[test]
    fn division_by_multiplication_is_exact() {
        let mut d = 1usize;
        while d < 1 << 31 {
            for d in [d, d + 1, d + d / 3] {
                let (m, s) = reciprocal(d);
                for x in [0, 1, d - 1, d, d + 1, 7 * d, (1 << 31) - 1, (1 << 31) - d, (1 << 31) / d * d, 12_345_678] {
                    let x = x.min((1 << 31) - 1);
                    assert_eq!((x as u64 * m as u64) >> s, (x / d) as u64, "{x} / {d}");
                }
            }
            d *= 2;
        }
    }

    #[test]
    fn access_patterns_of_common_layouts() {
        let access = |l: Layout, cols, v| full(&l, cols, v).access;
        assert_eq!(access(layout(&[640], &[1], 0), None, 4), Access::Vector);
        assert_eq!(access(layout(&[640], &[1], 2), None, 4), Access::Run);
        assert_eq!(access(layout(&[10, 64], &[0, 1], 0), None, 4), Access::Vector);
        assert_eq!(access(layout(&[10, 63], &[0, 1], 0), None, 4), Access::Each);
        assert_eq!(access(layout(&[10, 64], &[1, 0], 0), None, 4), Access::Run);
        assert_eq!(access(layout(&[10, 64], &[1, 0], 0), Some(64), 4), Access::RowWise);
        assert_eq!(access(layout(&[64, 10], &[1, 64], 0), None, 2), Access::Run);
        assert_eq!(access(layout(&[], &[], 3), Some(64), 4), Access::Invariant);
        let straddling = full(&layout(&[6, 10], &[1, 6], 0), Some(15), 1);
        assert!(straddling.flat && straddling.access == Access::Run);
    }
}
