//! One device, one recording, many plans: evaluation, States, the step scope.
//!
//! The [`Engine`] owns the graph a recipe records into, the buffers behind evaluated nodes and States, and the plan
//! cache. A *generation* is the life of one recording: it ends when assignments are written (the end of a step), or when
//! a plain script is flushed. A [`Handle`] names a node by generation and id; a node that was evaluated survives its
//! generation, one that was not is stale.
//!
//! What it deliberately does not do: know Lua, files, or what a model is.
#![forbid(unsafe_code)]

pub mod diagnostics;
mod engine;
pub mod memory;
mod nan_guard;
pub mod profile;
mod repl_gc;
mod shadow_weights;
mod snapshot;
mod state;
mod step;

pub use engine::{Code, Engine, Fault, Handle, Stats};
pub use nan_guard::NotFinite;
pub use perilune_plan::show::Cost;
pub use profile::Profile;
pub use snapshot::Copies;
pub use state::{StateId, StateInfo};
pub use step::{PrintPlan, Switches};
