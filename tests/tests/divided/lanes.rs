//! Checks when collectives start and are waited for, which of them share a bucket, and that the checker finds misuse of their memory.

use crate::states::{deep, split_states};
use crate::step::{Step, collectives};
use perilune_core::mesh::{Along, Axis};
use perilune_core::ops::Value;
use perilune_core::ops::collective::COLLECTIVE_PERMUTE;
use perilune_core::{DType, Mesh, Placement};
use perilune_plan::ir::{InFlight, Kernel, Operand, Program, Storage};
use perilune_plan::{Options, check, lanes, show};
use perilune_tests::harness::t;
use perilune_tests::virtual_devices::{self, Spread};

fn planned(s: &Step, spread: &Spread, bucket: usize) -> Program {
    let options = Options { bucket, ..Options::default() };
    let program = virtual_devices::plan_with(&s.e.recorder.graph, &s.request, spread, options).unwrap().0;
    (*program).clone()
}

fn split_batch(s: &Step, mesh: &str) -> Spread {
    let split = Placement::REPLICATED.with(Axis::Dp, Along::Split(0));
    Spread {
        mesh: Mesh::parse(mesh).unwrap(),
        placements: s.batch.iter().map(|b| (*b, split)).collect(),
        ..Spread::default()
    }
}

/// One line for each kernel: its name, what starts, and what is waited for.
fn schedule(p: &Program) -> Vec<String> {
    let line = |(k, kernel): (usize, &Kernel)| {
        let waits = p.in_flight.iter().filter(|f| f.wait == k).map(|f| format!("wait {} ", f.start));
        let name = match lanes::collective(kernel) {
            Some(l) => format!("{k}: start {} of {}", l.op.name, l.inputs.len()),
            None => format!("{k}: {}", show::name(kernel)),
        };
        waits.collect::<String>() + &name
    };
    p.kernels.iter().enumerate().map(line).collect()
}

/// The kernels that run while a collective is in flight.
fn hidden(f: &InFlight) -> usize {
    f.wait - f.start - 1
}

#[test]
fn the_gradient_of_a_layer_is_sent_while_those_before_it_are_computed() {
    let s = deep(4, 8, 16, false);
    let p = planned(&s, &split_batch(&s, "dp=2"), 0);
    let text = schedule(&p).join("\n");
    assert_eq!(collectives(&p)["all_reduce"], 2 + 8, "{text}");
    // Those of the loss and its count come first; then the weights and biases of four layers, from the last one on.
    let gradients = &p.in_flight[2..];
    assert!(gradients.iter().take(6).all(|f| hidden(f) >= 2), "{text}");
    let products: Vec<usize> =
        (0..p.kernels.len()).filter(|k| show::name(&p.kernels[*k]).starts_with("matmul")).collect();
    let (first, last) = (gradients[0], products[products.len() - 1]);
    assert!(first.start < last && first.wait > last, "{text}");
    // All are waited for by the first kernel that needs the norm's squares, none before.
    assert!(gradients.iter().all(|f| f.wait > last), "{text}");
}

#[test]
fn a_bucket_has_as_many_bytes_as_it_may() {
    let s = deep(6, 8, 16, false);
    let spread = split_batch(&s, "dp=2");
    let layer = (16 * 16 + 16) * 8;
    let calls = |p: &Program| {
        let sizes = p.kernels.iter().filter_map(lanes::collective).map(|l| l.inputs.len());
        sizes.collect::<Vec<_>>()
    };
    for (bucket, most) in [(0, 1), (layer, 2), (3 * layer, 6), (1 << 20, 12)] {
        let p = planned(&s, &spread, bucket);
        let sizes = calls(&p);
        assert_eq!(sizes.iter().sum::<usize>(), 14, "{bucket}: {sizes:?}");
        assert_eq!(sizes.iter().copied().max(), Some(most), "{bucket}: {sizes:?}");
        // The number of kernels shrinks by that of the calls saved.
        assert_eq!(sizes.len(), p.in_flight.len());
    }
    // The operands of a bucket lie one behind the other, and the results are there.
    let p = planned(&s, &spread, 1 << 20);
    let l = p.kernels.iter().filter_map(lanes::collective).find(|l| l.inputs.len() == 12).unwrap();
    let mut next = None;
    for (x, y) in l.inputs.iter().zip(&l.outputs) {
        let Operand::View(x, _) = x else { panic!("a constant") };
        let (x, y) = (&p.values[x.0 as usize], &p.values[y.0 as usize]);
        let Storage::Arena(at) = x.storage else { panic!("{:?}", x.storage) };
        assert_eq!(x.storage, y.storage);
        assert!(next.is_none_or(|next| next == at), "{next:?} and {at}");
        next = Some(at + x.nbytes().next_multiple_of(256));
    }
}

