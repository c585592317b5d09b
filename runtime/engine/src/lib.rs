//! Evaluates recordings on one device: States, the step scope, plan lookup, staging of inputs and outputs.
//!
//! The [`Engine`] has four parts. The [`Recorder`] owns the graph a recipe records into and the values of evaluated nodes.
//! The State table owns the buffers of States. The [`Executor`] owns the device and the plan cache. [`Diagnostics`] collects
//! what is reported. A *generation* is the life of one recording: it ends when assignments are written (the end of a step),
//! or when a plain script is flushed. A [`Handle`] names a node by generation and id; a node that was evaluated survives its
//! generation, one that was not is stale.
//!
//! The crate depends neither on Lua nor on files, and has no notion of a model.
#![forbid(unsafe_code)]

mod agreement;
mod backward;
pub mod diagnostics;
mod engine;
mod evaluate;
pub mod memory;
mod nan_guard;
mod placement;
pub mod profile;
mod recorder;
mod repl_gc;
mod shadow_weights;
mod show_plan;
mod snapshot;
mod state;
mod step;
pub mod step_parts;
mod step_tensors;
mod stored_value;

pub use diagnostics::Diagnostics;
pub use engine::{Engine, Fault, Stats};
pub use evaluate::{Code, Executor};
pub use nan_guard::NotFinite;
pub use perilune_plan::show::Cost;
pub use profile::Profile;
pub use recorder::{Handle, Recorder};
pub use show_plan::RecordedStep;
pub use snapshot::Copies;
pub use state::{StateId, StateInfo};
pub use step::{PrintPlan, Switches};
pub use step_tensors::{Content, StepTensor};
