//! Tests rows of odd length between matrix products, which need 16-byte aligned rows: their producers read and write whole vectors and
//! pad rows with zeros, without separate padding kernels.
#![allow(clippy::unwrap_used)]

#[allow(dead_code)]
mod common;

use common::*;
use perilune_core::DType::{self, BF16, F16, F32, I64};
use perilune_core::graph::NodeId;
use perilune_cuda::launch::Props;
use perilune_cuda::{OfflineTarget, offline_target};
use perilune_plan::ir::{Kernel, Level, Program, Region};

/// A plan as compiled for a GPU.
fn program(s: &Sketch, roots: &[NodeId]) -> Program {
    plan_on(&s.g, s.request(roots), true, &OfflineTarget::default())
}

fn regions(p: &Program) -> impl Iterator<Item = &Region> {
    p.kernels.iter().flat_map(Kernel::regions)
}

/// The row strides of stored values with that many columns.
fn pitches(p: &Program, cols: usize) -> Vec<usize> {
    let of = |r: &Region| -> Vec<usize> {
        let full = r.stores.iter().filter(|s| r.body[s.0 as usize].level == Level::Full && r.cols == cols);
        full.map(|s| p.values[s.1.0 as usize].shape.numel() / (r.batch * r.rows)).collect()
    };
    regions(p).flat_map(of).collect()
}

/// The texts of the kernels over rows of that length.
fn texts(p: &Program, cols: usize) -> String {
    let over = |k: &Kernel| k.regions().iter().any(|r| r.cols == cols);
    let all = (0..p.kernels.len()).filter(|k| over(&p.kernels[*k]));
    all.map(|k| offline_target::text(p, k, &Props::H200).unwrap()).collect()
}

/// Number of elements that are copied for padding.
fn copied(p: &Program) -> usize {
    let numel = |k: &Kernel| match k {
        Kernel::Library(l) if l.op.name == "strided_pad" => l.inputs[0].shape().numel(),
        _ => 0,
    };
    p.kernels.iter().map(numel).sum()
}

/// A language model's head: its loss and, in training, the gradients of the product's operands.
fn head(d: DType, [rows, width, classes]: [usize; 3], smoothing: f64, biased: bool, trains: bool) -> Program {
    let mut s = Sketch::default();
    let (x, w, target) = (s.leaf(d, &[rows, width]), s.leaf(d, &[classes, width]), s.leaf(I64, &[rows]));
    let b = s.leaf(d, &[classes]);
    let wt = s.g.t(w).unwrap();
    let y = if biased { s.call("linear", &[t(x), t(w), t(b)]) } else { s.call("matmul", &[t(x), t(wt)]) };
    let loss = s.call_all("cross_entropy", &[t(y), t(target)], &[("label_smoothing", float(smoothing))])[0];
    let mut roots = vec![loss];
    if trains {
        roots.extend(s.grads(loss, &[x, w, b][..if biased { 3 } else { 2 }]));
    }
    program(&s, &roots)
}

/// Two products with ops between them that keep the odd width, with or without gradients.
fn between(d: DType, rows: usize, width: usize, trains: bool, f: impl Fn(&mut Sketch, NodeId) -> NodeId) -> Program {
    let mut s = Sketch::default();
    s.g.modes.tf32 = d == F32;
    let (x, up, down) = (s.leaf(d, &[rows, 1024]), s.leaf(d, &[1024, width]), s.leaf(d, &[width, 1024]));
    let y = s.call("matmul", &[t(x), t(up)]);
    let y = f(&mut s, y);
    let z = s.call("matmul", &[t(y), t(down)]);
    let mut roots = vec![z];
    if trains {
        let c = s.leaf(d, &[rows, 1024]);
        let m = s.call("mul", &[t(z), t(c)]);
        let l = s.call("sum", &[t(m)]);
        roots = s.grads(l, &[x, up, down]);
    }
    program(&s, &roots)
}

