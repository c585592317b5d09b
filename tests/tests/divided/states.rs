//! Splits optimizer states, and weights along the axis of the batch: ZeRO.

use crate::step::{Step, assert_near, collectives};
use perilune_core::graph::NodeId;
use perilune_core::mesh::{Along, Axis};
use perilune_core::{DType, HostTensor, Mesh, Placement};
use perilune_plan::request::InputBuffer;
use perilune_plan::{Guard, Options};
use perilune_tests::harness::{float, t};
use perilune_tests::virtual_devices::{self, Spread};
use std::collections::{BTreeMap, HashMap};

/// Where the moments are split, the State writes of a device are its blocks.
#[test]
fn split_moments_are_written_in_blocks() {
    let mut s = Step::new(DType::F64);
    let (x, y) = (s.batch_randn(&[8, 12]), s.batch_ids(&[8], 4));
    let h = s.layer(x, 12, 24);
    let h = s.call("gelu", &[t(h)]);
    let logits = s.layer(h, 24, 4);
    let loss = s.call("cross_entropy", &[t(logits), t(y)]);
    s.train(loss);
    let (want, _) = s.run("", &[]).unwrap();
    let split = Placement::REPLICATED.with(Axis::Dp, Along::Split(0));
    let weights: Vec<u64> = s.weights.iter().map(|w| w.0).collect();
    let moments = s.request.state_writes.iter().map(|w| w.0).filter(|id| !weights.contains(id)).map(InputBuffer::State);
    let placements: HashMap<_, _> = moments.chain(s.batch.iter().copied()).map(|b| (b, split)).collect();
    for mesh in ["dp=2", "dp=4"] {
        let spread = Spread { mesh: Mesh::parse(mesh).unwrap(), placements: placements.clone(), ..Spread::default() };
        let (got, program) = s.run_on(&spread).unwrap_or_else(|e| panic!("{mesh}: {e}"));
        assert_near(mesh, &got, &want, 1e-10);
        let blocks = program.inputs.iter().filter(|i| i.0.dims().first() == Some(&(24 / spread.mesh.devices())));
        assert_eq!(blocks.count(), 4, "{mesh}: moments of a weight and a bias of 24 rows");
    }
}

const SPLIT: Along = Along::Split(0);

/// A classifier of so many equal layers.
pub fn deep(layers: usize, batch: usize, width: usize, roots: bool) -> Step {
    let mut s = Step::new(DType::F64);
    let (mut x, y) = (s.batch_randn(&[batch, width]), s.batch_ids(&[batch], width));
    for _ in 0..layers {
        x = s.layer(x, width, width);
        x = s.call("gelu", &[t(x)]);
    }
    let loss = s.call("cross_entropy", &[t(x), t(y)]);
    s.train(loss);
    if !roots {
        // The loss and the norm.
        s.request.roots.truncate(2);
    }
    s
}

/// The batch split along dp, and dim 0 of the moments, and of the weights if they are too.
pub fn split_states(s: &Step, mesh: &str, weights: bool) -> Spread {
    let own: Vec<u64> = s.weights.iter().map(|w| w.0).collect();
    let states = s.request.state_writes.iter().map(|w| w.0).filter(|id| weights || !own.contains(id));
    let split = Placement::REPLICATED.with(Axis::Dp, SPLIT);
    let placements = states.map(InputBuffer::State).chain(s.batch.iter().copied()).map(|b| (b, split)).collect();
    Spread { mesh: Mesh::parse(mesh).unwrap(), placements, ..Spread::default() }
}

#[test]
fn a_gradient_is_scattered_once_and_a_weight_gathered_once() {
    let s = deep(3, 8, 8, false);
    let (want, _) = s.run("", &[]).unwrap();
    for mesh in ["dp=2", "dp=4", "dp=8", "dp=2,tp=2"] {
        let (got, program) = s.run_on(&split_states(&s, mesh, false)).unwrap_or_else(|e| panic!("{mesh}: {e}"));
        assert_near(mesh, &got, &want, 1e-10);
        // All-reduced are the loss, its number of targets, and the norm.
        let want = BTreeMap::from([("all_reduce", 3), ("reduce_scatter", 6), ("all_gather", 6)]);
        assert_eq!(collectives(&program), want, "{mesh}");
    }
}

