//! Splits weights along an axis of their own: tensor parallelism.

use crate::step::{Step, assert_near, collectives, collectives_along};
use perilune_core::graph::NodeId;
use perilune_core::mesh::{Along, Axis};
use perilune_core::ops::Value;
use perilune_core::{DType, HostTensor, Mesh, Placement, Shape, grad};
use perilune_plan::request::InputBuffer;
use perilune_tests::harness::{float, int, ints, t};
use perilune_tests::virtual_devices::Spread;
use std::collections::BTreeMap;

/// The first layer is split by columns, the second by rows: one reduction of its result, none of the hidden layer.
#[test]
fn weights_split_along_another_axis() {
    let mut s = Step::new(DType::F64);
    let (x, y) = (s.batch_randn(&[8, 12]), s.batch_ids(&[8], 7));
    let h = s.layer(x, 12, 24);
    let h = s.call("gelu", &[t(h)]);
    let logits = s.layer(h, 24, 7);
    let loss = s.call("cross_entropy", &[t(logits), t(y)]);
    let wrt: Vec<NodeId> = s.weights.iter().map(|w| w.1).collect();
    let g = &mut s.e.recorder.graph;
    let seed = g.filled(1.0, Shape::SCALAR, DType::F64).unwrap();
    s.request.roots = grad::grad(g, loss, seed, &wrt, false).unwrap().into_iter().map(Option::unwrap).collect();
    s.request.roots.push(loss);
    let (want, _) = s.run("", &[]).unwrap();
    let split = |dim| Placement::REPLICATED.with(Axis::Tp, Along::Split(dim));
    let states: Vec<InputBuffer> = s.weights.iter().map(|w| InputBuffer::State(w.0)).collect();
    let batch = |b: &InputBuffer| (*b, Placement::REPLICATED.with(Axis::Dp, Along::Split(0)));
    for mesh in ["tp=2", "tp=4", "dp=2,tp=4"] {
        let weights = [(states[0], split(0)), (states[1], split(0)), (states[2], split(1))];
        let placements = s.batch.iter().map(batch).chain(weights).collect();
        let spread = Spread { mesh: Mesh::parse(mesh).unwrap(), placements, ..Spread::default() };
        let (got, program) = s.run_on(&spread).unwrap_or_else(|e| panic!("{mesh}: {e}"));
        for (k, (a, b)) in got.roots.iter().zip(&want.roots).enumerate() {
            let (a, b) = (a.to_f64(), b.to_f64());
            assert!(a.iter().zip(&b).all(|(x, y)| (x - y).abs() < 1e-12), "{mesh}: root {k}: {a:?} and {b:?}");
        }
        // What is gathered are the gradients that the request returns.
        let found = collectives(&program);
        assert_eq!(found.get("all_gather"), Some(&3), "{mesh}: {found:?}");
        if mesh.starts_with("tp") {
            assert_eq!(found.get("all_reduce"), Some(&1), "{mesh}: {found:?}");
        }
    }
}

/// The placement of each weight along tp, in the order of recording. Moments are placed as their weights.
fn spread(s: &Step, mesh: &str, weights: &[Along]) -> Spread {
    assert_eq!(weights.len(), s.weights.len());
    let along = |k: usize| Placement::REPLICATED.with(Axis::Tp, weights[k]);
    // A weight, its first and its second moment.
    let states = s.request.state_writes.iter().enumerate().map(|(k, w)| (InputBuffer::State(w.0), along(k / 3)));
    let batch = s.batch.iter().map(|b| (*b, Placement::REPLICATED.with(Axis::Dp, Along::Split(0))));
    Spread { mesh: Mesh::parse(mesh).unwrap(), placements: batch.chain(states).collect(), ..Spread::default() }
}

const WHOLE: Along = Along::Replicated;
const ROWS: Along = Along::Split(0);
const COLUMNS: Along = Along::Split(1);

fn norm(s: &mut Step, x: NodeId) -> NodeId {
    let (scale, shift) = (s.weight(&[WIDTH as usize]), s.weight(&[WIDTH as usize]));
    s.call("layer_norm", &[t(x), t(scale), t(shift)])
}

const WIDTH: i64 = 16;

