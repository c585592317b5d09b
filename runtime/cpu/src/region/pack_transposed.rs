//! Packs transposed loads: a worker copies a panel of many rows, one cache line after the other, and fills tiles from
//! it.

use super::Context;
use super::load::{Load, walk};
use crate::loops::prefetch;
use half::{bf16, f16};
use perilune_core::{DType, Layout};
use perilune_plan::ir::Source;

/// Rows of a panel: two adjacent cache lines of f32.
const PANEL_ROWS: usize = 32;
/// Maximum elements of a panel; longer rows have lower panels, and the longest rows none.
const PANEL_ELEMENTS: usize = 1 << 19;

/// The panels of a transposed load. Adjacent elements in memory belong to different rows, so a panel of several rows is
/// copied at once into a buffer of the worker, and tiles are filled from there.
#[derive(Clone, Copy, Debug)]
pub struct TransposedPack {
    /// Rows of a panel.
    height: usize,
    /// Elements of a row, and their stride in memory.
    width: usize,
    stride: isize,
    /// Row stride of the buffer in elements: an odd number of cache lines, so that a column is spread over all cache
    /// sets.
    pitch: usize,
    /// Number of adjacent rows in memory; panels do not cross a multiple of it.
    period: usize,
}

impl TransposedPack {
    pub fn of(layout: &Layout) -> Option<TransposedPack> {
        let rank = layout.shape.rank();
        if rank < 2 {
            return None;
        }
        let (dims, strides) = (layout.shape.dims(), layout.strides());
        let (width, stride, period) = (dims[rank - 1], strides[rank - 1], dims[rank - 2]);
        let height = PANEL_ROWS.min(period).min(PANEL_ELEMENTS / width);
        let worth = strides[rank - 2] == 1 && stride.abs() > 1 && height >= 4 && width >= 8;
        let pitch = (width.div_ceil(16) | 1) * 16;
        worth.then_some(TransposedPack { height, width, stride, pitch, period })
    }
}

/// The panel of a load that a worker packed last.
#[derive(Default)]
pub struct PackBuffer {
    words: Vec<u64>,
    /// Its first row and the row after its last.
    rows: (usize, usize),
}

impl PackBuffer {
    pub fn clear(&mut self) {
        self.rows = (0, 0);
    }
}

/// Packs a range of rows of a transposed layout.
///
/// # Safety
/// As for `gather`.
unsafe fn fill<S: Copy, D: Copy>(
    layout: &Layout,
    p: &TransposedPack,
    base: *const S,
    rows: (usize, usize),
    out: *mut D,
    f: impl Fn(S) -> D,
) {
    let mut position = 0;
    walk(layout, rows.0 * p.width, 1, |at, _, _, _| position = at);
    let n = rows.1 - rows.0;
    // SAFETY: guaranteed by the caller; the rows are adjacent within one period.
    unsafe {
        let base = base.offset(position);
        for c in 0..p.width {
            let line = base.offset(c as isize * p.stride);
            let ahead = base.wrapping_offset((c + 24) as isize * p.stride);
            prefetch(ahead.cast());
            prefetch(ahead.wrapping_add(n - 1).cast());
            for r in 0..n {
                *out.add(r * p.pitch + c) = f(*line.add(r));
            }
        }
    }
}

impl Load {
    /// Elements of a panel, if the load is packed.
    pub fn pack_elements(&self) -> Option<usize> {
        self.pack.map(|p| p.height * p.width)
    }

    /// Like `gather`, through the panel in `packed`.
    ///
    /// # Safety
    /// As for `gather`; `packed` must belong to this load and this run.
    pub unsafe fn gather_packed(
        &self,
        context: &Context,
        start: usize,
        len: usize,
        out: *mut u8,
        packed: &mut PackBuffer,
    ) {
        let (Source::Value(v), Some(p)) = (self.source, self.pack) else {
            // SAFETY: guaranteed by the caller.
            return unsafe { self.gather(context, start, len, out) };
        };
        let (size, end) = (self.size(), start + len);
        let mut at = start;
        while at < end {
            let row = at / p.width;
            if row < packed.rows.0 || row >= packed.rows.1 {
                let within = row % p.period;
                let first = row - within % p.height;
                packed.rows = (first, first + p.height.min(p.period - (within - within % p.height)));
                packed.words.resize((p.height * p.pitch * size).div_ceil(8), 0);
                let (l, base, to) =
                    (&self.layout, context.values[v.0 as usize].0.cast_const(), packed.words.as_mut_ptr());
                // SAFETY: `plan::check` holds the layout within its value; the panel has room for `height` rows.
                unsafe {
                    match self.dtype {
                        DType::BF16 => fill(l, &p, base.cast::<bf16>(), packed.rows, to.cast(), bf16::to_f32),
                        DType::F16 => fill(l, &p, base.cast::<f16>(), packed.rows, to.cast(), f16::to_f32),
                        d => match d.size() {
                            8 => fill(l, &p, base.cast::<u64>(), packed.rows, to.cast::<u64>(), |x| x),
                            4 => fill(l, &p, base.cast::<u32>(), packed.rows, to.cast::<u32>(), |x| x),
                            _ => fill(l, &p, base, packed.rows, to.cast::<u8>(), |x| x),
                        },
                    }
                }
            }
            let n = (end - at).min((row + 1) * p.width - at);
            // SAFETY: the run is within a row of the panel and within `out`.
            unsafe {
                let from =
                    packed.words.as_ptr().cast::<u8>().add(((row - packed.rows.0) * p.pitch + at % p.width) * size);
                std::ptr::copy_nonoverlapping(from, out.add((at - start) * size), n * size);
            }
            at += n;
        }
    }
}
