//! Splits the batch: data parallelism.

use crate::step::Step;
use perilune_core::mesh::Axis;
use perilune_core::ops::Value;
use perilune_core::{DType, HostTensor, Shape};
use perilune_tests::harness::{call_all, float, int, ints, t};
use std::collections::BTreeMap;

const DATA_PARALLEL: [(&str, &[Axis]); 4] = [
    ("dp=2", &[Axis::Dp]),
    ("dp=4", &[Axis::Dp]),
    ("shard=8", &[Axis::Shard]),
    ("dp=2,shard=4", &[Axis::Dp, Axis::Shard]),
];

pub fn mlp(dtype: DType) -> Step {
    let mut s = Step::new(dtype);
    let (x, y) = (s.batch_randn(&[16, 12]), s.batch_ids(&[16], 7));
    let h = s.layer(x, 12, 24);
    let h = s.call("gelu", &[t(h)]);
    let h = s.call("dropout", &[t(h), float(0.25)]);
    let logits = s.layer(h, 24, 7);
    let loss = s.call("cross_entropy", &[t(logits), t(y)]);
    s.train(loss);
    s
}

#[test]
fn a_classifier_with_dropout_and_clipping() {
    let found = mlp(DType::F64).compare(1e-10, &DATA_PARALLEL[..3]);
    // The gradients of four weights, the loss and the number of targets: nothing is gathered.
    assert_eq!(found, BTreeMap::from([("all_reduce", 6)]));
    mlp(DType::F64).compare(1e-10, &DATA_PARALLEL);
    mlp(DType::F32).compare(2e-5, &DATA_PARALLEL);
}

/// Ignored targets make the parts of the batch count differently.
#[test]
fn a_loss_divides_by_the_tokens_of_all_devices() {
    let mut s = Step::new(DType::F64);
    let x = s.batch_randn(&[8, 5, 6]);
    let ids: Vec<i64> = (0..40).map(|i| if i < 9 || i % 3 == 0 { -100 } else { i % 4 }).collect();
    let y = s.batch(HostTensor::from_i64(Shape::of(&[8, 5]), &ids));
    let h = s.layer(x, 6, 4);
    let (h, y) = (s.call("reshape", &[t(h), ints(&[40, 4])]), s.call("reshape", &[t(y), ints(&[40])]));
    let loss = s.call("cross_entropy", &[t(h), t(y)]);
    s.train(loss);
    s.compare(1e-10, &[("dp=2", &[Axis::Dp]), ("dp=8", &[Axis::Dp]), ("dp=2,shard=2", &[Axis::Dp, Axis::Shard])]);
}

/// A convolution with batch norm, on a batch of that size.
pub fn cnn(batch: usize) -> Step {
    cnn_of(DType::F64, batch)
}

pub fn cnn_of(dtype: DType, batch: usize) -> Step {
    let mut s = Step::new(dtype);
    let (x, y) = (s.batch_randn(&[batch, 2, 6, 6]), s.batch_ids(&[batch], 3));
    let (w, b) = (s.weight(&[4, 2, 3, 3]), s.weight(&[4]));
    let h = s.with("conv2d", &[t(x), t(w), t(b)], &[("padding", ints(&[1, 1]))]);
    let (scale, shift) = (s.weight(&[4]), s.weight(&[4]));
    let out = call_all(&mut s.e, "batch_norm_train", &[t(h), t(scale), t(shift)], &[]);
    let h = out.map_or_else(|_| panic!("batch_norm_train"), |o| o[0]);
    let h = s.call("relu", &[t(h)]);
    let h = s.call("max_pool2d", &[t(h), ints(&[2, 2])]);
    let h = s.call("flatten", &[t(h), int(1)]);
    let logits = s.layer(h, 36, 3);
    let loss = s.call("cross_entropy", &[t(logits), t(y)]);
    s.train(loss);
    s
}

#[test]
fn a_convolution_with_batch_statistics_over_the_whole_batch() {
    cnn(8).compare(1e-10, &DATA_PARALLEL);
}

/// A transformer block with an embedding that is also the head, on sequences of 6 tokens.
pub fn gpt(batch: usize) -> Step {
    gpt_of(DType::F64, batch)
}

pub fn gpt_of(dtype: DType, batch: usize) -> Step {
    let mut s = Step::new(dtype);
    let (ids, y) = (s.batch_ids(&[batch, 6], 11), s.batch_ids(&[batch, 6], 11));
    let b = batch as i64;
    let (table, places) = (s.weight(&[11, 16]), s.weight(&[6, 16]));
    let tokens = s.call("embedding", &[t(table), t(ids)]);
    let x = s.call("add", &[t(tokens), t(places)]);
    let (scale, shift) = (s.weight(&[16]), s.weight(&[16]));
    let h = s.call("layer_norm", &[t(x), t(scale), t(shift)]);
    let qkv = s.layer(h, 16, 48);
    let qkv = s.call("view", &[t(qkv), ints(&[b, 6, 3, 2, 8])]);
    let qkv = s.call("permute", &[t(qkv), ints(&[2, 0, 3, 1, 4])]);
    let [q, k, v] = [0, 1, 2].map(|i| s.call("select", &[t(qkv), int(0), int(i)]));
    let h = s.with("scaled_dot_product_attention", &[t(q), t(k), t(v)], &[("is_causal", Value::Bool(true))]);
    let h = s.call("transpose", &[t(h), int(1), int(2)]);
    let h = s.call("reshape", &[t(h), ints(&[b, 6, 16])]);
    let h = s.layer(h, 16, 16);
    let h = s.call("add", &[t(x), t(h)]);
    let h = s.call("reshape", &[t(h), ints(&[b * 6, 16])]);
    let logits = s.call("transpose", &[t(table), int(0), int(1)]);
    let logits = s.call("matmul", &[t(h), t(logits)]);
    let y = s.call("reshape", &[t(y), ints(&[b * 6])]);
    let loss = s.call("cross_entropy", &[t(logits), t(y)]);
    s.train(loss);
    s
}

#[test]
fn a_transformer_block_with_an_embedding() {
    let found = gpt(8).compare(1e-10, &DATA_PARALLEL);
    assert!(!found.contains_key("all_gather"), "{found:?}");
}