/// Blocks of whole weights along two axes, of which the second has padding or begins at no multiple of a pack.
#[test]
fn moments_split_along_two_axes_of_whole_weights() {
    for (from, to) in [(64, 32), (7, 16), (16, 20), (16, 15), (15, 16), (20, 16), (33, 64)] {
        let mut s = Step::new(DType::F64);
        let (x, y) = (s.batch_randn(&[8, from]), s.batch_ids(&[8], to));
        let h = s.layer(x, from, to);
        let loss = s.call("cross_entropy", &[t(h), t(y)]);
        s.train(loss);
        let (want, _) = s.run("", &[]).unwrap();
        let own: Vec<u64> = s.weights.iter().map(|w| w.0).collect();
        let moments = s.request.state_writes.iter().map(|w| w.0).filter(|id| !own.contains(id));
        let split = |id: u64| {
            let rows = Placement::REPLICATED.with(Axis::Dp, SPLIT);
            let is_matrix = s.values[&InputBuffer::State(id)].shape.rank() == 2;
            if is_matrix { rows.with(Axis::Ep, Along::Split(1)) } else { rows }
        };
        let batch = Placement::REPLICATED.with(Axis::Dp, SPLIT);
        let placements = moments.map(|id| (InputBuffer::State(id), split(id)));
        let placements = placements.chain(s.batch.iter().map(|b| (*b, batch))).collect();
        let spread = Spread { mesh: Mesh::parse("dp=2,ep=2").unwrap(), placements, ..Spread::default() };
        let (got, _) = s.run_on(&spread).unwrap_or_else(|e| panic!("{from} to {to}: {e}"));
        assert_near("dp=2,ep=2", &got, &want, 1e-10);
    }
}

/// A 16-bit copy of a weight follows from the weight that has been gathered.
#[test]
fn a_weight_and_its_copy_are_gathered_once() {
    for guarded in [false, true] {
        let mut s = Step::new(DType::F32);
        let (x, y) = (s.batch_randn(&[8, 12]), s.batch_ids(&[8], 8));
        let h = s.layer(x, 12, 16);
        let h = s.call("gelu", &[t(h)]);
        let logits = s.layer(h, 16, 8);
        let loss = s.call("cross_entropy", &[t(logits), t(y)]);
        s.train(loss);
        s.request.roots.truncate(2);
        let weights: Vec<u64> = s.weights.iter().map(|w| w.0).collect();
        let written = s.request.state_writes.clone();
        for (id, new) in written.into_iter().filter(|w| weights.contains(&w.0)) {
            let shape = s.values[&InputBuffer::State(id)].shape;
            let copy = s.state(HostTensor::from_f64(DType::BF16, shape, &vec![0.0; shape.numel()]));
            let low = s.e.recorder.graph.cast(new, DType::BF16).unwrap();
            s.request.state_writes.push((copy.0, low));
        }
        if guarded {
            let finite = s.call("isfinite", &[t(loss)]);
            s.request.guard = Some(Guard { ok: finite, state_writes: vec![true; s.request.state_writes.len()] });
        }
        let (want, _) = s.run("", &[]).unwrap();
        let split = Placement::REPLICATED.with(Axis::Dp, SPLIT);
        let moments = s.request.state_writes[..12].iter().map(|w| w.0).filter(|id| !weights.contains(id));
        let placements = moments.map(InputBuffer::State).chain(s.batch.iter().copied()).map(|b| (b, split)).collect();
        let spread = Spread { mesh: Mesh::parse("dp=4").unwrap(), placements, ..Spread::default() };
        let (got, program) = s.run_on(&spread).unwrap();
        assert_near("dp=4", &got, &want, 5e-3);
        assert_eq!(collectives(&program).get("all_gather"), Some(&4), "guarded {guarded}");
    }
}

#[test]
fn split_weights_are_gathered_for_each_pass() {
    let s = deep(3, 8, 8, false);
    let (want, _) = s.run("", &[]).unwrap();
    for mesh in ["dp=2", "dp=4", "dp=8"] {
        let (got, program) = s.run_on(&split_states(&s, mesh, true)).unwrap_or_else(|e| panic!("{mesh}: {e}"));
        assert_near(mesh, &got, &want, 1e-10);
        // Six in the forward pass; the backward pass needs the matrices of two layers again.
        let want = BTreeMap::from([("all_reduce", 3), ("reduce_scatter", 6), ("all_gather", 8)]);
        assert_eq!(collectives(&program), want, "{mesh}");
    }
}

/// A step that keeps whole weights gathers each once, for all micro-batches and both passes.
#[test]
fn kept_weights_are_gathered_once() {
    let s = deep(3, 8, 8, false);
    let (want, _) = s.run("", &[]).unwrap();
    for mesh in ["dp=2", "dp=4", "dp=8"] {
        let spread = Spread { keeps_weights: true, ..split_states(&s, mesh, true) };
        let (got, program) = s.run_on(&spread).unwrap_or_else(|e| panic!("{mesh}: {e}"));
        assert_near(mesh, &got, &want, 1e-10);
        let want = BTreeMap::from([("all_reduce", 3), ("reduce_scatter", 6), ("all_gather", 6)]);
        assert_eq!(collectives(&program), want, "{mesh}");
    }
}