/// A block as GPT-2 has it between an embedding and a head, which is the embedding.
fn gpt(dropout: f64) -> (Step, Vec<Along>) {
    let (b, n, heads, d, vocabulary) = (4, 6, 4, WIDTH / 4, 24);
    let mut s = Step::new(DType::F64);
    let shape = [b as usize, n as usize];
    let (ids, y) = (s.batch_ids(&shape, vocabulary), s.batch_ids(&shape, vocabulary));
    let table = s.weight(&[vocabulary, WIDTH as usize]);
    let x = s.call("embedding", &[t(table), t(ids)]);
    let h = norm(&mut s, x);
    let qkv = s.layer(h, WIDTH as usize, 3 * WIDTH as usize);
    let qkv = s.call("view", &[t(qkv), ints(&[b, n, 3, heads, d])]);
    let qkv = s.call("permute", &[t(qkv), ints(&[2, 0, 3, 1, 4])]);
    let [q, k, v] = [0, 1, 2].map(|i| s.call("select", &[t(qkv), int(0), int(i)]));
    let h = s.with("scaled_dot_product_attention", &[t(q), t(k), t(v)], &[("is_causal", Value::Bool(true))]);
    let h = s.call("transpose", &[t(h), int(1), int(2)]);
    let h = s.call("reshape", &[t(h), ints(&[b, n, WIDTH])]);
    let h = s.layer(h, WIDTH as usize, WIDTH as usize);
    let h = if dropout > 0.0 { s.call("dropout", &[t(h), float(dropout)]) } else { h };
    let x = s.call("add", &[t(x), t(h)]);
    let h = norm(&mut s, x);
    let h = s.layer(h, WIDTH as usize, 4 * WIDTH as usize);
    let h = s.call("gelu", &[t(h)]);
    let h = if dropout > 0.0 { s.call("dropout", &[t(h), float(dropout)]) } else { h };
    let h = s.layer(h, 4 * WIDTH as usize, WIDTH as usize);
    let x = s.call("add", &[t(x), t(h)]);
    let h = norm(&mut s, x);
    let head = s.call("transpose", &[t(table), int(0), int(1)]);
    let logits = s.call("matmul", &[t(h), t(head)]);
    let loss = s.call("cross_entropy", &[t(logits), t(y)]);
    s.train(loss);
    s.request.roots.truncate(2);
    let qkv = Along::Segments(0, 3);
    let (attention, mlp) = ([qkv, qkv, COLUMNS, WHOLE], [ROWS, ROWS, COLUMNS, WHOLE]);
    let norm = [WHOLE, WHOLE];
    let all = [&[ROWS][..], &norm, &attention, &norm, &mlp, &norm].concat();
    (s, all)
}

/// How queries, keys and values are projected.
#[derive(Clone, Copy, PartialEq)]
enum Projection {
    Apart,
    /// By one weight, whose result is cut into slices of heads.
    Fused,
}

/// A block as Llama has it, with `groups` key heads for 8 query heads.
fn llama(projection: Projection, groups: i64) -> (Step, Vec<Along>) {
    let (b, n, heads, d, hidden, vocabulary) = (4, 6, 8, 4, 24, 24);
    let mut s = Step::new(DType::F64);
    let shape = [b as usize, n as usize];
    let (ids, y) = (s.batch_ids(&shape, vocabulary), s.batch_ids(&shape, vocabulary));
    let mut places = Vec::new();
    let mut weight = |s: &mut Step, dims: &[i64], along: Along| {
        places.push(along);
        s.weight(&dims.iter().map(|n| *n as usize).collect::<Vec<_>>())
    };
    let table = weight(&mut s, &[vocabulary as i64, WIDTH], ROWS);
    let x = s.call("embedding", &[t(table), t(ids)]);
    let scale = weight(&mut s, &[WIDTH], WHOLE);
    let h = s.call("rms_norm", &[t(x), t(scale)]);
    let [q, k, v] = match projection {
        Projection::Apart => [heads, groups, groups].map(|heads| {
            let w = weight(&mut s, &[heads * d, WIDTH], ROWS);
            let y = s.call("linear", &[t(h), t(w)]);
            let y = s.call("view", &[t(y), ints(&[b, n, heads, d])]);
            s.call("transpose", &[t(y), int(1), int(2)])
        }),
        Projection::Fused => {
            let w = weight(&mut s, &[(heads + 2 * groups) * d, WIDTH], qkv(heads, groups));
            let y = s.call("linear", &[t(h), t(w)]);
            let y = s.call("view", &[t(y), ints(&[b, n, heads + 2 * groups, d])]);
            let y = s.call("transpose", &[t(y), int(1), int(2)]);
            [(0, heads), (heads, groups), (heads + groups, groups)]
                .map(|(from, heads)| s.call("narrow", &[t(y), int(1), int(from), int(heads)]))
        }
    };
    let (q, k) = (s.call("rope", &[t(q)]), s.call("rope", &[t(k)]));
    let options = [("is_causal", Value::Bool(true)), ("enable_gqa", Value::Bool(true))];
    let h = s.with("scaled_dot_product_attention", &[t(q), t(k), t(v)], &options);
    let h = s.call("transpose", &[t(h), int(1), int(2)]);
    let h = s.call("reshape", &[t(h), ints(&[b, n, heads * d])]);
    let w = weight(&mut s, &[WIDTH, heads * d], COLUMNS);
    let h = s.call("linear", &[t(h), t(w)]);
    let x = s.call("add", &[t(x), t(h)]);
    let scale = weight(&mut s, &[WIDTH], WHOLE);
    let h = s.call("rms_norm", &[t(x), t(scale)]);
    let [gate, up] = [(); 2].map(|()| {
        let w = weight(&mut s, &[hidden, WIDTH], ROWS);
        s.call("linear", &[t(h), t(w)])
    });
    let gate = s.call("silu", &[t(gate)]);
    let h = s.call("mul", &[t(gate), t(up)]);
    let w = weight(&mut s, &[WIDTH, hidden], COLUMNS);
    let h = s.call("linear", &[t(h), t(w)]);
    let x = s.call("add", &[t(x), t(h)]);
    let scale = weight(&mut s, &[WIDTH], WHOLE);
    let h = s.call("rms_norm", &[t(x), t(scale)]);
    let head = weight(&mut s, &[vocabulary as i64, WIDTH], ROWS);
    let logits = s.call("linear", &[t(h), t(head)]);
    let loss = s.call("cross_entropy", &[t(logits), t(y)]);
    s.train(loss);
    s.request.roots.truncate(2);
    (s, places)
}

