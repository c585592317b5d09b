//! Splits dims that the number of devices does not divide. The padding of inputs is NaN.

use crate::data::{cnn, gpt, mlp};
use crate::states::split_states;
use crate::step::{Step, assert_near};
use perilune_core::mesh::{Along, Axis};
use perilune_core::{DType, Mesh, Placement};
use perilune_plan::request::InputBuffer;
use perilune_tests::virtual_devices::Spread;

const UNEVEN: [(&str, &[Axis]); 4] = [
    ("dp=3", &[Axis::Dp]),
    ("dp=4", &[Axis::Dp]),
    ("shard=5", &[Axis::Shard]),
    ("dp=2,shard=3", &[Axis::Dp, Axis::Shard]),
];

#[test]
fn a_classifier() {
    mlp(DType::F64).compare(1e-10, &UNEVEN);
    mlp(DType::F32).compare(2e-5, &UNEVEN);
}

#[test]
fn a_convolution() {
    cnn(7).compare(1e-10, &UNEVEN);
}

/// Of 4 devices and 2 or 5 samples, some have none.
#[test]
fn a_transformer_block() {
    for batch in [2, 5, 7] {
        gpt(batch).compare(1e-10, &UNEVEN);
    }
}

/// Sizes of weights, classes, vocabulary and batch that nothing divides.
#[test]
fn split_states_of_any_size() {
    for s in [mlp(DType::F64), cnn(7), gpt(5)] {
        let (want, _) = s.run("", &[]).unwrap();
        for mesh in ["dp=3", "dp=4", "dp=7"] {
            for weights in [false, true] {
                let (got, _) = s.run_on(&split_states(&s, mesh, weights)).unwrap_or_else(|e| panic!("{mesh}: {e}"));
                assert_near(mesh, &got, &want, 1e-10);
            }
        }
    }
}

/// Every weight is split along a dim, and the batch along another axis.
#[test]
fn weights_of_any_size_split_along_another_axis() {
    for s in [mlp(DType::F64), cnn(7), gpt(5)] {
        let (want, _) = s.run("", &[]).unwrap();
        for mesh in ["tp=3", "tp=4", "dp=2,tp=3", "dp=3,tp=2"] {
            for dim in 0..2 {
                let spread = split_weights(&s, mesh, dim);
                let (got, _) = s.run_on(&spread).unwrap_or_else(|e| panic!("{mesh}: {e}"));
                assert_near(mesh, &got, &want, 1e-10);
            }
        }
    }
}

/// The batch split along dp, and States along tp: their dim `dim`, or the last one.
fn split_weights(s: &Step, mesh: &str, dim: usize) -> Spread {
    let split = |b: &InputBuffer| {
        let last = s.values[b].shape.rank() - 1;
        (*b, Placement::REPLICATED.with(Axis::Tp, Along::Split(dim.min(last) as u8)))
    };
    let batch = s.batch.iter().map(|b| (*b, Placement::REPLICATED.with(Axis::Dp, Along::Split(0))));
    let states: Vec<InputBuffer> = s.request.state_writes.iter().map(|w| InputBuffer::State(w.0)).collect();
    Spread {
        mesh: Mesh::parse(mesh).unwrap(),
        placements: batch.chain(states.iter().map(split)).collect(),
        ..Spread::default()
    }
}
