//! Evaluates maps and reductions on single elements, as the reference for compiled regions.

use perilune_core::DType;
use perilune_core::ops::elementwise::{Domain, MapFn};
use perilune_core::ops::{ReduceFn, reduce};
use perilune_cpu::math::{Float, Number};
use perilune_plan::ir::{COL_CHUNK, LANES, ROW_CHUNK};

trait Bits: Number {
    fn from(bits: u64) -> Self;
    fn to(self) -> u64;
    /// Uses the language's operators instead of the backend's functions: sum, difference, product, negation.
    fn sum(self, y: Self) -> Self;
    fn difference(self, y: Self) -> Self;
    fn product(self, y: Self) -> Self;
    fn negated(self) -> Self;
}

macro_rules! bits {
    ($($t:ty, $from:expr, $to:expr, $add:expr, $sub:expr, $mul:expr, $neg:expr;)*) => { $( impl Bits for $t {
        fn from(bits: u64) -> Self { ($from)(bits) }
        fn to(self) -> u64 { ($to)(self) }
        fn sum(self, y: Self) -> Self { ($add)(self, y) }
        fn difference(self, y: Self) -> Self { ($sub)(self, y) }
        fn product(self, y: Self) -> Self { ($mul)(self, y) }
        fn negated(self) -> Self { ($neg)(self) }
    } )* };
}
bits! {
    f32, |b| f32::from_bits(b as u32), |x: f32| x.to_bits() as u64, |x, y| x + y, |x, y| x - y, |x, y| x * y, |x: f32| -x;
    f64, f64::from_bits, f64::to_bits, |x, y| x + y, |x, y| x - y, |x, y| x * y, |x: f64| -x;
    i64, |b| b as i64, |x| x as u64, i64::wrapping_add, i64::wrapping_sub, i64::wrapping_mul, i64::wrapping_neg;
    i32, |b| b as i32, |x| x as u32 as u64, i32::wrapping_add, i32::wrapping_sub, i32::wrapping_mul, i32::wrapping_neg;
    u8, |b| b as u8, |x| x as u64, u8::wrapping_add, u8::wrapping_sub, u8::wrapping_mul, u8::wrapping_neg;
}

/// The functions that floats and integers share.
fn arithmetic<T: Bits>(f: MapFn, a: &[u64]) -> u64 {
    let x = <T as Bits>::from(a[0]);
    let y = <T as Bits>::from(a[a.len().min(2) - 1]);
    use MapFn::*;
    match f {
        Copy => x,
        Neg => x.negated(),
        Relu => {
            if x < T::ZERO {
                T::ZERO
            } else {
                x
            }
        }
        Add => x.sum(y),
        Sub => x.difference(y),
        Mul => x.product(y),
        Eq => return (x == y) as u64,
        Ne => return (x != y) as u64,
        Lt => return (x < y) as u64,
        Le => return (x <= y) as u64,
        Gt => return (x > y) as u64,
        Ge => return (x >= y) as u64,
        IsNan => return x.is_nan() as u64,
        IsInf => return x.is_inf() as u64,
        _ => return scalar_number::<T>(f, a),
    }
    .to()
}

/// The value of a table entry if its domain is the wanted one: a float, or a byte of an 8-bit float.
macro_rules! value {
    (Float Float $t:ty, $args:ident |$($a:ident),*| $body:expr) => { value!($t, $args |$($a),*| $body) };
    (Number Number $t:ty, $args:ident |$($a:ident),*| $body:expr) => { value!($t, $args |$($a),*| $body) };
    (Float Code $t:ty, $args:ident |$a:ident| $body:expr) => {{
        let $a = <$t as Bits>::from($args[0]);
        u64::from($body)
    }};
    ($t:ty, $args:ident |$($a:ident),*| $body:expr) => {{
        let mut args = $args.iter().map(|x| <$t as Bits>::from(*x));
        $(let $a = args.next().expect("an operand");)*
        <$t as Bits>::to($body)
    }};
    ($want:ident $domain:ident $($rest:tt)*) => { panic!("not a function of domain {}", stringify!($want)) };
}

