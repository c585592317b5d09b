//! Reduces rows and columns in the order that `plan::ir` fixes: 16 lanes folded as a halving tree, chunks combined in order.

use super::{Arg, Body, Isa, Kernel, pick};
use crate::math::Number;
use perilune_core::DType;
use perilune_core::ops::ReduceFn;
use perilune_plan::ir::LANES;
use std::marker::PhantomData;
use std::slice;

/// A binary operation with its identity.
trait Monoid: 'static {
    fn identity<T: Number>() -> T;
    fn combine<T: Number>(a: T, b: T) -> T;
}

macro_rules! monoids {
    ($($name:ident $identity:ident $combine:ident;)*) => { $(
        struct $name;
        impl Monoid for $name {
            #[inline(always)]
            fn identity<T: Number>() -> T {
                T::$identity
            }
            #[inline(always)]
            fn combine<T: Number>(a: T, b: T) -> T {
                a.$combine(b)
            }
        }
    )* };
}

monoids! {
    Sum ZERO add;
    Prod ONE mul;
    Max LOWEST maximum;
    Min HIGHEST minimum;
    All ONE minimum;
}

/// Maximum or minimum.
trait Extremum: Monoid {
    /// Whether the first operand is kept, given that neither is NaN.
    fn keeps(a: f32, b: f32) -> bool;
}

impl Extremum for Max {
    #[inline(always)]
    fn keeps(a: f32, b: f32) -> bool {
        a > b
    }
}

impl Extremum for Min {
    #[inline(always)]
    fn keeps(a: f32, b: f32) -> bool {
        a < b
    }
}

/// The loops of one reduction over one compute type. `total` cells are 8 bytes wide and hold the wide type.
#[derive(Clone, Copy)]
pub struct Reduction {
    /// Reduces each row of at most `ROW_CHUNK` elements to one result.
    pub rows: Kernel,
    /// Accumulates a run of elements in 16 lanes at `out`; runs start at multiples of 16 within their chunk.
    pub lanes: Kernel,
    /// Folds 16 lanes (operand 0) to one element at `out`.
    pub fold: Kernel,
    /// Combines one element (operand 0) into the total at `out`.
    pub combine: Kernel,
    /// Converts the total (operand 0) to an element at `out`.
    pub finish: Kernel,
    /// Combines rows column by column, in order, into `cols` elements at `out`.
    pub columns: Kernel,
    /// Combines rows of partials, in the wide type and from the identity, to `cols` elements at `out`.
    pub partials: Kernel,
    /// Sets elements to the identity.
    pub reset: Kernel,
    /// Sets a total to the identity.
    pub reset_total: Kernel,
}