fn qkv(heads: i64, groups: i64) -> Along {
    if heads == groups { Along::Segments(0, 3) } else { Along::Sections(0, [(heads / groups) as u8, 1, 1]) }
}

#[test]
fn a_llama_block_has_a_reduction_for_each_product_over_rows() {
    for (projection, groups) in
        [(Projection::Apart, 8), (Projection::Apart, 4), (Projection::Fused, 8), (Projection::Fused, 4)]
    {
        let (s, weights) = llama(projection, groups);
        let (want, _) = s.run("", &[]).unwrap();
        for mesh in MESHES {
            let (got, program) = s.run_on(&spread(&s, mesh, &weights)).unwrap_or_else(|e| panic!("{mesh}: {e}"));
            assert_near(mesh, &got, &want, 1e-10);
            let batch = if mesh.starts_with("dp") { s.weights.len() + 2 } else { 0 };
            let all = collectives(&program);
            assert_eq!(all, BTreeMap::from([("all_reduce", 10 + batch)]), "{mesh}, {groups} key heads");
        }
    }
}

const MESHES: [&str; 3] = ["tp=2", "tp=4", "dp=2,tp=2"];

#[test]
fn a_gpt_block_has_a_reduction_for_each_product_over_rows() {
    for dropout in [0.0, 0.25] {
        let (s, weights) = gpt(dropout);
        let (want, _) = s.run("", &[]).unwrap();
        for mesh in MESHES {
            let (got, program) = s.run_on(&spread(&s, mesh, &weights)).unwrap_or_else(|e| panic!("{mesh}: {e}"));
            assert_near(mesh, &got, &want, 1e-10);
            // The embedding and two products over rows; the largest logit, the sum of exponentials and the target's logit;
            // the inputs of the head and of two products over columns; the norm.
            let own = 3 + 3 + 3 + 1;
            // Along dp, each gradient, the loss and its number of targets.
            let batch = if mesh.starts_with("dp") { s.weights.len() + 2 } else { 0 };
            assert_eq!(collectives(&program), BTreeMap::from([("all_reduce", own + batch)]), "{mesh}");
        }
    }
}

/// Moments, or weights too, are split along the axis of the batch as well, in the dim that tp leaves, or within its blocks.
#[test]
fn states_split_along_both_axes() {
    for (s, weights) in [gpt(0.25), llama(Projection::Fused, 4), llama(Projection::Apart, 4)] {
        let (want, _) = s.run("", &[]).unwrap();
        for mesh in ["dp=2,tp=2", "dp=4,tp=2", "dp=2,tp=4"] {
            for (all, same_dim) in [(false, false), (true, false), (true, true)] {
                let mut spread = spread(&s, mesh, &weights);
                for (k, (state, _)) in s.request.state_writes.iter().enumerate() {
                    let buffer = InputBuffer::State(*state);
                    let rank = s.values[&buffer].shape.rank();
                    let tp = weights[k / 3].split().map(|(dim, ..)| dim);
                    let free = (0..rank).find(|d| (Some(*d) == tp) == same_dim);
                    let plain = matches!(weights[k / 3], Along::Split(_) | Along::Replicated);
                    if let (Some(d), true, true) = (free, all || k % 3 > 0, plain || !same_dim) {
                        let placement = spread.placements[&buffer];
                        spread.placements.insert(buffer, placement.with(Axis::Dp, Along::Split(d as u8)));
                    }
                }
                let (got, program) = s.run_on(&spread).unwrap_or_else(|e| panic!("{mesh}: {e}"));
                assert_near(mesh, &got, &want, 1e-10);
                if !same_dim {
                    // As without the other axis.
                    let own = collectives_along(&program, &[Axis::Tp]);
                    assert_eq!(own, BTreeMap::from([("all_reduce", 10)]), "{mesh}");
                }
            }
        }
    }
}

/// A device has a part of the vocabulary, but tells ids of other parts from those of none.
#[test]
fn an_id_outside_a_split_vocabulary_is_an_error() {
    let (mut s, weights) = gpt(0.0);
    let ids = s.batch[0];
    let mut bad = s.values[&ids].to_f64();
    bad[7] = 24.0;
    s.values.insert(ids, HostTensor::from_f64(DType::I64, s.values[&ids].shape, &bad));
    let want = s.run("", &[]).unwrap_err();
    assert!(want.contains("id 24 is out of range: the table has 24 rows"), "{want}");
    assert_eq!(s.run_on(&spread(&s, "tp=4", &weights)).unwrap_err(), want);
}
