//! Tests convolutions and pools without a GPU: the operands of a call, and that the kernels around it compile without spills.
#![allow(clippy::unwrap_used)]

mod common_library;

use common_library::nvrtc::{Nvrtc, each};
use perilune_core::graph::{Graph, NodeId, Number};
use perilune_core::ops::{Args, Value, by_name, call, create, parse_signature};
use perilune_core::{DType, Layout, Shape, grad};
use perilune_cuda::conv::{self, Kind, Parts};
use perilune_cuda::emit;
use perilune_cuda::launch::{Arg, Props, Work};
use perilune_cuda::library::{self, pool};
use perilune_plan::ir::{Kernel, Library, Program};
use perilune_plan::{NullWith, Options, Request, Tracer};
use std::collections::BTreeSet;

fn gpu() -> NullWith {
    NullWith {
        has_kernel: |n| conv::has_kernel(n) || pool::has_kernel(n),
        can_store_layout: |n, output, l| conv::can_store_layout(n, output, l) || pool::can_store_layout(n, output, l),
    }
}

fn leaf(g: &mut Graph, dims: &[usize], dtype: DType) -> NodeId {
    let payload = g.len() as u64 + 1;
    g.leaf(&create::LEAF, Shape::of(dims), dtype, &[], payload)
}

/// Calls an op by name: tensors, then options as lists of ints.
fn record(g: &mut Graph, name: &str, positional: &[Value], options: &[(&str, i64)]) -> NodeId {
    let op = by_name(name).unwrap();
    let params = parse_signature(op.sig).unwrap();
    let mut values: Vec<Value> = params.iter().map(|p| p.default.clone()).collect();
    values[..positional.len()].clone_from_slice(positional);
    for (option, v) in options {
        let value =
            if *option == "groups" { Value::Number(Number::Int(*v)) } else { Value::Ints([*v].as_slice().into()) };
        values[params.iter().position(|p| p.name == *option).unwrap()] = value;
    }
    call(g, op, &Args::new(op, values)).unwrap()[0]
}

fn plan(g: &Graph, roots: Vec<NodeId>) -> Program {
    let request = Request { roots, state_writes: Vec::new(), ..Request::default() };
    let mut tracer = Tracer::default();
    tracer.run(g, &request, |_| None);
    let p = perilune_plan::pipeline::plan(g, &tracer, &request, Options::default(), &gpu()).unwrap();
    perilune_plan::check::check(&p).unwrap();
    p
}

fn gradients(g: &mut Graph, y: NodeId, of: &[NodeId]) -> Vec<NodeId> {
    let seed = leaf(g, g.shape(y).dims().to_vec().as_slice(), g.dtype(y));
    grad::grad(g, y, seed, of, false).unwrap().into_iter().flatten().collect()
}

fn calls(p: &Program) -> Vec<&Library> {
    let library = |k: &'_ Kernel| matches!(k, Kernel::Library(_));
    p.kernels
        .iter()
        .filter(|k| library(k))
        .map(|k| if let Kernel::Library(l) = k { l } else { unreachable!() })
        .collect()
}

/// Forward and both gradients of a convolution of leaves.
fn convolution(x: &[usize], w: &[usize], options: &[(&str, i64)]) -> Program {
    let g = &mut Graph::new();
    let (x, w) = (leaf(g, x, DType::BF16), leaf(g, w, DType::BF16));
    let y = record(g, "conv2d", &[Value::Tensor(x), Value::Tensor(w)], options);
    let mut roots = vec![y];
    roots.extend(gradients(g, y, &[x, w]));
    plan(g, roots)
}

/// The one call of a convolution.
fn only(p: &Parts) -> &conv::Call {
    assert_eq!(p.calls.len(), 1);
    &p.calls[0]
}

fn labels(w: &Work) -> Vec<&str> {
    w.launches.iter().map(|l| l.function.label.as_str()).collect()
}

