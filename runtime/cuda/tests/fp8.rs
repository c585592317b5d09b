//! Tests fp8 products: which ones cuBLASLt supports, and which operands are copied first.
#![allow(clippy::unwrap_used)]

#[allow(dead_code)]
mod common;

use common::*;
use perilune_core::graph::NodeId;
use perilune_core::ops::Value;
use perilune_core::{DType, Shape};
use perilune_cuda::launch::{Props, Work};
use perilune_cuda::offline_target::{self, OfflineTarget};
use perilune_plan::ir::{Kernel, Program};
use perilune_plan::{Options, Request, Tracer};

fn plan_for(s: &Sketch, root: NodeId, arch: (u32, u32)) -> Program {
    let request = Request { roots: vec![root], state_writes: Vec::new(), ..Request::default() };
    let mut tracer = Tracer::default();
    tracer.run(&s.g, &request, |_| None);
    let gpu = OfflineTarget::new(Props { arch, ..Props::H200 });
    let p = perilune_plan::pipeline::plan(&s.g, &tracer, &request, Options::default(), &gpu).unwrap();
    perilune_plan::check::check(&p).unwrap();
    p
}

/// The work of a product's kernel, if it is an fp8 product.
fn product(p: &Program) -> Option<(String, Vec<Work>)> {
    let k = p.kernels.iter().position(|k| matches!(k, Kernel::Library(l) if l.op.name == "matmul_fp8"))?;
    let (line, works) = offline_target::work(p, k, &Props::H200).unwrap();
    Some((line.unwrap(), works))
}

fn labels(works: &[Work]) -> Vec<&str> {
    works.iter().flat_map(|w| &w.launches).map(|l| l.function.label.as_str()).collect()
}

fn word(text: &str) -> Value {
    Value::Str(text.into())
}

#[test]
fn products_of_bytes_are_taken_where_a_gpu_has_them() {
    for (dims, formats, arch, taken) in [
        ([64, 32, 48], ["e4m3", "e4m3"], (9, 0), true),
        ([7, 32, 48], ["e5m2", "e4m3"], (8, 9), true),
        ([64, 32, 48], ["e4m3", "e5m2"], (10, 0), true),
        ([64, 32, 48], ["e5m2", "e5m2"], (9, 0), false),
        ([64, 32, 40], ["e4m3", "e4m3"], (9, 0), false),
        ([64, 24, 48], ["e4m3", "e4m3"], (9, 0), false),
        ([0, 32, 48], ["e4m3", "e4m3"], (9, 0), false),
        ([64, 32, 48], ["e4m3", "e4m3"], (8, 6), false),
    ] {
        let mut s = Sketch::default();
        let [m, n, k] = dims;
        let (a, b, bias) = (s.leaf(DType::U8, &[m, k]), s.leaf(DType::U8, &[n, k]), s.leaf(DType::BF16, &[n]));
        let (sa, sb) = (s.leaf(DType::F32, &[]), s.leaf(DType::F32, &[1]));
        let how = [("format_a", word(formats[0])), ("format_b", word(formats[1]))];
        let y = s.call_all("matmul_fp8", &[t(a), t(b), t(sa), t(sb), t(bias)], &how)[0];
        let found = product(&plan_for(&s, y, arch));
        assert_eq!(found.is_some(), taken, "{dims:?} {formats:?} {arch:?}");
        if let Some((line, works)) = found {
            let want =
                format!("cuBLASLt: ({m}, {k}) x ({k}, {n}, transposed) in {} and {} to bf16", formats[0], formats[1]);
            assert_eq!((line, labels(&works)), (want, vec![]));
        }
    }
}

#[test]
fn operands_that_lie_otherwise_are_turned() {
    let mut all = Functions::default();
    let mut s = Sketch::default();
    let (a, b) = (s.leaf(DType::U8, &[64, 160]), s.leaf(DType::U8, &[64, 304]));
    let (at, bt) = (s.g.t(a).unwrap(), s.g.t(b).unwrap());
    let y = s.call("matmul_fp8", &[t(at), t(bt), float(0.5), float(0.25)]);
    let (_, works) = product(&plan_for(&s, y, (9, 0))).unwrap();
    assert_eq!(labels(&works), ["transpose", "transpose"]);
    assert!(works.iter().map(|w| w.scratch_bytes).sum::<usize>() >= 64 * (160 + 304));
    all.add(&works);
    // Rows with gaps between them, and columns starting at an odd offset.
    let rows = s.g.slice(a, 1, 3, 67, 1).unwrap();
    let cols = s.g.slice(b, 1, 1, 33, 1).unwrap();
    let cols = s.g.t(cols).unwrap();
    let y = s.call("matmul_fp8", &[t(rows), t(cols), float(0.5), float(0.25)]);
    let (_, works) = product(&plan_for(&s, y, (9, 0))).unwrap();
    assert_eq!(labels(&works), ["dense", "dense"]);
    all.add(&works);
    // Constants have no address.
    let (x, w) = (s.leaf(DType::U8, &[16, 64]), s.leaf(DType::U8, &[32, 64]));
    let scale = s.g.constant(1.0, DType::F32);
    let bias = s.g.filled(2.0, Shape::of(&[32]), DType::BF16).unwrap();
    let y = s.call("matmul_fp8", &[t(x), t(w), t(scale), t(scale), t(bias)]);
    let (_, works) = product(&plan_for(&s, y, (9, 0))).unwrap();
    assert_eq!(labels(&works), ["dense"; 3]);
    all.add(&works);
    for arch in ["sm_90a", "sm_100a"] {
        all.compile(arch);
    }
}
