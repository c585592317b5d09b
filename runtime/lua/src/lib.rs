//! The Lua face: the only crate that sees mlua.
//!
//! A [`Runtime`] is one Lua state with one engine behind it. Tensor methods and `pl.*` functions are made from the op
//! registry; everything else of the `perilune` module is a few primitives (States, the step scope, gradients, files)
//! and the standard library, which is Lua embedded in the binary.

#![deny(unsafe_code)]

mod args;
pub mod console;
mod errors;
mod finite;
mod frames;
mod functions;
mod grads;
mod handover;
mod host;
mod images;
mod indexing;
mod inspect;
mod kernels;
mod loader;
mod native;
mod optim;
mod options;
mod print;
mod reference;
mod rehearse;
mod run;
mod runtime;
mod table;
mod tensor;

pub use console::{Answer, Console};
pub use errors::{Cause, RecipeError};
pub use handover::{Described, Handover, Parked, Source, Taking, compare};
pub use loader::stdlib_files;
pub use perilune_engine::{Copies, profile};
pub use reference::{reference_markdown, stubs};
pub use run::{KeepSaid, NotFinite, ParamReads, ParamValue, Recipe, Run, StepNumbers, StepResult};
pub use runtime::{Failed, Loaded, Memory, Params, Runtime, RuntimeOptions};
pub use tensor::{Ref, Tensor};