#[test]
fn small_first_buckets_begin_early() {
    let width = 192;
    let s = deep(8, 4, width, false);
    let p = planned(&s, &split_batch(&s, "dp=2"), 8 << 20);
    let matrix = width * width * 8;
    let bytes: Vec<usize> = p
        .kernels
        .iter()
        .filter_map(lanes::collective)
        .map(|l| l.outputs.iter().map(|v| p.values[v.0 as usize].nbytes()).sum())
        .filter(|n| *n > 1000)
        .collect();
    assert!(bytes[0] <= lanes::FIRST_BUCKET_BYTES && bytes[0] > lanes::FIRST_BUCKET_BYTES - matrix - 4096, "{bytes:?}");
    assert!(bytes[bytes.len() - 1] > 1 << 20, "{bytes:?}");
}

/// The gradient of an embedding is the last and the largest; products of other layers run while it is summed.
#[test]
fn products_run_beside_the_sum_of_the_last_gradient() {
    let (batch, names, width) = (131_072, 4096, 64);
    let mut s = Step::new(DType::F64);
    let (ids, y) = (s.batch_ids(&[batch], names), s.batch_ids(&[batch], width));
    let table = s.weight(&[names, width]);
    let mut x = s.call("embedding", &[t(table), t(ids)]);
    for _ in 0..3 {
        x = s.layer(x, width, width);
        x = s.call("gelu", &[t(x)]);
    }
    let loss = s.call("cross_entropy", &[t(x), t(y)]);
    s.train(loss);
    s.request.roots.truncate(2);
    let p = planned(&s, &split_batch(&s, "dp=2"), lanes::BUCKET_BYTES);
    let text = schedule(&p).join("\n");
    let sent = |f: &&InFlight| {
        let l = lanes::collective(&p.kernels[f.start]).unwrap();
        l.outputs.iter().map(|v| p.values[v.0 as usize].nbytes()).sum::<usize>()
    };
    let largest = p.in_flight.iter().max_by_key(sent).unwrap();
    assert_eq!(sent(&largest), names * width * 8, "{text}");
    let beside = (largest.start..largest.wait).filter(|k| show::name(&p.kernels[*k]).starts_with("matmul"));
    assert_eq!(beside.count(), 3, "{text}");
    // Those of the forward pass and of the inputs' gradients come before it.
    let before = p.kernels[..largest.start].iter().filter(|k| show::name(k).starts_with("matmul")).count();
    assert_eq!(before, 6, "{text}");
}

/// Terms that two devices exchange are sent in buckets. Behind the start of the last exchange, which products run beside, buckets are as
/// large as what follows them hides, and the last has one tensor.
#[test]
fn exchanges_of_terms_share_buckets_until_the_last_sum() {
    let (batch, names, width) = (131_072, 4096, 640);
    let mut s = Step::new(DType::F32);
    let half = Value::DType(DType::BF16);
    let (ids, y) = (s.batch_ids(&[batch], names), s.batch_ids(&[batch], width));
    let table = s.weight(&[names, width]);
    let x = s.call("embedding", &[t(table), t(ids)]);
    let mut x = s.call("to", &[t(x), half.clone()]);
    for _ in 0..8 {
        let w = s.weight(&[width, width]);
        let w = s.call("to", &[t(w), half.clone()]);
        x = s.call("linear", &[t(x), t(w)]);
        x = s.call("gelu", &[t(x)]);
    }
    let x = s.call("to", &[t(x), Value::DType(DType::F32)]);
    let loss = s.call("cross_entropy", &[t(x), t(y)]);
    s.train(loss);
    s.request.roots.truncate(2);
    let matrix = width * width * 2;
    let p = planned(&s, &split_batch(&s, "dp=2"), 3 * matrix);
    let text = schedule(&p).join("\n");
    let last = p.in_flight.iter().find(|f| {
        let l = lanes::collective(&p.kernels[f.start]).unwrap();
        l.op == &COLLECTIVE_PERMUTE && p.values[l.outputs[0].0 as usize].nbytes() == names * width * 4
    });
    let last = last.unwrap();
    let sizes = |starts: &dyn Fn(usize) -> bool| {
        let calls =
            p.in_flight.iter().filter(|f| starts(f.start)).filter_map(|f| lanes::collective(&p.kernels[f.start]));
        calls.filter(|l| l.op == &COLLECTIVE_PERMUTE).map(|l| l.inputs.len()).collect::<Vec<_>>()
    };
    let (before, behind) = (sizes(&|k| k < last.start), sizes(&|k| k > last.start));
    assert_eq!(before.iter().chain(&behind).sum::<usize>(), 8, "{text}");
    assert!(behind.is_sorted_by(|a, b| a >= b) && behind.last() == Some(&1), "{text}");
    assert_eq!((before[0], before.iter().max()), (1, Some(&3)), "{text}");
    let beside = (last.start..last.wait).filter(|k| show::name(&p.kernels[*k]).starts_with("matmul"));
    assert_eq!(beside.count(), behind.iter().sum::<usize>(), "{text}");
}

