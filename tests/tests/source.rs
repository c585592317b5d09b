//! Tests plans with the source text of their kernels, on a machine without a GPU.
#![allow(clippy::unwrap_used)]

use perilune_core::{DType, HostTensor, Shape};
use perilune_cpu::Cpu;
use perilune_cuda::OfflineTarget;
use perilune_engine::Engine;
use perilune_tests::harness::{call, t};
use std::rc::Rc;
use std::sync::Arc;

#[test]
fn a_plan_on_the_cpu_shows_what_a_gpu_would_run() {
    let mut e = Engine::new(Arc::new(Cpu::new(None)));
    e.diagnostics.source_display = Some(Rc::new(|step| step.show_for(step.graph(), &OfflineTarget::default())));
    let zeros = |dims: &[usize]| {
        let shape = Shape::of(dims);
        HostTensor::new(DType::F32, shape, vec![0; shape.numel() * 4])
    };
    let file = e.recorder.source_map.file("no-such-recipe.lua");
    let (x, w) = (e.from_host(zeros(&[8, 512])), e.from_host(zeros(&[512, 4])));
    e.recorder.graph.modes.loc = e.recorder.source_map.intern(file, 7);
    let y = call(&mut e, "matmul", &[t(x), t(w)], &[]).unwrap();
    e.recorder.graph.modes.loc = e.recorder.source_map.intern(file, 8);
    let y = call(&mut e, "softmax", &[t(y), perilune_tests::harness::int(-1)], &[]).unwrap();
    let text = e.show_plan(&[y], true).unwrap();
    assert!(text.starts_with("as a GPU (sm_90, 132 SMs) would run it: 2 kernels"), "{text}");
    assert!(text.contains("// cuBLASLt: (8, 512) x (512, 4) in f32"), "{text}");
    assert!(text.contains("__global__ void"), "{text}");
    assert!(text.contains("no-such-recipe.lua:8 "), "{text}");
    assert!(!text.contains("KERNEL"), "{text}");
    // Without the switch, the plan of the actual device.
    let plain = e.show_plan(&[y], false).unwrap();
    assert!(!plain.contains("__global__"), "{plain}");
}
