//! Instantiates the elementwise loops: `map_fns!` for every dtype that a function is defined on.
//!
//! f32 loops also exist with one operand broadcast over each row. Constants, row statistics and per-row scales then
//! need no tile. For other dtypes the operand is first expanded to a tile.

use super::{Arg, Body, Isa, Kernel, pick};
use crate::math::{Float, Number};
use perilune_core::DType;
use perilune_core::ops::elementwise::MapFn;
use std::marker::PhantomData;
use std::slice;

trait UnaryFn<T> {
    type Out: Copy;
    fn call(x: T) -> Self::Out;
}

trait BinaryFn<T> {
    type Out: Copy;
    fn call(x: T, y: T) -> Self::Out;
}

struct Unary<F, T>(PhantomData<(F, T)>);
struct Binary<F, T, const SX: bool, const SY: bool>(PhantomData<(F, T)>);
struct Where<T, const SX: bool, const SY: bool>(PhantomData<T>);

impl<T: Copy, F: UnaryFn<T>> Body for Unary<F, T> {
    #[inline(always)]
    unsafe fn run(out: *mut u8, args: *const Arg, rows: usize, cols: usize) {
        for r in 0..rows {
            // SAFETY: guaranteed by the caller (see `Body::run`), here and below in this file.
            let (o, x) = unsafe {
                let o = slice::from_raw_parts_mut(out.cast::<F::Out>().add(r * cols), cols);
                (o, slice::from_raw_parts((*args).row::<T>(r), cols))
            };
            for (o, &x) in o.iter_mut().zip(x) {
                *o = F::call(x);
            }
        }
    }
}

impl<T: Copy, F: BinaryFn<T>, const SX: bool, const SY: bool> Body for Binary<F, T, SX, SY> {
    #[inline(always)]
    unsafe fn run(out: *mut u8, args: *const Arg, rows: usize, cols: usize) {
        for r in 0..rows {
            // SAFETY: as above; a row broadcast is read once per row, so one element of it must be valid.
            let (o, x, y) = unsafe {
                let o = slice::from_raw_parts_mut(out.cast::<F::Out>().add(r * cols), cols);
                let x = slice::from_raw_parts((*args).row::<T>(r), if SX { 1 } else { cols });
                let y = slice::from_raw_parts((*args.add(1)).row::<T>(r), if SY { 1 } else { cols });
                (o, x, y)
            };
            match (SX, SY) {
                (false, false) => {
                    for ((o, &x), &y) in o.iter_mut().zip(x).zip(y) {
                        *o = F::call(x, y);
                    }
                }
                (false, true) => {
                    let y = y[0];
                    for (o, &x) in o.iter_mut().zip(x) {
                        *o = F::call(x, y);
                    }
                }
                _ => {
                    let x = x[0];
                    for (o, &y) in o.iter_mut().zip(y) {
                        *o = F::call(x, y);
                    }
                }
            }
        }
    }
}

impl<T: Copy, const SX: bool, const SY: bool> Body for Where<T, SX, SY> {
    #[inline(always)]
    unsafe fn run(out: *mut u8, args: *const Arg, rows: usize, cols: usize) {
        for r in 0..rows {
            // SAFETY: as above.
            let (o, c, x, y) = unsafe {
                let o = slice::from_raw_parts_mut(out.cast::<T>().add(r * cols), cols);
                let c = slice::from_raw_parts((*args).row::<u8>(r), cols);
                let x = slice::from_raw_parts((*args.add(1)).row::<T>(r), if SX { 1 } else { cols });
                let y = slice::from_raw_parts((*args.add(2)).row::<T>(r), if SY { 1 } else { cols });
                (o, c, x, y)
            };
            for i in 0..cols {
                let (x, y) = (x[if SX { 0 } else { i }], y[if SY { 0 } else { i }]);
                o[i] = if c[i] != 0 { x } else { y };
            }
        }
    }
}

/// Declares a type for each function of the table.
mod f {
    use super::{BinaryFn, Float, Number, UnaryFn};

