//! Emits the small kernels around attention: row deltas of the backward pass and strided copies (`kernels/attention/preprocess.cuh`).

use super::element;
use crate::launch::{Arg, Function, Launch};
use perilune_core::{DType, Layout, MAX_RANK};
use std::sync::Arc;

/// Computes the delta of each row. (Warpgroup kernels compute it themselves.)
pub(super) fn delta_function(size: u32, dtype: DType) -> Function {
    let (t, lanes) = (element(dtype), lanes(size));
    let text = format!(
        "#include \"attention/preprocess.cuh\"\n\
         extern \"C\" __global__ void __launch_bounds__(256) KERNEL(const {t}* grad, const {t}* out, f32* delta, const attention::Problem p) {{\n    \
         attention::row_delta<{t}, {lanes}>(grad, out, delta, p);\n}}\n"
    );
    Function { label: format!("attention_delta_{t}"), text }
}

/// Number of lanes that share a row of `size` elements, 8 elements each.
pub(super) fn lanes(size: u32) -> u32 {
    (size / 8).next_power_of_two()
}

fn copy_function(dtype: DType) -> Function {
    let t = if dtype.size() == 2 { "u16" } else { "u32" };
    let text = format!(
        "#include \"attention/preprocess.cuh\"\n\
         extern \"C\" __global__ void __launch_bounds__(256) KERNEL(const {t}* x, {t}* y, const attention::View p) {{\n    \
         attention::copy(x, y, p);\n}}\n"
    );
    Function { label: "attention_copy".into(), text }
}

/// The bits of a constant of the program, a float of 16 or 32 bits.
pub(crate) fn bits_of(bits: u64, dtype: DType) -> u32 {
    let x = f64::from_bits(bits);
    match dtype {
        DType::BF16 => half::bf16::from_f64(x).to_bits().into(),
        DType::F16 => half::f16::from_f64(x).to_bits().into(),
        _ => (x as f32).to_bits(),
    }
}

/// Copies elements of 16 or 32 bits with `layout` at `from` to contiguous memory. If `from` is null, fills it with
/// `fill`.
pub(crate) fn copy(dtype: DType, from: Arg, layout: &Layout, fill: u32, to: Arg) -> Launch {
    let shape = layout.shape;
    let (mut dims, mut strides) = ([1i64; MAX_RANK], [0i64; MAX_RANK]);
    let lead = MAX_RANK - shape.rank();
    for k in 0..shape.rank() {
        dims[lead + k] = shape.dims()[k] as i64;
        strides[lead + k] = layout.strides[k] as i64;
    }
    let numbers = dims.into_iter().chain(strides).chain([shape.numel() as i64, i64::from(fill)]);
    Launch {
        function: Arc::new(copy_function(dtype)),
        grid: [shape.numel().div_ceil(256) as u32, 1, 1],
        block: [256, 1, 1],
        shared_bytes: 0,
        args: vec![from, to, Arg::Bytes(numbers.flat_map(i64::to_le_bytes).collect())],
    }
}
