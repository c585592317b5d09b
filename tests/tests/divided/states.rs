//! Splits optimizer states, and weights along the axis of the batch: ZeRO.

use crate::step::{Step, assert_near, collectives};
use perilune_core::mesh::{Along, Axis};
use perilune_core::{DType, Mesh, Placement};
use perilune_plan::request::InputBuffer;
use perilune_tests::harness::t;
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
        let spread = Spread { mesh: Mesh::parse(mesh).unwrap(), placements: placements.clone() };
        let (got, program) = s.run_on(&spread).unwrap_or_else(|e| panic!("{mesh}: {e}"));
        assert_near(mesh, &got, &want, 1e-10);
        let blocks = program.inputs.iter().filter(|i| i.0.dims().first() == Some(&(24 / spread.mesh.devices())));
        assert_eq!(blocks.count(), 4, "{mesh}: moments of a weight and a bias of 24 rows");
    }
}

const SPLIT: Along = Along::Split(0);

/// A classifier of so many equal layers.
fn deep(layers: usize, batch: usize, width: usize, roots: bool) -> Step {
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
    Spread { mesh: Mesh::parse(mesh).unwrap(), placements }
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

/// Whole weights live for two layers at most.
#[test]
fn the_arena_has_room_for_the_weights_of_two_layers() {
    let (layers, width) = (12, 64);
    let s = deep(layers, 8, width, false);
    let graph = &s.e.recorder.graph;
    let arena = |spread: &Spread| virtual_devices::plan(graph, &s.request, spread).unwrap().0.arena_bytes;
    let matrix = width * width * 8;
    let (whole, split) = (arena(&split_states(&s, "dp=8", false)), arena(&split_states(&s, "dp=8", true)));
    // A block of each gradient is kept until the norm is known.
    let blocks = layers * matrix / 8;
    assert!(split < blocks + 2 * matrix, "{split} bytes, a matrix has {matrix}; {whole} with whole weights");
}