    macro_rules! define {
        ($($v:ident $d:ident $n:tt |$($a:ident),*| $body:expr;)*) => { $( entry!($v $d $n |$($a),*| $body); )* };
    }

    macro_rules! entry {
        ($v:ident Any 1 |$x:ident| $body:expr) => {
            pub struct $v;
            impl<T: std::marker::Copy> UnaryFn<T> for $v {
                type Out = T;
                #[inline(always)]
                fn call($x: T) -> T {
                    $body
                }
            }
        };
        ($v:ident Number 1 |$x:ident| $body:expr) => {
            pub struct $v;
            impl<T: Number> UnaryFn<T> for $v {
                type Out = T;
                #[inline(always)]
                fn call($x: T) -> T {
                    $body
                }
            }
        };
        ($v:ident Number 2 |$x:ident, $y:ident| $body:expr) => {
            pub struct $v;
            impl<T: Number> BinaryFn<T> for $v {
                type Out = T;
                #[inline(always)]
                fn call($x: T, $y: T) -> T {
                    $body
                }
            }
        };
        ($v:ident Float 1 |$x:ident| $body:expr) => {
            pub struct $v;
            impl<T: Float> UnaryFn<T> for $v {
                type Out = T;
                #[inline(always)]
                fn call($x: T) -> T {
                    $body
                }
            }
        };
        ($v:ident Float 2 |$x:ident, $y:ident| $body:expr) => {
            pub struct $v;
            impl<T: Float> BinaryFn<T> for $v {
                type Out = T;
                #[inline(always)]
                fn call($x: T, $y: T) -> T {
                    $body
                }
            }
        };
        ($v:ident Code 1 |$x:ident| $body:expr) => {
            pub struct $v;
            impl<T: Float> UnaryFn<T> for $v {
                type Out = u8;
                #[inline(always)]
                fn call($x: T) -> u8 {
                    $body
                }
            }
        };
        ($v:ident Compare 1 |$x:ident| $body:expr) => {
            pub struct $v;
            impl<T: Number> UnaryFn<T> for $v {
                type Out = u8;
                #[inline(always)]
                fn call($x: T) -> u8 {
                    ($body) as u8
                }
            }
        };
        ($v:ident Compare 2 |$x:ident, $y:ident| $body:expr) => {
            pub struct $v;
            impl<T: Number> BinaryFn<T> for $v {
                type Out = u8;
                #[inline(always)]
                fn call($x: T, $y: T) -> u8 {
                    ($body) as u8
                }
            }
        };
        ($v:ident Logic 1 |$x:ident| $body:expr) => {
            pub struct $v;
            impl UnaryFn<u8> for $v {
                type Out = u8;
                #[inline(always)]
                fn call($x: u8) -> u8 {
                    let $x = $x != 0;
                    ($body) as u8
                }
            }
        };
        ($v:ident Logic 2 |$x:ident, $y:ident| $body:expr) => {
            pub struct $v;
            impl BinaryFn<u8> for $v {
                type Out = u8;
                #[inline(always)]
                fn call($x: u8, $y: u8) -> u8 {
                    let ($x, $y) = ($x != 0, $y != 0);
                    ($body) as u8
                }
            }
        };
    }

    perilune_core::map_fns!(define);
}

/// Which operands of an f32 loop are broadcast over a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RowBroadcast {
    pub x: bool,
    pub y: bool,
}

impl RowBroadcast {
    pub const NONE: RowBroadcast = RowBroadcast { x: false, y: false };
}

fn unary<F: UnaryFn<T>, T: Copy>(isa: Isa) -> Option<Kernel> {
    Some(pick::<Unary<F, T>>(isa))
}

fn binary<F: BinaryFn<T>, T: Copy>(isa: Isa, broadcast: RowBroadcast) -> Option<Kernel> {
    (broadcast == RowBroadcast::NONE).then(|| pick::<Binary<F, T, false, false>>(isa))
}

