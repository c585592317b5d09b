//! Classifies loads by access pattern, and gathers those that cannot bind memory directly.
//!
//! Most loads bind memory and cost nothing. The others use [`walk`], which splits a range of positions in a layout into
//! runs of constant stride.

use super::pack_transposed::TransposedPack;
use super::{Context, IterSpace};
use crate::loops::random::{self, Stream};
use crate::loops::{Arg, Isa, Kernel, cast};
use half::{bf16, f16};
use perilune_core::{DType, Layout, host_tensor, philox};
use perilune_plan::ir::{Source, ValueId};

/// A load that is gathered into a tile.
pub struct Load {
    pub(super) source: Source,
    pub(super) layout: Layout,
    pub(super) dtype: DType,
    pub(super) pack: Option<TransposedPack>,
    /// Converts (or copies) a dense run.
    dense: Kernel,
    uniform: Kernel,
}

/// A register that holds one value.
pub struct Constant {
    pub(super) source: Source,
    /// Position of the value in its source.
    pub(super) at: isize,
    pub(super) dtype: DType,
}

/// The access pattern of a load in an iteration space.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum AccessPattern {
    /// One value.
    Constant,
    /// Contiguous in iteration order, from an offset.
    Dense,
    /// The same for all rows; within a row contiguous or not.
    ColumnVector {
        dense: bool,
    },
    /// One value per row, with its layout over rows.
    RowScalar(Layout),
    /// Contiguous rows with a constant stride.
    StridedRows(isize),
    General,
}

/// Splits the dims of a collapsed layout so that the last ones hold exactly `cols` elements: (leading, trailing) dims
/// as (size, stride). Returns `None` if no dim divides at that boundary.
fn split(layout: &Layout, cols: usize) -> Option<(Vec<(usize, isize)>, Vec<(usize, isize)>)> {
    let (mut lead, mut tail) = (Vec::new(), Vec::new());
    let mut left = cols;
    for (&d, &s) in layout.shape.dims().iter().zip(layout.strides()).rev() {
        if left == 1 {
            lead.push((d, s));
        } else if left.is_multiple_of(d) {
            tail.push((d, s));
            left /= d;
        } else if d % left == 0 {
            tail.push((left, s));
            lead.push((d / left, s * left as isize));
            left = 1;
        } else {
            return None;
        }
    }
    lead.reverse();
    tail.reverse();
    (left == 1).then_some((lead, tail))
}

pub fn classify(layout: &Layout, space: &IterSpace) -> AccessPattern {
    let layout = layout.collapse();
    if layout.strides().iter().all(|&s| s == 0) {
        return AccessPattern::Constant;
    }
    if layout.is_dense() {
        return AccessPattern::Dense;
    }
    let Some((lead, tail)) = split(&layout, space.cols) else { return AccessPattern::General };
    let lead: Vec<_> = lead.into_iter().filter(|d| d.0 != 1).collect();
    let tail: Vec<_> = tail.into_iter().filter(|d| d.0 != 1).collect();
    let side_by_side = matches!(tail[..], [] | [(_, 1)]);
    if lead.iter().all(|d| d.1 == 0) {
        return AccessPattern::ColumnVector { dense: side_by_side };
    }
    if tail.iter().all(|d| d.1 == 0) {
        let mut rows = Layout::contiguous(perilune_core::Shape::of(&lead.iter().map(|d| d.0).collect::<Vec<_>>()));
        for (i, d) in lead.iter().enumerate() {
            rows.strides[i] = d.1;
        }
        rows.offset = layout.offset;
        return AccessPattern::RowScalar(rows.collapse());
    }
    match lead[..] {
        [(_, stride)] if side_by_side => AccessPattern::StridedRows(stride),
        _ => AccessPattern::General,
    }
}