fn parts(p: &Program, op: &str) -> Parts {
    conv::parts(calls(p).into_iter().find(|l| l.op.name == op).unwrap()).unwrap()
}

#[test]
fn operands_that_lie_otherwise_are_copied() {
    let p = convolution(&[2, 16, 9, 9], &[8, 16, 3, 3], &[("stride", 2), ("padding", 1)]);
    let forward = parts(&p, "conv2d");
    // Leaves are channels-first.
    assert_eq!((forward.before.launches.len(), forward.after.launches.len()), (2, 0));
    let problem = only(&forward).problem;
    assert_eq!(
        (problem.kind, problem.x, problem.w, problem.y),
        (Kind::Forward, [2, 16, 9, 9], [8, 16, 3, 3], [2, 8, 5, 5])
    );
    assert_eq!((problem.stride, problem.before, problem.after, problem.dilation), ([2, 2], [1, 1], [1, 1], [1, 1]));
    assert!(only(&forward).scratch >= 2 * (2 * 16 * 81 + 8 * 16 * 9));
    let input = only(&parts(&p, "conv2d_backward_input")).problem;
    assert_eq!((input.kind, input.x, input.y), (Kind::Input, problem.x, problem.y));
    let weight = only(&parts(&p, "conv2d_backward_weight")).problem;
    assert_eq!((weight.kind, weight.w), (Kind::Weight, problem.w));
}

#[test]
fn between_convolutions_nothing_is_copied() {
    let g = &mut Graph::new();
    let (x, w) = (leaf(g, &[2, 16, 9, 9], DType::BF16), leaf(g, &[16, 16, 1, 1], DType::BF16));
    let y = record(g, "conv2d", &[Value::Tensor(x), Value::Tensor(w)], &[]);
    let y = g.relu(y).unwrap();
    let y = record(g, "conv2d", &[Value::Tensor(y), Value::Tensor(w)], &[]);
    let p = plan(g, vec![y]);
    let second = conv::parts(calls(&p)[1]).unwrap();
    assert!(second.before.launches.is_empty() && second.before.scratch_bytes == 0);
    assert!(matches!(only(&second).x, Arg::Value(..)));
}

#[test]
fn few_channels_are_padded() {
    let p = convolution(&[2, 3, 9, 9], &[8, 3, 3, 3], &[("padding", 1)]);
    let forward = parts(&p, "conv2d");
    let problem = only(&forward).problem;
    assert_eq!((problem.x, problem.w, problem.y), ([2, 8, 9, 9], [8, 8, 3, 3], [2, 8, 9, 9]));
    for (op, launches) in [("conv2d_backward_input", 2), ("conv2d_backward_weight", 2)] {
        let back = parts(&p, op);
        // The operand with channels is padded and the other one copied; the padding is removed from the result.
        assert_eq!((back.before.launches.len(), back.after.launches.len()), (launches, 1), "{op}");
        assert_eq!((only(&back).problem.x[1], only(&back).problem.w[1]), (8, 8), "{op}");
    }
    // With groups, each group has its own channels.
    let p = convolution(&[2, 4, 9, 9], &[4, 1, 3, 3], &[("groups", 4)]);
    assert_eq!(only(&parts(&p, "conv2d")).problem.x, [2, 4, 9, 9]);
}

#[test]
fn a_gradient_over_no_images_is_zeros() {
    let p = convolution(&[0, 3, 9, 9], &[8, 3, 3, 3], &[]);
    let weight = parts(&p, "conv2d_backward_weight");
    assert!(weight.calls.is_empty() && weight.before.launches.len() == 1);
}

/// A biased convolution of leaves: the op, x, the weight and the bias.
fn biased(op: &str, x: &[usize], w: &[usize], channels: usize) -> Program {
    biased_with(op, x, w, channels, &[])
}

