//! Rewrites a lowered step, graph to graph, before fusion. `lower` runs the passes in order.

pub mod budget;
pub mod nhwc;
pub mod pad_gemm;
pub mod remat;