/// Calls `run(position, stride, count, done)` for runs that together cover elements `start..start + len` of a layout;
/// `done` counts elements before the run.
#[inline]
pub fn walk(layout: &Layout, start: usize, len: usize, mut run: impl FnMut(isize, isize, usize, usize)) {
    let rank = layout.shape.rank();
    if len == 0 {
        return;
    }
    if rank == 0 {
        return run(layout.offset, 0, len, 0);
    }
    let (dims, strides) = (layout.shape.dims(), layout.strides());
    let mut at = [0usize; perilune_core::MAX_RANK];
    let (mut rest, mut position) = (start, layout.offset);
    for i in (0..rank).rev() {
        at[i] = rest % dims[i];
        rest /= dims[i];
        position += at[i] as isize * strides[i];
    }
    let inner = rank - 1;
    let mut done = 0;
    loop {
        let count = (dims[inner] - at[inner]).min(len - done);
        run(position, strides[inner], count, done);
        done += count;
        if done == len {
            return;
        }
        position -= at[inner] as isize * strides[inner];
        at[inner] = 0;
        let mut i = inner;
        loop {
            // Elements remain, so an outer dim has not reached its end.
            i -= 1;
            at[i] += 1;
            position += strides[i];
            if at[i] < dims[i] {
                break;
            }
            position -= dims[i] as isize * strides[i];
            at[i] = 0;
        }
    }
}

/// Copies strided elements and converts each.
///
/// # Safety
/// `base` must be valid for all positions that the layout reaches from `start` on, `out` for `len` elements.
unsafe fn gather<S: Copy, D>(
    layout: &Layout,
    base: *const S,
    start: usize,
    len: usize,
    out: *mut D,
    dense: Kernel,
    f: impl Fn(S) -> D,
) {
    // SAFETY: guaranteed by the caller, for every run of the walk.
    unsafe {
        walk(layout, start, len, |position, stride, count, done| {
            let (from, to) = (base.offset(position), out.add(done));
            match stride {
                1 if count >= 8 => dense(to.cast(), &Arg { ptr: from.cast(), step: 0 }, 1, count),
                0 => std::slice::from_raw_parts_mut(to.cast::<D>(), count).iter_mut().for_each(|o| *o = f(*from)),
                _ => {
                    for i in 0..count {
                        *to.add(i) = f(*from.offset(i as isize * stride));
                    }
                }
            }
        });
    }
}

/// The address of element 0 of a source that is stored in `value`.
fn base(source: &Source, context: &Context, value: ValueId, dtype: DType) -> *const u8 {
    let start = if let Source::Block { start, .. } = source { context.start(Some(*start)) as usize } else { 0 };
    context.values[value.0 as usize].0.cast_const().wrapping_add(start * dtype.size())
}

impl Load {
    pub fn new(source: Source, layout: Layout, dtype: DType, isa: Isa) -> Load {
        let layout = layout.collapse();
        let pack = if matches!(source, Source::Value(_)) { TransposedPack::of(&layout) } else { None };
        Load { source, layout, dtype, pack, dense: cast::load(dtype, isa), uniform: random::uniform(isa) }
    }

    /// Bytes of an element of the compute type.
    pub fn size(&self) -> usize {
        self.dtype.compute().size()
    }