fn biased_with(op: &str, x: &[usize], w: &[usize], channels: usize, options: &[(&str, i64)]) -> Program {
    let g = &mut Graph::new();
    let inputs = [x, w, &[channels]].map(|dims| Value::Tensor(leaf(g, dims, DType::BF16)));
    let y = record(g, op, &inputs, options);
    plan(g, vec![y])
}

#[test]
fn a_bias_is_written_first_and_the_sums_are_added_to_it() {
    let p = biased("conv2d", &[2, 16, 9, 9], &[24, 16, 3, 3], 24);
    // The convolution, and a copy of the result to channels-first: no kernel adds the bias to a rounded sum.
    assert_eq!(p.kernels.len(), 2);
    let parts_of = parts(&p, "conv2d");
    let call = only(&parts_of);
    assert!(call.problem.adds && parts_of.after.launches.is_empty());
    // The bias is the last launch before the call, and writes to the result.
    let bias = parts_of.before.launches.last().unwrap();
    assert_eq!((labels(&parts_of.before).len(), &bias.args[1], bias.function.label.as_str()), (3, &call.y, "conv_pad"));
    let unbiased = convolution(&[2, 16, 9, 9], &[24, 16, 3, 3], &[]);
    assert!(!only(&parts(&unbiased, "conv2d")).problem.adds);
    // Where x has no elements, the bias is the result.
    let p = biased_with("conv2d", &[2, 4, 0, 9], &[8, 4, 3, 3], 8, &[("padding", 2)]);
    let Parts { before, calls, .. } = parts(&p, "conv2d");
    assert!(calls.is_empty() && labels(&before) == ["conv_pad"]);
}

/// Engines for kernels of one element round their sums before they add a bias.
#[test]
fn a_kernel_of_one_element_with_a_bias_is_a_product() {
    for (op, w) in [("conv2d", [24, 16, 1, 1]), ("conv_transpose2d", [16, 24, 1, 1])] {
        let p = biased(op, &[2, 16, 9, 9], &w, 24);
        let libraries =
            p.kernels.iter().filter_map(|k| if let Kernel::Library(l) = k { Some(l.op.name) } else { None });
        // This planner keeps convolutions alone: of `linear`, the product is left.
        assert_eq!(libraries.collect::<Vec<_>>(), ["matmul"], "{op}");
    }
}

/// Engines for other numbers of channels round their sums before they add a bias.
#[test]
fn channels_beside_a_bias_are_padded_to_multiples_of_8() {
    // 3 channels of x are computed as 8.
    let p = biased("conv_transpose2d", &[2, 16, 9, 9], &[16, 3, 3, 3], 3);
    let found = parts(&p, "conv2d_backward_input");
    let (call, bias) = (only(&found), found.before.launches.last().unwrap());
    assert_eq!((call.problem.x, call.problem.w, call.problem.y), ([2, 8, 11, 11], [16, 8, 3, 3], [2, 16, 9, 9]));
    assert!(call.problem.adds && matches!(call.x, Arg::Scratch(_)) && bias.args[1] == call.x);
    assert_eq!((labels(&found.after), bias.function.label.as_str()), (vec!["conv_copy"], "conv_pad_groups"));
    // So are 12 of y. The 16 of x need no padding.
    let p = biased("conv2d", &[2, 16, 9, 9], &[12, 16, 3, 3], 12);
    let found = parts(&p, "conv2d");
    assert_eq!((only(&found).problem.x, only(&found).problem.w), ([2, 16, 9, 9], [16, 16, 3, 3]));
    assert_eq!(labels(&found.before), ["transpose_planes", "conv_pad_groups", "conv_pad_groups"]);
    // Only 3 of x: the result needs no copy.
    let p = biased("conv2d", &[2, 3, 9, 9], &[24, 3, 3, 3], 24);
    let found = parts(&p, "conv2d");
    assert_eq!(only(&found).problem.w, [24, 8, 3, 3]);
    assert!(matches!(only(&found).y, Arg::Value(..)) && found.after.launches.is_empty());
    // Without a bias nothing is padded beyond the first 8.
    let p = convolution(&[2, 20, 9, 9], &[12, 20, 3, 3], &[]);
    assert_eq!(only(&parts(&p, "conv2d")).problem.w, [12, 20, 3, 3]);
}

