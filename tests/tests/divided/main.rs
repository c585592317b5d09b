//! Checks that a training step on the virtual devices of a mesh computes what it computes on one device: losses, gradients and
//! updated weights, for models and placements of several kinds and meshes of one and two axes.
#![allow(clippy::unwrap_used)]

mod context;
mod data;
mod lanes;
mod ops;
mod placed;
mod random;
mod ring_on_gpu;
mod states;
mod step;
mod strict;
mod tensor;
mod uneven;
mod widened;
