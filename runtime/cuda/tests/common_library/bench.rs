//! Lists large calls without data: kernels/lab/library_lab.py generates the inputs from the label, compares with torch
//! and times both.

use super::{Call, Case, Lie};
use perilune_core::DType::{self, BF16, F16, F32, I32, I64};

fn new(label: &str) -> Case {
    Case::new(format!("bench {label}"))
}

/// Calls worth timing.
pub fn cases() -> Vec<Call> {
    let mut out = Vec::new();
    let (rows, width, tokens) = (50304, 768, 65536);
    for (dtype, name) in [(BF16, "bf16"), (F32, "f32")] {
        for spread in ["uniform", "zipf", "same"] {
            let case = new(&format!("{name} {spread}")).random(dtype, &[rows, width], Lie::Constant, false);
            let case = case.empty(I64, &[tokens]).empty(dtype, &[tokens, width]);
            out.push(case.finish("index_add", &[0], &[rows, width], dtype));
        }
        let case = new(name).empty(dtype, &[rows, width]).empty(I64, &[tokens]);
        out.push(case.finish("index_select", &[0], &[tokens, width], dtype));
        let case = new(&format!("{name} small")).random(dtype, &[65, 64], Lie::Constant, false);
        let case = case.empty(I64, &[512]).empty(dtype, &[512, 64]);
        out.push(case.finish("index_add", &[0], &[65, 64], dtype));
    }
    for (bins, n) in [(1000, 1 << 20), (10, 1 << 22)] {
        let case = new(&format!("{bins} {n}")).random(F32, &[bins], Lie::Constant, false);
        out.push(case.empty(I64, &[n]).empty(F32, &[n]).finish("scatter_add", &[0], &[bins], F32));
    }
    let square = [4096, 4096];
    for axis in [0, 1] {
        let case = new(&format!("{axis}")).empty(F32, &square).empty(I64, &square);
        out.push(case.finish("gather", &[axis], &square, F32));
    }
    let case = new("1").empty(F32, &square).empty(I64, &square).empty(F32, &square);
    out.push(case.finish("scatter", &[1], &square, F32));
    for (dtype, dims) in [
        (F32, &[32usize, 50304][..]),
        (BF16, &[32, 50304]),
        (I64, &[32, 50304]),
        (F32, &[1, 1 << 22]),
        (F32, &[4096, 1000]),
        (F32, &[16384, 4096]),
        (F32, &[65536, 64]),
    ] {
        for way in [0, 1] {
            let case = || new(&format!("{dtype} {dims:?} 1 {way}")).empty(dtype, dims);
            out.push(case().finish("argsort", &[1, way], dims, I64));
            let to = [dims[0], 1];
            out.push(case().finish("argreduce", &[1, way], &to, I64));
        }
    }
    out.push(new("f32 [4096, 4096] 0 1").empty(F32, &square).finish("argreduce", &[0, 1], &[1, 4096], I64));
    out.push(new("f32 [1, 67108864] 1 1").empty(F32, &[1, 1 << 26]).finish("argreduce", &[1, 1], &[1, 1], I64));
    let scan = |dtype: DType, dims: &[usize], axis: i64| {
        new(&format!("{dtype} {dims:?} {axis}")).empty(dtype, dims).finish("cumsum", &[axis], dims, dtype)
    };
    out.push(scan(F32, &square, 1));
    out.push(scan(F32, &square, 0));
    out.push(scan(F32, &[1, 1 << 26], 1));
    out.push(scan(BF16, &square, 1));
    out.push(scan(F32, &[1 << 20, 16], 1));
    out.push(scan(F32, &[65536, 256], 1));
    out.push(scan(I64, &square, 1));
    let two = new("1").empty(BF16, &square).empty(BF16, &square);
    out.push(two.finish("cat", &[1], &[4096, 8192], BF16));
    let padded = [4096, 4224];
    out.push(new("64").empty(F32, &square).finish("strided_pad", &[1, 64, 1, 4224, 0], &padded, F32));
    out.push(new("3").empty(F32, &[64, 256, 256]).finish("strided_pad", &[2, 3, 1, 262, 0], &[64, 256, 262], F32));
    let windows = new("3 1").empty(F32, &[2048, 56, 58, 3]);
    out.push(windows.finish("col2im", &[1, 3, 1, 1, 58], &[2048, 58, 58], F32));
    for dtype in [I32, I64, F32] {
        let side = [1024, 1024];
        let case = new(&format!("{dtype}")).empty(dtype, &side).empty(dtype, &side);
        out.push(case.finish("matmul", &[], &side, dtype));
    }
    out
}

/// Large calls, some with more elements than 32 bits can count: only compiled.
pub fn huge() -> Vec<Call> {
    let (dims, half) = ([3usize, 1 << 30], [3usize, 1 << 29]);
    let case = || new("huge").empty(BF16, &dims);
    let (rows, w) = ([16384, 2048], [8, 2048, 2048]);
    let groups = |dtype: DType, side: &[usize]| new("huge").empty(dtype, &rows).empty(dtype, side).empty(I64, &[8]);
    vec![
        groups(BF16, &w).finish("grouped_matmul", &[], &rows, BF16),
        groups(F16, &rows).finish("grouped_sums", &[], &w, F16),
        case().finish("cumsum", &[1], &dims, BF16),
        case().finish("argreduce", &[1, 1], &[3, 1], I64),
        case().finish("strided_pad", &[0, 1, 2, 9, 0], &[9, 1 << 30], BF16),
        case().empty(BF16, &half).finish("cat", &[1], &[3, 3 << 29], BF16),
        case().empty(I64, &[7]).finish("index_select", &[0], &[7, 1 << 30], BF16),
        case().empty(I64, &dims).finish("gather", &[1], &dims, BF16),
        case().empty(I64, &[3, 5]).empty(BF16, &[3, 5]).finish("scatter", &[1], &dims, BF16),
        case().empty(I64, &[3, 5]).empty(BF16, &[3, 5]).finish("scatter_add", &[1], &dims, BF16),
        case().empty(I64, &[7]).empty(BF16, &[7, 1 << 30]).finish("index_add", &[0], &dims, BF16),
    ]
}