macro_rules! values {
    ($($v:ident $d:ident $n:literal |$($a:ident),*| $body:expr;)*) => {
        /// Functions of floats by the backend's scalar functions, which `math/tests.rs` compares with others.
        fn scalar_float<T: Float + Bits>(f: MapFn, args: &[u64]) -> u64 {
            match f { $(MapFn::$v => value!(Float $d T, args |$($a),*| $body),)* MapFn::Where => panic!("{f:?}") }
        }

        /// The same for functions of all numbers.
        fn scalar_number<T: Bits>(f: MapFn, args: &[u64]) -> u64 {
            match f { $(MapFn::$v => value!(Number $d T, args |$($a),*| $body),)* MapFn::Where => panic!("{f:?}") }
        }
    };
}
perilune_core::map_fns!(values);

fn float<T: Float + Bits>(f: MapFn, a: &[u64]) -> u64 {
    let x = <T as Bits>::from(a[0]);
    match f {
        MapFn::Reciprocal => T::ONE.div(x).to(),
        MapFn::Sigmoid2Rest => x.negated().sigmoid2().to(),
        f if matches!(f.domain(), Domain::Float | Domain::Code) => scalar_float::<T>(f, a),
        f => arithmetic::<T>(f, a),
    }
}

fn int<T: Bits>(f: MapFn, a: &[u64]) -> u64 {
    use MapFn::*;
    match f {
        LogicalAnd => a[0] & a[1],
        LogicalOr => a[0] | a[1],
        LogicalXor => a[0] ^ a[1],
        LogicalNot => 1 - a[0],
        _ => arithmetic::<T>(f, a),
    }
}

/// One element of a map: operands and result are the bits of the compute type.
pub fn eval(f: MapFn, dtype: DType, a: &[u64]) -> u64 {
    if f == MapFn::Where {
        return if a[0] != 0 { a[1] } else { a[2] };
    }
    match dtype.compute() {
        DType::F32 => float::<f32>(f, a),
        DType::F64 => float::<f64>(f, a),
        DType::I64 => int::<i64>(f, a),
        DType::I32 => int::<i32>(f, a),
        _ => int::<u8>(f, a),
    }
}

fn join(f: ReduceFn, dtype: DType, a: u64, b: u64) -> u64 {
    eval(f.combine(), dtype, &[a, b])
}

fn identity(f: ReduceFn, dtype: DType) -> u64 {
    let x = reduce::identity(f, dtype);
    let ends = |low: i64, high: i64| {
        if x.is_finite() {
            x as i64
        } else if x < 0.0 {
            low
        } else {
            high
        }
    };
    match dtype.compute() {
        DType::F32 => (x as f32).to_bits().into(),
        DType::F64 => x.to_bits(),
        DType::I64 => ends(i64::MIN, i64::MAX) as u64,
        DType::I32 => ends(i32::MIN.into(), i32::MAX.into()) as u32 as u64,
        _ => ends(0, 255) as u64,
    }
}

/// Combines chunks in order; f32 sums and products in f64.
fn chunks(f: ReduceFn, dtype: DType, parts: &[u64]) -> u64 {
    let wide = dtype.compute() == DType::F32 && matches!(f, ReduceFn::Sum | ReduceFn::Prod);
    if wide {
        let mut total = f64::from_bits(identity(f, DType::F64));
        for &p in parts {
            let p = f32::from_bits(p as u32) as f64;
            if f == ReduceFn::Sum { total += p } else { total *= p }
        }
        return (total as f32).to_bits() as u64;
    }
    parts.iter().fold(identity(f, dtype), |t, &p| join(f, dtype, t, p))
}

/// A row reduction in the order of `plan::ir`.
pub fn row(f: ReduceFn, dtype: DType, x: &[u64]) -> u64 {
    let parts: Vec<u64> = x
        .chunks(ROW_CHUNK)
        .map(|chunk| {
            let mut lanes = [identity(f, dtype); LANES];
            for (i, &v) in chunk.iter().enumerate() {
                lanes[i % LANES] = join(f, dtype, lanes[i % LANES], v);
            }
            let mut width = LANES;
            while width > 1 {
                width /= 2;
                for k in 0..width {
                    lanes[k] = join(f, dtype, lanes[k], lanes[k + width]);
                }
            }
            lanes[0]
        })
        .collect();
    chunks(f, dtype, &parts)
}

/// A column reduction in the order of `plan::ir`.
pub fn column_of(f: ReduceFn, dtype: DType, x: &[u64]) -> u64 {
    let parts: Vec<u64> =
        x.chunks(COL_CHUNK).map(|c| c.iter().fold(identity(f, dtype), |t, &v| join(f, dtype, t, v))).collect();
    chunks(f, dtype, &parts)
}