#[inline(always)]
fn fold<T: Number, J: Monoid>(mut lanes: [T; LANES]) -> T {
    let mut width = LANES / 2;
    while width > 0 {
        for k in 0..width {
            lanes[k] = J::combine(lanes[k], lanes[k + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// The sum of 16 lanes.
#[inline(always)]
pub fn fold_sum(lanes: [f32; LANES]) -> f32 {
    fold::<f32, Sum>(lanes)
}

#[inline(always)]
fn each<T: Number, J: Monoid>(mut lanes: [T; LANES], x: &[T; LANES]) -> [T; LANES] {
    for k in 0..LANES {
        lanes[k] = J::combine(lanes[k], x[k]);
    }
    lanes
}

#[inline(always)]
fn accumulate<T: Number, J: Monoid>(lanes: &mut [T; LANES], x: &[T]) {
    let mut acc = *lanes;
    let (whole, rest) = x.as_chunks::<LANES>();
    for c in whole {
        acc = each::<T, J>(acc, c);
    }
    for (k, &v) in rest.iter().enumerate() {
        acc[k] = J::combine(acc[k], v);
    }
    *lanes = acc;
}

struct Rows<T, J>(PhantomData<(T, J)>);
struct Lanes<T, J>(PhantomData<(T, J)>);
/// Like `Rows<f32, J>` for `Max` and `Min`: ignores NaN but detects it, and repeats a row that contains one with full
/// comparisons.
struct FastRows<J>(PhantomData<J>);
struct Fold<T, J>(PhantomData<(T, J)>);
struct Combine<T, J>(PhantomData<(T, J)>);
struct Finish<T>(PhantomData<T>);
struct Columns<T, J>(PhantomData<(T, J)>);
struct Partials<T, J>(PhantomData<(T, J)>);
struct Reset<T, J>(PhantomData<(T, J)>);
struct ResetTotal<T, J>(PhantomData<(T, J)>);

impl<T: Number, J: Monoid> Body for Rows<T, J> {
    #[inline(always)]
    unsafe fn run(out: *mut u8, args: *const Arg, rows: usize, cols: usize) {
        // SAFETY: guaranteed by the caller (see `Body::run`), here and below in this file.
        let (out, x) = unsafe { (slice::from_raw_parts_mut(out.cast::<T>(), rows), *args) };
        // SAFETY: `r` is below `rows`.
        let row = |r: usize| unsafe { slice::from_raw_parts(x.row::<T>(r), cols) };
        let mut r = 0;
        // Interleaves four rows to hide the latency of the operation. Unrolled by hand, because LLVM keeps an array of
        // arrays in memory.
        while r + 4 <= rows {
            let id = [J::identity::<T>(); LANES];
            let (mut a, mut b, mut c, mut d) = (id, id, id, id);
            let (ra, ta) = row(r).as_chunks::<LANES>();
            let (rb, tb) = row(r + 1).as_chunks::<LANES>();
            let (rc, tc) = row(r + 2).as_chunks::<LANES>();
            let (rd, td) = row(r + 3).as_chunks::<LANES>();
            for (((xa, xb), xc), xd) in ra.iter().zip(rb).zip(rc).zip(rd) {
                a = each::<T, J>(a, xa);
                b = each::<T, J>(b, xb);
                c = each::<T, J>(c, xc);
                d = each::<T, J>(d, xd);
            }
            for (k, (lanes, tail)) in [(a, ta), (b, tb), (c, tc), (d, td)].into_iter().enumerate() {
                let mut lanes = lanes;
                for (l, &v) in lanes.iter_mut().zip(tail) {
                    *l = J::combine(*l, v);
                }
                out[r + k] = fold::<T, J>(lanes);
            }
            r += 4;
        }
        for r in r..rows {
            let mut lanes = [J::identity::<T>(); LANES];
            accumulate::<T, J>(&mut lanes, row(r));
            out[r] = fold::<T, J>(lanes);
        }
    }
}

#[inline(always)]
fn each_fast<J: Extremum>(mut lanes: [f32; LANES], x: &[f32; LANES]) -> [f32; LANES] {
    for k in 0..LANES {
        lanes[k] = if J::keeps(lanes[k], x[k]) { lanes[k] } else { x[k] };
    }
    lanes
}

/// Tracks the largest magnitudes as bits; a value above that of infinity means a NaN.
#[inline(always)]
fn each_magnitude(mut magnitudes: [u32; LANES], x: &[f32; LANES]) -> [u32; LANES] {
    for k in 0..LANES {
        magnitudes[k] = magnitudes[k].max(x[k].to_bits() & 0x7fff_ffff);
    }
    magnitudes
}

/// Reduces the tail of a row and folds the lanes; repeats `row` with full comparisons if a NaN was detected.
#[inline(always)]
fn finish_fast<J: Extremum>(mut lanes: [f32; LANES], magnitudes: [u32; LANES], tail: &[f32], row: &[f32]) -> f32 {
    let mut worst = 0;
    for k in 0..LANES {
        worst = magnitudes[k].max(worst);
    }
    for (l, &v) in lanes.iter_mut().zip(tail) {
        worst = worst.max(v.to_bits() & 0x7fff_ffff);
        *l = if J::keeps(*l, v) { *l } else { v };
    }
    if worst > 0x7f80_0000 {
        lanes = [J::identity::<f32>(); LANES];
        accumulate::<f32, J>(&mut lanes, row);
    }
    fold::<f32, J>(lanes)
}

/// The maximum of a row of whole lanes, given the maximum of each lane and the magnitudes of `FastRows`.
#[inline(always)]
pub fn fold_max(lanes: [f32; LANES], magnitudes: [u32; LANES], row: &[f32]) -> f32 {
    finish_fast::<Max>(lanes, magnitudes, &[], row)
}

impl<J: Extremum> Body for FastRows<J> {
    #[inline(always)]
    unsafe fn run(out: *mut u8, args: *const Arg, rows: usize, cols: usize) {
        // SAFETY: as above.
        let (out, x) = unsafe { (slice::from_raw_parts_mut(out.cast::<f32>(), rows), *args) };
        // SAFETY: `r` is below `rows`.
        let row = |r: usize| unsafe { slice::from_raw_parts(x.row::<f32>(r), cols) };
        let (id, zero) = ([J::identity::<f32>(); LANES], [0u32; LANES]);
        let mut r = 0;
        // Interleaves four rows, as in `Rows`.
        while r + 4 <= rows {
            let (mut a, mut b, mut c, mut d) = (id, id, id, id);
            let (mut ma, mut mb, mut mc, mut md) = (zero, zero, zero, zero);
            let (ra, ta) = row(r).as_chunks::<LANES>();
            let (rb, tb) = row(r + 1).as_chunks::<LANES>();
            let (rc, tc) = row(r + 2).as_chunks::<LANES>();
            let (rd, td) = row(r + 3).as_chunks::<LANES>();
            for (((xa, xb), xc), xd) in ra.iter().zip(rb).zip(rc).zip(rd) {
                a = each_fast::<J>(a, xa);
                b = each_fast::<J>(b, xb);
                c = each_fast::<J>(c, xc);
                d = each_fast::<J>(d, xd);
                ma = each_magnitude(ma, xa);
                mb = each_magnitude(mb, xb);
                mc = each_magnitude(mc, xc);
                md = each_magnitude(md, xd);
            }
            for (k, (lanes, magnitudes, tail)) in
                [(a, ma, ta), (b, mb, tb), (c, mc, tc), (d, md, td)].into_iter().enumerate()
            {
                out[r + k] = finish_fast::<J>(lanes, magnitudes, tail, row(r + k));
            }
            r += 4;
        }
        for r in r..rows {
            let (mut lanes, mut magnitudes) = (id, zero);
            let (whole, tail) = row(r).as_chunks::<LANES>();
            for c in whole {
                lanes = each_fast::<J>(lanes, c);
                magnitudes = each_magnitude(magnitudes, c);
            }
            out[r] = finish_fast::<J>(lanes, magnitudes, tail, row(r));
        }
    }
}

impl<T: Number, J: Monoid> Body for Lanes<T, J> {
    #[inline(always)]
    unsafe fn run(out: *mut u8, args: *const Arg, _: usize, cols: usize) {
        // SAFETY: as above; the 16 lanes do not overlap the operand.
        let (lanes, x) = unsafe { (&mut *out.cast::<[T; LANES]>(), slice::from_raw_parts((*args).row::<T>(0), cols)) };
        accumulate::<T, J>(lanes, x);
    }
}

impl<T: Number, J: Monoid> Body for Fold<T, J> {
    #[inline(always)]
    unsafe fn run(out: *mut u8, args: *const Arg, _: usize, _: usize) {
        // SAFETY: as above; one element out, 16 lanes in.
        unsafe { *out.cast::<T>() = fold::<T, J>(*(*args).row::<[T; LANES]>(0)) };
    }
}

impl<T: Number, J: Monoid> Body for Combine<T, J> {
    #[inline(always)]
    unsafe fn run(out: *mut u8, args: *const Arg, _: usize, _: usize) {
        // SAFETY: as above; one total, one element.
        unsafe {
            let total = out.cast::<T::Wide>();
            *total = J::combine(*total, (*(*args).row::<T>(0)).widen());
        }
    }
}

impl<T: Number> Body for Finish<T> {
    #[inline(always)]
    unsafe fn run(out: *mut u8, args: *const Arg, _: usize, _: usize) {
        // SAFETY: as above; one element, one total.
        unsafe { *out.cast::<T>() = T::narrow(*(*args).row::<T::Wide>(0)) };
    }
}

impl<T: Number, J: Monoid> Body for Columns<T, J> {
    #[inline(always)]
    unsafe fn run(out: *mut u8, args: *const Arg, rows: usize, cols: usize) {
        const WIDTH: usize = 64;
        // SAFETY: as above.
        let (out, x) = unsafe { (slice::from_raw_parts_mut(out.cast::<T>(), cols), *args) };
        let mut at = 0;
        while at + WIDTH <= cols {
            let mut acc = [T::ZERO; WIDTH];
            acc.copy_from_slice(&out[at..at + WIDTH]);
            for r in 0..rows {
                // SAFETY: `r` is below `rows`, `at + WIDTH` at most `cols`.
                let c = unsafe { &*x.row::<T>(r).add(at).cast::<[T; WIDTH]>() };
                for k in 0..WIDTH {
                    acc[k] = J::combine(acc[k], c[k]);
                }
            }
            out[at..at + WIDTH].copy_from_slice(&acc);
            at += WIDTH;
        }
        for r in 0..rows {
            // SAFETY: as above.
            let c = unsafe { slice::from_raw_parts(x.row::<T>(r).add(at), cols - at) };
            for (o, &v) in out[at..].iter_mut().zip(c) {
                *o = J::combine(*o, v);
            }
        }
    }
}

impl<T: Number, J: Monoid> Body for Partials<T, J> {
    #[inline(always)]
    unsafe fn run(out: *mut u8, args: *const Arg, rows: usize, cols: usize) {
        const WIDTH: usize = 64;
        // SAFETY: as above.
        let (out, x) = unsafe { (slice::from_raw_parts_mut(out.cast::<T>(), cols), *args) };
        for (b, out) in out.chunks_mut(WIDTH).enumerate() {
            let mut total = [J::identity::<T::Wide>(); WIDTH];
            for r in 0..rows {
                // SAFETY: the block is within the `cols` elements of the row.
                let c = unsafe { slice::from_raw_parts(x.row::<T>(r).add(b * WIDTH), out.len()) };
                for (t, &v) in total.iter_mut().zip(c) {
                    *t = J::combine(*t, v.widen());
                }
            }
            for (o, &t) in out.iter_mut().zip(&total) {
                *o = T::narrow(t);
            }
        }
    }
}

impl<T: Number, J: Monoid> Body for Reset<T, J> {
    #[inline(always)]
    unsafe fn run(out: *mut u8, _: *const Arg, rows: usize, cols: usize) {
        // SAFETY: as above.
        unsafe { slice::from_raw_parts_mut(out.cast::<T>(), rows * cols) }.fill(J::identity::<T>());
    }
}

impl<T: Number, J: Monoid> Body for ResetTotal<T, J> {
    #[inline(always)]
    unsafe fn run(out: *mut u8, _: *const Arg, _: usize, _: usize) {
        // SAFETY: as above; one total.
        unsafe { *out.cast::<T::Wide>() = J::identity::<T::Wide>() };
    }
}

fn of<T: Number, J: Monoid>(isa: Isa) -> Reduction {
    Reduction {
        rows: pick::<Rows<T, J>>(isa),
        lanes: pick::<Lanes<T, J>>(isa),
        fold: pick::<Fold<T, J>>(isa),
        combine: pick::<Combine<T, J>>(isa),
        finish: pick::<Finish<T>>(isa),
        columns: pick::<Columns<T, J>>(isa),
        partials: pick::<Partials<T, J>>(isa),
        reset: pick::<Reset<T, J>>(isa),
        reset_total: pick::<ResetTotal<T, J>>(isa),
    }
}

/// The loops of `function` over registers of `dtype`.
pub fn reduction(function: ReduceFn, dtype: DType, isa: Isa) -> Reduction {
    macro_rules! by_type {
        ($j:ident) => {
            match dtype.compute() {
                DType::F64 => of::<f64, $j>(isa),
                DType::I64 => of::<i64, $j>(isa),
                DType::I32 => of::<i32, $j>(isa),
                DType::U8 | DType::Bool => of::<u8, $j>(isa),
                _ => of::<f32, $j>(isa),
            }
        };
    }
    let f32s = dtype.compute() == DType::F32;
    match function {
        ReduceFn::Max if f32s => Reduction { rows: pick::<FastRows<Max>>(isa), ..of::<f32, Max>(isa) },
        ReduceFn::Min if f32s => Reduction { rows: pick::<FastRows<Min>>(isa), ..of::<f32, Min>(isa) },
        ReduceFn::Sum => by_type!(Sum),
        ReduceFn::Prod => by_type!(Prod),
        ReduceFn::Max => by_type!(Max),
        // The identity of bools is true, not 255.
        ReduceFn::Min if dtype == DType::Bool => of::<u8, All>(isa),
        ReduceFn::Min => by_type!(Min),
    }
}
