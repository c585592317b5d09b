//! Formats types, constants and functions as CUDA C++.

use perilune_core::DType;
use perilune_core::host_tensor;
use perilune_core::ops::elementwise::MapFn;
use perilune_core::ops::{ReduceFn, reduce};

/// The type of an element in memory.
pub fn stored(d: DType) -> &'static str {
    match d {
        DType::F64 => "f64",
        DType::F32 => "f32",
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        DType::I64 => "i64",
        DType::I32 => "i32",
        DType::U8 | DType::Bool => "u8",
    }
}

/// The type of a register.
pub fn computed(d: DType) -> &'static str {
    if d.is_half() { "f32" } else { stored(d) }
}

/// The type in which partial reductions are combined.
pub fn wide(d: DType) -> &'static str {
    match computed(d) {
        "f32" => "f64",
        other => other,
    }
}

/// The device function of a map: `op_` and its name in snake case (see `kernels/device/ops.cuh`).
pub fn function(f: MapFn) -> String {
    format!("op_{}", snake(f))
}

/// `FloorDiv` as `floor_div`.
pub fn snake(f: MapFn) -> String {
    let mut out = String::new();
    for c in format!("{f:?}").chars() {
        if c.is_ascii_uppercase() && !out.is_empty() {
            out.push('_');
        }
        out.push(c.to_ascii_lowercase());
    }
    out
}

/// `x` rounded to `d`.
pub fn rounded(d: DType, x: String) -> String {
    match d {
        DType::BF16 => format!("round_bf16({x})"),
        DType::F16 => format!("round_f16({x})"),
        _ => x,
    }
}

/// Applies a map to operands; `d` is the dtype of the result.
pub fn map(f: MapFn, d: DType, args: &[String]) -> String {
    if f == MapFn::Copy {
        return args[0].clone();
    }
    let mut args = args.to_vec();
    // Compilers fold `x == x` of integers, and then constants derived from it, such as tanh(1). They compute these more
    // accurately than the device does, so fused and unfused results would differ.
    use MapFn::*;
    if matches!(f, Eq | Ne | Lt | Le | Gt | Ge | Sub | Remainder | LogicalXor) && args[0] == args[1] {
        args[1] = format!("opaque({})", args[1]);
    }
    let call = format!("{}({})", function(f), args.join(", "));
    if f.is_exact() { call } else { rounded(d, call) }
}

pub fn cast(from: DType, to: DType, x: &str) -> String {
    if from == to || (from.is_half() && to == DType::F32) {
        return x.to_string();
    }
    format!("cast_{}({x})", to.name())
}

/// A constant of the program: f64 bits for floats, otherwise an i64.
pub fn constant(d: DType, bits: u64) -> String {
    let x = f64::from_bits(bits);
    let single = |x: f32| format!("__uint_as_float(0x{:08x}u)", x.to_bits());
    match d {
        DType::F64 => format!("__longlong_as_double(0x{bits:016x}ll)"),
        DType::F32 => single(x as f32),
        DType::BF16 => single(host_tensor::to_bf16(x).to_f32()),
        DType::F16 => single(host_tensor::to_f16(x).to_f32()),
        DType::I64 => format!("(i64)0x{bits:016x}ull"),
        DType::I32 => format!("(i32)0x{:08x}u", bits as u32),
        DType::U8 => format!("(u8){}", bits as u8),
        DType::Bool => format!("(u8){}", u8::from(bits != 0)),
    }
}

/// A run-time number; `word` is its slot.
pub fn slot(d: DType, word: &str) -> String {
    let float = format!("__longlong_as_double((i64){word})");
    match d {
        DType::F64 => float,
        DType::F32 => format!("(f32){float}"),
        DType::BF16 | DType::F16 => cast(DType::F64, d, &float),
        DType::I64 => format!("(i64){word}"),
        DType::I32 => format!("(i32)(u32){word}"),
        DType::U8 => format!("(u8){word}"),
        DType::Bool => format!("(u8)({word} != 0)"),
    }
}

/// The functor of a reduction: the name of its variant (see `kernels/device/reduce.cuh`).
pub fn functor(f: ReduceFn) -> String {
    format!("{f:?}")
}

/// The identity of a reduction over `d`, as a number of its compute type.
pub fn identity(f: ReduceFn, d: DType) -> String {
    let x = reduce::identity(f, d);
    if d.is_float() {
        return constant(if d == DType::F64 { d } else { DType::F32 }, x.to_bits());
    }
    let (low, high) = match d {
        DType::I64 => (i64::MIN, i64::MAX),
        DType::I32 => (i32::MIN as i64, i32::MAX as i64),
        DType::U8 => (0, 255),
        _ => (0, 1),
    };
    let x = if x == f64::NEG_INFINITY {
        low
    } else if x == f64::INFINITY {
        high
    } else {
        x as i64
    };
    constant(d, x as u64)
}
