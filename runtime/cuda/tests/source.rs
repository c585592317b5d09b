//! Tests kernels from CUDA source: the generated text, its compilation and the errors. Needs NVRTC, no GPU.
#![allow(clippy::unwrap_used)]

#[path = "../../../tests/src/skip.rs"]
mod skip;

use perilune_core::graph::Meta;
use perilune_core::ops::source::{self, Body, KERNEL, Launch};
use perilune_core::{DType, Error, Layout, Shape};
use perilune_cuda::launch::{Arg, Function, Props, Work};
use perilune_cuda::library;
use perilune_cuda::nvrtc::Compiler;
use perilune_plan::BufferDesc;
use perilune_plan::ir::{Kernel, Library, Operand, Origin, Program, Root, Storage, Value, ValueId};

/// Calls a body with inputs and outputs of 100 elements, two numbers and a scalar.
fn work(text: &str, inputs: &[DType], outputs: &[DType], grid: [i64; 3], shared: i64) -> Result<Work, Error> {
    let dims = Shape::of(&[100]);
    let body =
        Body { name: "mine".into(), text: text.into(), file: "recipes/a.lua".into(), line: 40, names: Vec::new() };
    let launch = Launch {
        body: source::intern(body),
        grid,
        block: [64, 2, 1],
        shared,
        scalars: 1,
        numbers: vec![100, -7],
        outputs: outputs.iter().map(|d| Meta { shape: dims, dtype: *d }).collect(),
    };
    let mut values = Vec::new();
    for (k, d) in inputs.iter().chain(&[DType::F32]).enumerate() {
        let shape = if k < inputs.len() { dims } else { Shape::SCALAR };
        values.push(Value { shape, dtype: *d, storage: Storage::Input(k as u32), origin: Origin::NONE });
    }
    let operands = (0..values.len()).map(|k| Operand::View(ValueId(k as u32), Layout::contiguous(values[k].shape)));
    let operands: Vec<_> = operands.collect();
    let out = ValueId(values.len() as u32);
    values.push(Value { shape: dims, dtype: outputs[0], storage: Storage::Output(0), origin: Origin::NONE });
    let l = Library {
        op: &KERNEL,
        attrs: launch.attrs(),
        dtypes: values[..values.len() - 1].iter().map(|v| v.dtype).collect(),
        inputs: operands,
        // Further outputs are not needed.
        outputs: vec![out],
        layouts: vec![Layout::contiguous(dims)],
        epilogue: None,
        tf32: false,
        origin: Origin::NONE,
    };
    let program = Program {
        inputs: values.iter().map(|v| (v.shape, v.dtype)).collect(),
        values,
        kernels: vec![Kernel::Library(l.clone())],
        in_flight: Vec::new(),
        outputs: vec![BufferDesc::new(dims, outputs[0])],
        slots: Vec::new(),
        starts: Vec::new(),
        results: vec![Root::Output(0)],
        arena_bytes: 0,
        live_bytes: 0,
        exchanges: Vec::new(),
        stages: Vec::new(),
        route: Default::default(),
    };
    library::routine(&program, &l, &Props::H200)
}

fn compile(work: &Work) -> Option<Result<String, Error>> {
    let Ok(mut compiler) = Compiler::new((9, 0), None) else {
        skip::no_nvrtc();
        return None;
    };
    let list: Vec<&Function> = work.launches.iter().map(|l| &*l.function).collect();
    Some(compiler.program(&list).map(|done| done.1))
}

const GOOD: &str = "\
#define KERNEL 3
float helper(float x) { return x * KERNEL; }
template <class T>
__global__ void __launch_bounds__(128, 4) mine(const float* x, const T* ids, float* y, int* unused, int n, long long m, float alpha) {
  extern __shared__ float room[];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = helper(x[i]) * alpha + (float)ids[i] + room[0];
  if (i < n) unused[i] = (int)m;
}
";

#[test]
fn a_source_becomes_one_launch() {
    let w = work(GOOD, &[DType::F32, DType::I64], &[DType::F32, DType::I32], [7, 2, 1], 4096).unwrap();
    let [launch] = &w.launches[..] else { panic!("{w:?}") };
    assert_eq!((launch.grid, launch.block, launch.shared_bytes), ([7, 2, 1], [64, 2, 1], 4096));
    let value = |k| Arg::Value(ValueId(k), 0);
    let expected = [value(0), value(1), value(2), value(3), Arg::Scratch(0), Arg::I64(100), Arg::I64(-7)];
    assert_eq!(launch.args, expected);
    assert_eq!(w.scratch_bytes, 512);
    let text = &launch.function.text;
    assert!(text.contains("launch_bounds(128, 4)"), "{text}");
    assert!(text.contains("mine(x0, x1, y0, y1, n0, n1, *x2);"), "{text}");
    if let Some(done) = compile(&w) {
        let log = done.unwrap();
        assert!(log.contains("0 bytes spill stores"), "{log}");
    }
}

#[test]
fn sixteen_bit_operands_have_their_own_types() {
    let ours = "__global__ void mine(const bf16* x, f16* y, int n, int, float a) { y[threadIdx.x] = to_f16(to_f32(x[threadIdx.x]) * a); }";
    let w = work(ours, &[DType::BF16], &[DType::F16], [1, 1, 1], 0).unwrap();
    if let Some(done) = compile(&w) {
        done.unwrap();
    }
}

#[test]
fn errors_name_lines_of_the_recipe() {
    let text = GOOD.replace("(float)ids[i]", "ids_[i]");
    let w = work(&text, &[DType::F32, DType::I64], &[DType::F32, DType::I32], [1, 1, 1], 0).unwrap();
    let Some(done) = compile(&w) else { return };
    let e = done.unwrap_err();
    assert_eq!(e.op, "mine");
    assert!(e.message.contains("recipes/a.lua:46: error: identifier \"ids_\" is undefined"), "{e}");
    assert!(!e.message.contains("compilation of"), "{e}");
    // Arguments that do not match.
    let w = work(GOOD, &[DType::F64, DType::I64], &[DType::F32, DType::I32], [1, 1, 1], 0).unwrap();
    let e = compile(&w).unwrap().unwrap_err();
    assert!(e.message.contains("its call: error:"), "{e}");
    let call =
        "(const double* x0, const long long* x1, const float* x2, float* y0, int* y1, long long n0, long long n1)";
    assert!(e.hint.as_deref().is_some_and(|h| h.contains(call)), "{e}");
}

#[test]
fn limits_of_the_device_are_errors() {
    let run = |grid, shared| work(GOOD, &[DType::F32, DType::I64], &[DType::F32, DType::I32], grid, shared);
    let e = run([1, 1, 1], 300_000).unwrap_err();
    assert!(e.message.contains("shared is 300000 bytes; a block has at most 232448"), "{e}");
    let e = run([1, 70_000, 1], 0).unwrap_err();
    assert!(e.message.contains("its extent 2 may be 65535 at most"), "{e}");
}