/// New weights are gathered in buckets, the largest first, and each bucket is computed by one launch.
#[test]
fn new_weights_are_gathered_in_buckets_while_others_are_computed() {
    let mut s = Step::new(DType::F64);
    let (mut x, y) = (s.batch_randn(&[8, 64]), s.batch_ids(&[8], 64));
    x = s.layer(x, 64, 65536);
    x = s.layer(x, 65536, 64);
    for _ in 0..4 {
        x = s.layer(x, 64, 64);
    }
    let loss = s.call("cross_entropy", &[t(x), t(y)]);
    s.train(loss);
    s.request.roots.truncate(2);
    let p = planned(&s, &split_states(&s, "dp=2", false), lanes::BUCKET_BYTES);
    let text = schedule(&p).join("\n");
    let gathers: Vec<&InFlight> = p
        .in_flight
        .iter()
        .filter(|f| lanes::collective(&p.kernels[f.start]).is_some_and(|l| l.op.name == "all_gather"))
        .collect();
    // Two of 32 MiB, and one of the ten others.
    assert_eq!(gathers.len(), 3, "{text}");
    let bytes = |f: &InFlight| {
        let l = lanes::collective(&p.kernels[f.start]).unwrap();
        l.outputs.iter().map(|v| p.values[v.0 as usize].nbytes()).max().unwrap()
    };
    assert_eq!(bytes(gathers[0]), 64 * 65536 * 8, "{text}");
    // A block of a weight is read where the whole is.
    let copies = p.kernels.iter().filter(|k| show::name(k) == "index_select").count();
    assert_eq!(copies, 0, "{text}");
}

/// Weights are gathered one layer ahead of their use.
#[test]
fn split_weights_are_gathered_beside_the_layer_before() {
    let s = deep(6, 8, 16, false);
    let p = planned(&s, &split_states(&s, "dp=4", true), 0);
    let text = schedule(&p).join("\n");
    let gathers: Vec<&InFlight> = p
        .in_flight
        .iter()
        .filter(|f| lanes::collective(&p.kernels[f.start]).is_some_and(|l| l.op.name == "all_gather"))
        .collect();
    let products =
        |f: &InFlight| (f.start..f.wait).filter(|k| show::name(&p.kernels[*k]).starts_with("matmul")).count();
    let beside = gathers.iter().filter(|f| products(f) > 0).count();
    assert!(beside >= gathers.len() / 2, "{beside} of {} beside a product\n{text}", gathers.len());
}

/// Every rule of the checker is broken once.
#[test]
fn the_checker_finds_memory_that_is_used_too_early() {
    let s = deep(4, 8, 16, false);
    let p = planned(&s, &split_batch(&s, "dp=2"), 0);
    check::check(&p).unwrap();
    let at = p.in_flight.iter().position(|f| hidden(f) >= 4 && f.wait < p.kernels.len()).unwrap();
    let f = p.in_flight[at];
    let l = lanes::collective(&p.kernels[f.start]).unwrap();
    let error = |change: &dyn Fn(&mut Program)| {
        let mut p = p.clone();
        change(&mut p);
        check::check(&p).expect_err("the checker finds nothing")
    };
    let late = error(&|p| p.in_flight[at].wait = p.kernels.len());
    assert!(late.contains(&format!("which kernel {} still computes", f.start)), "{late}");
    let alone = |k: &usize| !matches!(p.kernels[*k], Kernel::Multi(_)) && lanes::collective(&p.kernels[*k]).is_none();
    let other = (f.start + 1..f.wait).filter(alone).flat_map(|k| p.kernels[k].writes()).next().unwrap();
    let Operand::View(operand, _) = l.inputs[0] else { panic!("a constant") };
    for used in [operand, l.outputs[0]] {
        let reused = error(&|p| p.values[other.0 as usize].storage = p.values[used.0 as usize].storage);
        assert!(reused.contains("to memory that kernel"), "{reused}");
    }
    let none = error(&|p| p.in_flight[at].wait = f.start);
    assert!(none.contains("is waited for before"), "{none}");
    let compute = error(&|p| p.in_flight[at].start += 1);
    assert!(compute.contains("no collective"), "{compute}");
}