#[test]
fn groups_beside_a_bias_are_dense_convolutions_of_their_own() {
    let p = biased_with("conv2d", &[2, 54, 9, 9], &[60, 18, 3, 3], 60, &[("groups", 3)]);
    let found = parts(&p, "conv2d");
    let problem = found.calls[0].problem;
    assert_eq!((problem.x, problem.w, problem.y), ([2, 24, 9, 9], [24, 24, 3, 3], [2, 24, 7, 7]));
    assert!(problem.adds && found.calls.len() == 3);
    let steps = [2 * 24 * 81 * 2, 24 * 24 * 9 * 2, 2 * 24 * 49 * 2];
    for pair in found.calls.windows(2) {
        assert_eq!(pair[0].problem, pair[1].problem);
        let at = |a: &Arg| if let Arg::Scratch(at) = a { *at } else { panic!("{a:?} is not in the workspace") };
        let [from, to] = [0, 1].map(|k| [&pair[k].x, &pair[k].w, &pair[k].y].map(at));
        assert_eq!([0, 1, 2].map(|i| to[i] - from[i]), steps);
    }
    assert_eq!((labels(&found.before), labels(&found.after)), (vec!["conv_pad_groups"; 3], vec!["conv_copy"]));
    // Without a bias cuDNN knows the groups.
    let p = convolution(&[2, 54, 9, 9], &[60, 18, 3, 3], &[("groups", 3)]);
    assert_eq!(only(&parts(&p, "conv2d")).problem.w, [60, 18, 3, 3]);
}

#[test]
fn groups_of_few_channels_beside_a_bias_have_a_kernel_of_their_own() {
    for (op, x, w, channels, groups, kernel) in [
        ("conv2d", [2, 16, 9, 9], [16, 1, 3, 3], 16, 16, "conv::direct<bf16, 8, false, u32>"),
        ("conv2d", [2, 6, 9, 9], [9, 2, 3, 3], 9, 3, "conv::direct<bf16, 1, false, u32>"),
        ("conv_transpose2d", [2, 16, 9, 9], [16, 1, 3, 3], 16, 16, "conv::direct<bf16, 8, true, u32>"),
        ("conv_transpose2d", [2, 6, 9, 9], [6, 3, 3, 3], 9, 3, "conv::direct<bf16, 1, true, u32>"),
    ] {
        let p = biased_with(op, &x, &w, channels, &[("groups", groups)]);
        let found = conv::parts(calls(&p)[0]).unwrap();
        let last = found.before.launches.last().unwrap();
        assert!(found.calls.is_empty() && found.after.launches.is_empty(), "{op}");
        assert!(last.function.text.contains(kernel), "{}", last.function.text);
    }
}

#[test]
fn large_results_are_turned_back_through_tiles() {
    // (2, 32, L) from (2, 1, L, 32); with fewer elements, or in f32 without cuDNN, element by element.
    let last = |dtype, length| {
        let g = &mut Graph::new();
        let inputs = [&[2, 16, length][..], &[32, 16, 3]].map(|dims| Value::Tensor(leaf(g, dims, dtype)));
        let y = record(g, "conv1d", &inputs, &[("padding", 1)]);
        let p = plan(g, vec![y]);
        let Some(Kernel::Region(r)) = p.kernels.last() else { return String::new() };
        let work = emit::regions(&p, std::slice::from_ref(r), &Props::H200).unwrap();
        assert_eq!(work.launches.len(), 1);
        if work.launches[0].function.label == "transpose_planes" {
            // A tile has 64 positions and 32 of 64 channels.
            assert_eq!(work.launches[0].grid, [2 * length as u32 / 64, 1, 1]);
        }
        work.launches[0].function.label.clone()
    };
    assert_eq!(last(DType::BF16, 1 << 15), "transpose_planes");
    assert_eq!(last(DType::F16, 1 << 15), "transpose_planes");
    assert_ne!(last(DType::BF16, 1 << 10), "transpose_planes");
    assert_ne!(last(DType::F32, 1 << 15), "transpose_planes");
}

