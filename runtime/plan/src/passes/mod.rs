//! Rewrites a lowered step, graph to graph, before fusion. `pipeline` lists the passes in order.

pub mod budget;
pub mod control_deps;
pub mod cse;
pub mod decompose;
pub mod guard;
pub mod import;
pub mod nhwc;
pub mod output_layout;
pub mod pad_gemm;
pub mod remat;
pub(crate) mod rewriter;
pub mod shard;
pub mod views;