fn binary_broadcast<F: BinaryFn<f32>>(isa: Isa, broadcast: RowBroadcast) -> Option<Kernel> {
    match (broadcast.x, broadcast.y) {
        (false, false) => Some(pick::<Binary<F, f32, false, false>>(isa)),
        (false, true) => Some(pick::<Binary<F, f32, false, true>>(isa)),
        (true, false) => Some(pick::<Binary<F, f32, true, false>>(isa)),
        (true, true) => None,
    }
}

macro_rules! select {
    (Any 1 $v:ident $c:ident $isa:ident $broadcast:ident) => {
        copy($c, $isa)
    };
    (Number 1 $v:ident $c:ident $isa:ident $broadcast:ident) => {
        match $c {
            DType::F32 => unary::<f::$v, f32>($isa),
            DType::F64 => unary::<f::$v, f64>($isa),
            DType::I64 => unary::<f::$v, i64>($isa),
            DType::I32 => unary::<f::$v, i32>($isa),
            DType::U8 => unary::<f::$v, u8>($isa),
            _ => None,
        }
    };
    (Compare 1 $v:ident $c:ident $isa:ident $broadcast:ident) => {
        match $c {
            DType::F32 => unary::<f::$v, f32>($isa),
            DType::F64 => unary::<f::$v, f64>($isa),
            DType::I64 => unary::<f::$v, i64>($isa),
            DType::I32 => unary::<f::$v, i32>($isa),
            _ => unary::<f::$v, u8>($isa),
        }
    };
    (Number 2 $v:ident $c:ident $isa:ident $broadcast:ident) => {
        match $c {
            DType::F32 => binary_broadcast::<f::$v>($isa, $broadcast),
            DType::F64 => binary::<f::$v, f64>($isa, $broadcast),
            DType::I64 => binary::<f::$v, i64>($isa, $broadcast),
            DType::I32 => binary::<f::$v, i32>($isa, $broadcast),
            DType::U8 => binary::<f::$v, u8>($isa, $broadcast),
            _ => None,
        }
    };
    (Compare 2 $v:ident $c:ident $isa:ident $broadcast:ident) => {
        match $c {
            DType::F32 => binary_broadcast::<f::$v>($isa, $broadcast),
            DType::F64 => binary::<f::$v, f64>($isa, $broadcast),
            DType::I64 => binary::<f::$v, i64>($isa, $broadcast),
            DType::I32 => binary::<f::$v, i32>($isa, $broadcast),
            _ => binary::<f::$v, u8>($isa, $broadcast),
        }
    };
    (Code 1 $v:ident $c:ident $isa:ident $broadcast:ident) => {
        select!(Float 1 $v $c $isa $broadcast)
    };
    (Float 1 $v:ident $c:ident $isa:ident $broadcast:ident) => {
        match $c {
            DType::F32 => unary::<f::$v, f32>($isa),
            DType::F64 => unary::<f::$v, f64>($isa),
            _ => None,
        }
    };
    (Float 2 $v:ident $c:ident $isa:ident $broadcast:ident) => {
        match $c {
            DType::F32 => binary_broadcast::<f::$v>($isa, $broadcast),
            DType::F64 => binary::<f::$v, f64>($isa, $broadcast),
            _ => None,
        }
    };
    (Logic 1 $v:ident $c:ident $isa:ident $broadcast:ident) => {
        if $c == DType::Bool { unary::<f::$v, u8>($isa) } else { None }
    };
    (Logic 2 $v:ident $c:ident $isa:ident $broadcast:ident) => {
        if $c == DType::Bool { binary::<f::$v, u8>($isa, $broadcast) } else { None }
    };
}

