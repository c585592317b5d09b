//! Describes how attention kernels address a tensor of (batch, heads, rows, width).

use perilune_core::{DType, Layout, Shape};

/// Strides in elements along (batch, head, row).
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub(super) struct Strides(pub(super) [i64; 3]);

impl Strides {
    /// The strides of a contiguous (..., heads, rows, width).
    pub fn contiguous(heads: usize, rows: usize, width: usize) -> Strides {
        Strides([(heads * rows * width) as i64, (rows * width) as i64, width as i64])
    }

    /// The strides of a layout, if the kernels can read it; see `Strides` in `tile.cuh`.
    pub fn of(l: &Layout, dtype: DType) -> Option<Strides> {
        let n = l.shape.rank();
        if l.numel() == 0 {
            return Some(Strides::default());
        }
        let lead = n.saturating_sub(3);
        let batch = Layout { shape: Shape::of(&l.shape.dims()[..lead]), strides: l.strides, offset: 0 }.collapse();
        let at = |i: usize| if l.shape.dims()[i] == 1 { 0 } else { l.strides[i] as i64 };
        let batch = match batch.shape.rank() {
            0 => 0,
            1 => batch.strides[0] as i64,
            _ => return None,
        };
        let strides = [batch, if n > 2 { at(n - 3) } else { 0 }, at(n - 2)];
        let aligned = strides.iter().chain([&(l.offset as i64)]).all(|s| s % (16 / dtype.size() as i64) == 0);
        (l.strides[n - 1] == 1 && aligned && strides[2].abs() < 1 << 22).then_some(Strides(strides))
    }
}