    /// Gathers elements `start..start + len` into `out` in the compute type.
    ///
    /// # Safety
    /// `out` must be valid for `len` elements; the context must hold the addresses of the program's values.
    pub unsafe fn gather(&self, context: &Context, start: usize, len: usize, out: *mut u8) {
        // SAFETY: `plan::check` holds layouts within their values; the caller guarantees the rest.
        unsafe {
            match self.source {
                Source::Value(v) | Source::Block { input: v, .. } => {
                    let base = base(&self.source, context, v, self.dtype);
                    let l = &self.layout;
                    match self.dtype {
                        DType::BF16 => gather(l, base.cast::<bf16>(), start, len, out.cast(), self.dense, bf16::to_f32),
                        DType::F16 => gather(l, base.cast::<f16>(), start, len, out.cast(), self.dense, f16::to_f32),
                        d => match d.size() {
                            8 => gather(l, base.cast::<u64>(), start, len, out.cast::<u64>(), self.dense, |x| x),
                            4 => gather(l, base.cast::<u32>(), start, len, out.cast::<u32>(), self.dense, |x| x),
                            _ => gather(l, base, start, len, out, self.dense, |x| x),
                        },
                    }
                }
                Source::Uniform { seed, counter, start: from } => {
                    let (seed, counter) = (context.slots[seed as usize], context.slots[counter as usize]);
                    let (out, from) = (out.cast::<f32>(), context.start(from));
                    walk(&self.layout, start, len, |position, stride, count, done| {
                        if stride == 1 {
                            let stream = Stream { seed, counter, first: from + position as u64 };
                            let arg = Arg { ptr: (&raw const stream).cast(), step: 0 };
                            (self.uniform)(out.add(done).cast(), &arg, 1, count);
                        } else {
                            for i in 0..count {
                                let element = from + (position + i as isize * stride) as u64;
                                *out.add(done + i) = philox::uniform(seed, counter, element);
                            }
                        }
                    });
                }
                // Constants and slots are never gathered.
                Source::Constant(_) | Source::Slot(_) => {}
                Source::Iota { start: from } => {
                    let (out, from) = (out.cast::<i64>(), context.start(from) as i64);
                    walk(&self.layout, start, len, |position, stride, count, done| {
                        for i in 0..count {
                            *out.add(done + i) = from + (position + i as isize * stride) as i64;
                        }
                    });
                }
            }
        }
    }
}

/// Encodes a number in the compute type of `dtype`, in the low bytes. `bits` are f64 bits for floats, otherwise i64.
pub fn number(dtype: DType, bits: u64) -> u64 {
    let float = f64::from_bits(bits);
    match dtype {
        DType::F64 | DType::I64 => bits,
        DType::F32 => (float as f32).to_bits() as u64,
        DType::BF16 => host_tensor::to_bf16(float).to_f32().to_bits() as u64,
        DType::F16 => host_tensor::to_f16(float).to_f32().to_bits() as u64,
        DType::I32 => bits as i32 as u32 as u64,
        DType::U8 => bits as u8 as u64,
        DType::Bool => u64::from(bits != 0),
    }
}

impl Constant {
    pub fn new(source: Source, layout: &Layout, dtype: DType) -> Constant {
        Constant { source, at: layout.offset, dtype }
    }

    /// Reads the value, in the compute type, in the low bytes.
    ///
    /// # Safety
    /// The context must hold the addresses of the program's values.
    pub unsafe fn read(&self, context: &Context) -> u64 {
        match self.source {
            Source::Slot(s) => number(self.dtype, context.slots[s as usize]),
            Source::Constant(bits) => number(self.dtype, bits),
            Source::Iota { start } => context.start(start) + self.at as u64,
            Source::Uniform { seed, counter, start } => {
                let (seed, counter) = (context.slots[seed as usize], context.slots[counter as usize]);
                philox::uniform(seed, counter, context.start(start) + self.at as u64).to_bits() as u64
            }
            Source::Value(v) | Source::Block { input: v, .. } => {
                let base = base(&self.source, context, v, self.dtype);
                // SAFETY: `plan::check` holds the layout within its value.
                unsafe {
                    match self.dtype {
                        DType::BF16 => (*base.cast::<bf16>().offset(self.at)).to_f32().to_bits() as u64,
                        DType::F16 => (*base.cast::<f16>().offset(self.at)).to_f32().to_bits() as u64,
                        d => match d.size() {
                            8 => *base.cast::<u64>().offset(self.at),
                            4 => *base.cast::<u32>().offset(self.at) as u64,
                            _ => *base.offset(self.at) as u64,
                        },
                    }
                }
            }
        }
    }
}
