//! Transposed loads: a worker fetches many rows at once, line by line of memory, and copies tiles from there.

use super::Context;
use super::load::{Load, walk};
use half::{bf16, f16};
use perilune_core::{DType, Layout};
use perilune_plan::ir::Source;

/// Rows of a transposed load that are fetched together: two cache lines of f32 side by side in memory.
const PANEL_ROWS: usize = 32;
/// Elements a panel has at most; longer rows get fewer rows, and the longest no panel.
const PANEL_ELEMENTS: usize = 1 << 19;

/// How a transposed load is fetched: neighbours in memory belong to different rows, so several rows are fetched at once
/// into a buffer of the worker's, and tiles are copied from there.
#[derive(Clone, Copy, Debug)]
pub struct Panel {
    /// Rows of a panel.
    height: usize,
    /// Elements of a row, and how far apart they lie.
    width: usize,
    stride: isize,
    /// Elements from row to row of the buffer: an odd number of cache lines, so that a column spreads over all sets.
    pitch: usize,
    /// Rows that lie side by side; panels do not cross a multiple of it.
    period: usize,
}

impl Panel {
    pub fn of(layout: &Layout) -> Option<Panel> {
        let rank = layout.shape.rank();
        if rank < 2 {
            return None;
        }
        let (dims, strides) = (layout.shape.dims(), layout.strides());
        let (width, stride, period) = (dims[rank - 1], strides[rank - 1], dims[rank - 2]);
        let height = PANEL_ROWS.min(period).min(PANEL_ELEMENTS / width);
        let worth = strides[rank - 2] == 1 && stride.abs() > 1 && height >= 4 && width >= 8;
        let pitch = (width.div_ceil(16) | 1) * 16;
        worth.then_some(Panel { height, width, stride, pitch, period })
    }
}

/// The panel a worker holds of a load.
#[derive(Default)]
pub struct Held {
    cells: Vec<u64>,
    /// Its first row and the row after its last.
    rows: (usize, usize),
}

impl Held {
    pub fn forget(&mut self) {
        self.rows = (0, 0);
    }
}

/// Asks for a line of memory that will be read soon; any address will do.
#[inline(always)]
fn prefetch<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint that never faults.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Fills a panel: rows `rows` of a transposed layout, line by line of memory.
///
/// # Safety
/// As for `gather`.
unsafe fn fill<S: Copy, D: Copy>(
    layout: &Layout,
    p: &Panel,
    base: *const S,
    rows: (usize, usize),
    out: *mut D,
    f: impl Fn(S) -> D,
) {
    let mut position = 0;
    walk(layout, rows.0 * p.width, 1, |at, _, _, _| position = at);
    let n = rows.1 - rows.0;
    // SAFETY: the caller's promise; the rows lie side by side within one period.
    unsafe {
        let base = base.offset(position);
        for c in 0..p.width {
            let line = base.offset(c as isize * p.stride);
            let ahead = base.wrapping_offset((c + 24) as isize * p.stride);
            prefetch(ahead);
            prefetch(ahead.wrapping_add(n - 1));
            for r in 0..n {
                *out.add(r * p.pitch + c) = f(*line.add(r));
            }
        }
    }
}

impl Load {
    /// Elements that a panel of it holds, if it goes by panels.
    pub fn panel(&self) -> Option<usize> {
        self.panel.map(|p| p.height * p.width)
    }

    /// As `fetch`, by way of the panel in `held`.
    ///
    /// # Safety
    /// As for `fetch`; `held` belongs to this load and this run of it.
    pub unsafe fn fetch_by_panel(&self, context: &Context, start: usize, len: usize, out: *mut u8, held: &mut Held) {
        let (Source::Value(v), Some(p)) = (self.source, self.panel) else {
            // SAFETY: the caller's promise.
            return unsafe { self.fetch(context, start, len, out) };
        };
        let (size, end) = (self.size(), start + len);
        let mut at = start;
        while at < end {
            let row = at / p.width;
            if row < held.rows.0 || row >= held.rows.1 {
                let within = row % p.period;
                let first = row - within % p.height;
                held.rows = (first, first + p.height.min(p.period - (within - within % p.height)));
                held.cells.resize((p.height * p.pitch * size).div_ceil(8), 0);
                let (l, base, to) =
                    (&self.layout, context.values[v.0 as usize].0.cast_const(), held.cells.as_mut_ptr());
                // SAFETY: `plan::check` holds the layout within its value; the panel has room for `height` rows.
                unsafe {
                    match self.dtype {
                        DType::BF16 => fill(l, &p, base.cast::<bf16>(), held.rows, to.cast(), bf16::to_f32),
                        DType::F16 => fill(l, &p, base.cast::<f16>(), held.rows, to.cast(), f16::to_f32),
                        d => match d.size() {
                            8 => fill(l, &p, base.cast::<u64>(), held.rows, to.cast::<u64>(), |x| x),
                            4 => fill(l, &p, base.cast::<u32>(), held.rows, to.cast::<u32>(), |x| x),
                            _ => fill(l, &p, base, held.rows, to.cast::<u8>(), |x| x),
                        },
                    }
                }
            }
            let n = (end - at).min((row + 1) * p.width - at);
            // SAFETY: the run lies within a row of the panel and within `out`.
            unsafe {
                let from = held.cells.as_ptr().cast::<u8>().add(((row - held.rows.0) * p.pitch + at % p.width) * size);
                std::ptr::copy_nonoverlapping(from, out.add((at - start) * size), n * size);
            }
            at += n;
        }
    }
}