/// The program must be computed alike everywhere, whatever cuDNN offers.
#[test]
fn the_route_is_a_rule_of_channels_and_groups() {
    use conv::Route::{Direct, Padded, Whole};
    for (biased, groups, inputs, outputs, want) in [
        (false, 1, 5, 7, Whole),
        (false, 3, 6, 9, Whole),
        (true, 1, 8, 16, Whole),
        (true, 1, 3, 16, Padded),
        (true, 1, 16, 12, Padded),
        (true, 2, 32, 64, Padded),
        (true, 2, 48, 48, Padded),
        (true, 2, 16, 64, Direct),
        (true, 64, 64, 128, Direct),
    ] {
        assert_eq!(conv::route(biased, groups, inputs, outputs), want, "{groups} groups, {inputs} to {outputs}");
    }
}

#[test]
fn transposed_and_one_dimensional_convolutions_run_on_cudnn() {
    for (op, x, w, kernel) in [
        ("conv1d", &[2, 16, 9][..], &[24, 16, 3][..], "conv2d"),
        ("conv_transpose1d", &[2, 16, 9], &[16, 24, 3], "conv2d_backward_input"),
        ("conv_transpose2d", &[2, 16, 9, 9], &[16, 24, 3, 3], "conv2d_backward_input"),
    ] {
        let p = biased(op, x, w, 24);
        let names: Vec<&str> = calls(&p).iter().map(|l| l.op.name).collect();
        assert_eq!(names, [kernel], "{op}");
        let problem = only(&parts(&p, kernel)).problem;
        if op == "conv1d" {
            assert_eq!((problem.x, problem.w, problem.y), ([2, 16, 1, 9], [24, 16, 1, 3], [2, 24, 1, 7]));
        }
    }
}

#[test]
fn only_convolutions_with_a_kernel_are_kept() {
    let p = |dtype| {
        let g = &mut Graph::new();
        let (x, w, b) = (leaf(g, &[1, 8, 5, 5], dtype), leaf(g, &[8, 8, 3, 3], dtype), leaf(g, &[8], dtype));
        let y = record(g, "conv2d", &[Value::Tensor(x), Value::Tensor(w), Value::Tensor(b)], &[]);
        let p = plan(g, vec![y]);
        calls(&p).iter().map(|l| l.op.name).collect::<Vec<_>>()
    };
    // With the bias; in f32, the decomposition.
    assert_eq!(p(DType::F16), ["conv2d"]);
    assert!(!p(DType::F32).contains(&"conv2d"));
    let g = &mut Graph::new();
    let (x, w) = (leaf(g, &[1, 8, 5, 5], DType::BF16), leaf(g, &[8, 8, 3, 2], DType::BF16));
    let y = g.push(by_name("conv2d").unwrap(), &[x, w], &[1, 1, 1, 0, 1, 1, 1, 1, 1]).unwrap();
    assert!(!conv::has_kernel(g.node(y)), "one zero at the end only");
}