#[test]
fn a_loss_writes_its_gradient_in_whole_rows() {
    for (d, classes, pitch) in [(BF16, 50257, 50304), (F16, 50257, 50304), (BF16, 32003, 32064), (BF16, 9001, 9024)] {
        let p = head(d, [8192, 768, classes], 0.0, false, true);
        // Only the weight is copied, and the gradient is stored in place of the logits.
        assert_eq!(copied(&p), classes * 768, "{classes}");
        assert_eq!(pitches(&p, classes), [pitch], "{classes}");
        assert!(p.arena_bytes < 8192 * pitch * 2 + (80 << 20), "{classes}: {} bytes", p.arena_bytes);
        let text = texts(&p, classes);
        assert!(text.contains("store_vec_padded<8>") && text.contains("prefetch_l2("), "{text}");
        assert!(!text.contains("_pack<1") && !text.contains("cp_async<2>"), "{text}");
    }
    // With a bias, whose gradient sums columns of the loss's output.
    let p = head(BF16, [8192, 768, 50257], 0.0, true, true);
    assert_eq!((copied(&p), pitches(&p, 50257)), (50257 * 769, vec![50304]));
    let text = texts(&p, 50257);
    assert!(text.contains(" col_cast") && text.contains("store_vec_padded<8>") && !text.contains("_pack<1"), "{text}");
    // Without a gradient: whole packs are read.
    let text = texts(&head(BF16, [8192, 768, 50257], 0.0, false, false), 50257);
    assert!(text.contains("cp_async<16>") && text.contains("if (e < left)"), "{text}");
}

#[test]
fn values_between_odd_products_are_stored_padded() {
    let gelu = |s: &mut Sketch, y| s.call("gelu", &[t(y)]);
    let softmax = |s: &mut Sketch, y| s.call("softmax", &[t(y), int(-1)]);
    for width in [1003, 20001] {
        for (name, p) in
            [("gelu", between(BF16, 4096, width, false, gelu)), ("softmax", between(BF16, 4096, width, false, softmax))]
        {
            // The two weights.
            assert_eq!(copied(&p), 2 * 1024 * width, "{name} {width}");
            assert_eq!(pitches(&p, width), [usize::next_multiple_of(width, 64)], "{name} {width}");
            assert!(texts(&p, width).contains("store_vec_padded<8>"), "{name} {width}");
        }
    }
    // TF32: 32 elements per line.
    let p = between(F32, 4096, 1003, false, softmax);
    assert_eq!((copied(&p), pitches(&p, 1003)), (2 * 1024 * 1003, vec![1024]));
    assert!(texts(&p, 1003).contains("store_vec_padded<4>"));
}

/// Copies are not profitable for narrow models, but operands that a kernel computes are padded without a copy.
#[test]
fn what_costs_no_copy_grows_always() {
    let p = head(BF16, [4096, 128, 50257], 0.0, false, true);
    assert_eq!((copied(&p), pitches(&p, 50257)), (50257 * 128, vec![50304]));
    for k in &p.kernels {
        if let Kernel::Library(l) = k
            && l.op.name == "matmul"
        {
            assert!(l.inputs.iter().all(|o| o.shape().dims().iter().all(|d| d % 8 == 0)), "{:?}", l.inputs);
        }
    }
}

/// Requested results are not padded: their rows stay contiguous.
#[test]
fn results_keep_their_rows() {
    let mut s = Sketch::default();
    let (x, w) = (s.leaf(BF16, &[4096, 1024]), s.leaf(BF16, &[1024, 1003]));
    let y = s.call("matmul", &[t(x), t(w)]);
    let y = s.call("softmax", &[t(y), int(-1)]);
    let p = program(&s, &[y]);
    assert_eq!(pitches(&p, 1003), [1003]);
    assert!(!texts(&p, 1003).contains("store_vec_padded"));
}

#[test]
fn odd_rows_compile_without_spills() {
    let mut all = Vec::new();
    for trains in [false, true] {
        for (d, classes) in
            [(BF16, 50257), (F16, 50257), (BF16, 32003), (BF16, 9001), (BF16, 1001), (BF16, 250_002 - 1)]
        {
            all.push(head(d, [2048, 768, classes], 0.0, false, trains));
        }
        all.push(head(BF16, [2048, 768, 50257], 0.1, false, trains));
        all.push(head(BF16, [2048, 768, 50257], 0.0, true, trains));
        for d in [BF16, F32] {
            for width in [301, 1003, 5001, 20001] {
                all.push(between(d, 4096, width, trains, |s, y| s.call("gelu", &[t(y)])));
                all.push(between(d, 4096, width, trains, |s, y| s.call("softmax", &[t(y), int(-1)])));
                all.push(between(d, 4096, width, trains, |s, y| {
                    let (w, b) = (s.leaf(d, &[width]), s.leaf(d, &[width]));
                    s.call("layer_norm", &[t(y), t(w), t(b)])
                }));
            }
        }
    }
    let gpu = |arch, sms, shared: u32| Props { arch, sms, shared_bytes: shared << 10, ..Props::H200 };
    let gpus = [("sm_80", gpu((8, 0), 108, 163)), ("sm_90a", Props::H200), ("sm_100a", gpu((10, 0), 148, 227))];
    for (arch, props) in gpus {
        let mut functions = Functions::default();
        all.iter().for_each(|p| functions.add(&works_on(p, &props)));
        functions.compile(arch);
    }
}
