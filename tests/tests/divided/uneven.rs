//! Splits dims that the number of devices does not divide. The padding of inputs is NaN.

use crate::data::mlp;
use perilune_core::DType;
use perilune_core::mesh::Axis;

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