/// The loop of `function` over operands of the compute dtype `dtype` (f32 for 16-bit floats); `None` if the function is
/// not defined on it. The last operand decides the dtype; `broadcast` applies to the last two.
pub fn map(function: MapFn, dtype: DType, isa: Isa, broadcast: RowBroadcast) -> Option<Kernel> {
    let c = dtype.compute();
    #[cfg(target_arch = "x86_64")]
    match (function, c, isa) {
        (MapFn::Erf, DType::F32, Isa::Avx2) => return Some(erf_simd::avx2),
        (MapFn::Erf, DType::F32, Isa::Avx512) => return Some(erf_simd::avx512),
        _ => {}
    }
    macro_rules! table {
        ($($v:ident $d:ident $n:tt |$($a:ident),*| $body:expr;)*) => {
            match function {
                $( MapFn::$v => select!($d $n $v c isa broadcast), )*
                MapFn::Where => select_where(c, isa, broadcast),
            }
        };
    }
    perilune_core::map_fns!(table)
}

/// Loops of erf with vector table look-ups, which the compiler would emit element by element.
#[cfg(target_arch = "x86_64")]
mod erf_simd {
    use super::Arg;
    use crate::loops::simd::{F32x8, F32x16, Vector};
    use crate::math::simd_f32;

    #[inline(always)]
    unsafe fn run<V: Vector>(out: *mut u8, args: *const Arg, rows: usize, cols: usize) {
        for r in 0..rows {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let (o, x) = (out.cast::<f32>().add(r * cols), (*args).row::<f32>(r));
                let whole = cols / V::LANES * V::LANES;
                for i in (0..whole).step_by(V::LANES) {
                    simd_f32::erf(V::load(x.add(i))).store(o.add(i));
                }
                if whole < cols {
                    simd_f32::erf(V::load_partial(x.add(whole), cols - whole))
                        .store_partial(o.add(whole), cols - whole);
                }
            }
        }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub unsafe fn avx2(out: *mut u8, args: *const Arg, rows: usize, cols: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { run::<F32x8>(out, args, rows, cols) }
    }

    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c")]
    pub unsafe fn avx512(out: *mut u8, args: *const Arg, rows: usize, cols: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { run::<F32x16>(out, args, rows, cols) }
    }
}

fn select_where(c: DType, isa: Isa, broadcast: RowBroadcast) -> Option<Kernel> {
    match (c, broadcast.x, broadcast.y) {
        (DType::F32, false, false) => Some(pick::<Where<f32, false, false>>(isa)),
        (DType::F32, false, true) => Some(pick::<Where<f32, false, true>>(isa)),
        (DType::F32, true, false) => Some(pick::<Where<f32, true, false>>(isa)),
        (DType::F32, true, true) => Some(pick::<Where<f32, true, true>>(isa)),
        (_, false, false) => Some(match c.size() {
            8 => pick::<Where<u64, false, false>>(isa),
            4 => pick::<Where<u32, false, false>>(isa),
            _ => pick::<Where<u8, false, false>>(isa),
        }),
        _ => None,
    }
}

/// Moves elements unchanged.
fn copy(c: DType, isa: Isa) -> Option<Kernel> {
    Some(copy_rows(c.size(), isa))
}

/// Copies rows of elements of `size` bytes.
pub fn copy_rows(size: usize, isa: Isa) -> Kernel {
    match size {
        8 => pick::<Unary<f::Copy, u64>>(isa),
        4 => pick::<Unary<f::Copy, u32>>(isa),
        2 => pick::<Unary<f::Copy, u16>>(isa),
        _ => pick::<Unary<f::Copy, u8>>(isa),
    }
}

struct Fill<T>(PhantomData<T>);

impl<T: Copy> Body for Fill<T> {
    #[inline(always)]
    unsafe fn run(out: *mut u8, args: *const Arg, rows: usize, cols: usize) {
        for r in 0..rows {
            // SAFETY: as above.
            unsafe { slice::from_raw_parts_mut(out.cast::<T>().add(r * cols), cols).fill(*(*args).row::<T>(r)) };
        }
    }
}

/// Repeats one element of each row of the operand over the row.
pub fn fill(size: usize, isa: Isa) -> Kernel {
    match size {
        8 => pick::<Fill<u64>>(isa),
        4 => pick::<Fill<u32>>(isa),
        2 => pick::<Fill<u16>>(isa),
        _ => pick::<Fill<u8>>(isa),
    }
}