/// Whole weights live for two layers at most.
#[test]
fn the_arena_has_room_for_the_weights_of_two_layers() {
    let (layers, width) = (12, 64);
    let s = deep(layers, 8, width, false);
    let graph = &s.e.recorder.graph;
    let options = Options { bucket: 0, ..Options::default() };
    let arena = |spread: &Spread| virtual_devices::plan_with(graph, &s.request, spread, options).unwrap().0.arena_bytes;
    let matrix = width * width * 8;
    let (whole, split) = (arena(&split_states(&s, "dp=8", false)), arena(&split_states(&s, "dp=8", true)));
    // A block of each gradient is kept until the norm is known.
    let blocks = layers * matrix / 8;
    // A weight and the next one, which is gathered beside it; a gradient, and two that are being scattered.
    assert!(split < blocks + 6 * matrix, "{split} bytes, a matrix has {matrix}; {whole} with whole weights");
}

/// A guard selects blocks of old and new values.
#[test]
fn a_guard_covers_split_states() {
    for limit in [0.0, 1e6] {
        let mut s = deep(2, 8, 8, false);
        let ok = s.call("lt", &[t(s.request.roots[0]), float(limit)]);
        s.request.guard = Some(Guard { ok, state_writes: vec![true; s.request.state_writes.len()] });
        let (want, _) = s.run("", &[]).unwrap();
        for weights in [false, true] {
            let (got, program) = s.run_on(&split_states(&s, "dp=4", weights)).unwrap();
            assert_near("dp=4", &got, &want, 1e-10);
            assert_eq!(collectives(&program)["reduce_scatter"], 4);
            // One gathering of a weight: of its new value, or for the forward pass; the backward pass needs one again.
            assert_eq!(collectives(&program)["all_gather"], if weights { 5 } else { 4 });
        }
    }
}

/// Gradients of micro-batches are added before they are sent.
#[test]
fn accumulated_gradients_are_sent_once() {
    let mut s = Step::new(DType::F64);
    let weights: Vec<NodeId> = [[8, 8], [8, 8]].iter().map(|dims| s.weight(dims)).collect();
    let mut parts = Vec::new();
    for _ in 0..3 {
        let (x, y) = (s.batch_randn(&[8, 8]), s.batch_ids(&[8], 8));
        let h = s.call("linear", &[t(x), t(weights[0])]);
        let h = s.call("gelu", &[t(h)]);
        let h = s.call("linear", &[t(h), t(weights[1])]);
        let loss = s.call("cross_entropy", &[t(h), t(y)]);
        parts.push((loss, s.gradients(loss)));
    }
    let (loss, grads) = parts
        .into_iter()
        .reduce(|a, b| {
            let sum = a.1.iter().zip(&b.1).map(|(a, b)| s.call("add", &[t(*a), t(*b)])).collect();
            (s.call("add", &[t(a.0), t(b.0)]), sum)
        })
        .unwrap();
    s.update(loss, &grads);
    s.request.roots.truncate(2);
    let (want, _) = s.run("", &[]).unwrap();
    for (weights, keeps_weights, gathered) in [(false, false, 2), (true, false, 9), (true, true, 2)] {
        let spread = Spread { keeps_weights, ..split_states(&s, "dp=4", weights) };
        let (got, program) = s.run_on(&spread).unwrap();
        assert_near("dp=4", &got, &want, 1e-10);
        assert_eq!(collectives(&program)["reduce_scatter"], 2);
        // Split weights that are not kept: two in each forward pass, one in each backward pass.
        assert_eq!(collectives(&program)["all_gather"], gathered, "{weights}, {keeps_weights}");
    }
}

/// What the backward pass computes again gathers weights again, unless they are kept.
#[test]
fn recomputed_layers_with_split_weights() {
    let mut s = Step::new(DType::F64);
    let (mut x, y) = (s.batch_randn(&[8, 16]), s.batch_ids(&[8], 16));
    for _ in 0..4 {
        let from = NodeId(s.e.recorder.graph.len() as u32);
        let (up, down) = (s.weight(&[64, 16]), s.weight(&[16, 64]));
        let h = s.call("linear", &[t(x), t(up)]);
        let h = s.call("gelu", &[t(h)]);
        x = s.call("linear", &[t(h), t(down)]);
        let to = NodeId(s.e.recorder.graph.len() as u32);
        s.e.recorder.graph.remat.spans.push((from, to));
    }
    let loss = s.call("cross_entropy", &[t(x), t(y)]);
    s.train(loss);
    s.request.roots.truncate(2);
    let (want, _) = s.run("", &[]).unwrap();
    for mesh in ["dp=2", "dp=4", "dp=3"] {
        for keeps_weights in [false, true] {
            let spread = Spread { keeps_weights, ..split_states(&s, mesh, true) };
            let (got, program) = s.run_on(&spread).unwrap();
            assert_near(mesh, &got, &want, 1e-10);
            let sent = collectives(&program);
            assert_eq!((sent["reduce_scatter"], sent["all_gather"] == 8), (8, keeps_weights), "{mesh}");
        }
    }
}