#[test]
fn kernels_compile_without_spills() {
    let Some(nvrtc) = Nvrtc::open() else { return };
    let mut texts: BTreeSet<String> = BTreeSet::new();
    for dims in [[2, 3, 9, 9], [2, 16, 9, 9]] {
        let p = convolution(&dims, &[8, dims[1], 3, 3], &[]);
        for l in calls(&p) {
            let Parts { before, after, .. } = conv::parts(l).unwrap();
            texts.extend(before.launches.iter().chain(&after.launches).map(|l| l.function.text.clone()));
        }
    }
    let mut kernels = |p: &Program| {
        for l in calls(p) {
            let Parts { before, after, .. } = conv::parts(l).unwrap();
            texts.extend(before.launches.iter().chain(&after.launches).map(|l| l.function.text.clone()));
        }
    };
    for channels in [3, 12, 16] {
        kernels(&biased("conv_transpose2d", &[2, 16, 9, 9], &[16, channels, 3, 3], channels));
    }
    // Both sides of a transpose even or odd.
    for (c, size) in [(16, 10), (16, 9), (17, 10), (17, 9)] {
        kernels(&biased("conv2d", &[2, c, size, size], &[8, c, 3, 3], 8));
        kernels(&convolution(&[2, c, size, size], &[8, c, 3, 3], &[]));
    }
    for dtype in [DType::BF16, DType::F16] {
        for (c, o, groups) in [(16, 16, 16), (6, 9, 3), (54, 60, 3)] {
            for (op, x, w, bias) in [("conv2d", c, [o, c / groups], o), ("conv_transpose2d", o, [o, c / groups], c)] {
                let g = &mut Graph::new();
                let shapes = [&[2, x, 9, 9][..], &[w[0], w[1], 3, 3], &[bias]];
                let inputs = shapes.map(|dims| Value::Tensor(leaf(g, dims, dtype)));
                let y = record(g, op, &inputs, &[("groups", groups as i64)]);
                kernels(&plan(g, vec![y]));
            }
        }
    }
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        for (kernel, options) in [(2, vec![]), (3, vec![("stride", 2), ("padding", 1)]), (7, vec![("dilation", 2)])] {
            for behind_a_convolution in [false, true] {
                let g = &mut Graph::new();
                let mut x = leaf(g, &[2, 16, 24, 24], dtype);
                if behind_a_convolution {
                    let w = leaf(g, &[16, 16, 1, 1], dtype);
                    x = record(g, "conv2d", &[Value::Tensor(x), Value::Tensor(w)], &[]);
                }
                let y = record(g, "max_pool2d", &[Value::Tensor(x), Value::Ints([kernel].as_slice().into())], &options);
                let mut roots = vec![y];
                roots.extend(gradients(g, y, &[x]));
                let p = plan(g, roots);
                for l in calls(&p).into_iter().filter(|l| l.op.name.starts_with("max_pool2d")) {
                    let work = library::routine(&p, l, &Props::H200).unwrap();
                    texts.extend(work.launches.iter().map(|l| l.function.text.clone()));
                    // 16 bytes at a time if channels are adjacent in memory.
                    let wide = matches!(dtype, DType::BF16 | DType::F16) && behind_a_convolution;
                    let vector = work.launches[0].function.text.contains(", 8, true>");
                    // The seed of the gradient is channels-first.
                    let wide = wide && l.op.name == "max_pool2d";
                    assert_eq!(vector, wide, "{dtype} {:?}", work.launches[0].function.text);
                }
            }
        }
    }
    let texts: Vec<String> = texts.into_iter().collect();
    each(&["sm_80", "sm_90a", "sm_100a"], |arch| nvrtc.spill_free(&texts, arch));
}

#[test]
fn only_whole_images_channels_last_are_written() {
    let g = &mut Graph::new();
    let (x, w) = (leaf(g, &[2, 16, 9, 9], DType::BF16), leaf(g, &[8, 16, 3, 3], DType::BF16));
    let y = record(g, "conv2d", &[Value::Tensor(x), Value::Tensor(w)], &[]);
    let last = perilune_plan::passes::nhwc::last(g.shape(y));
    assert!(conv::can_store_layout(g.node(y), 0, &last));
    assert!(!conv::can_store_layout(g.node(y), 0, &Layout::contiguous(g.shape(y))));
}
