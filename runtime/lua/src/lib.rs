//! Binds Perilune to Lua: the only crate that uses mlua.
//!
//! A [`Runtime`] is one Lua state with one engine. Tensor methods and `pl.*` functions are generated from the op
//! registry; everything else of the `perilune` module is a few primitives (States, the step scope, gradients, files)
//! and the standard library, which is Lua embedded in the binary.

#![deny(unsafe_code)]

mod args;
mod array_files;
mod boundary;
mod caret;
mod checked;
pub mod console;
mod data_bindings;
mod debug_library;
mod dry_run;
mod errors;
mod experts;
mod functions;
mod grads;
mod host;
mod images;
mod indexing;
mod inspect;
mod json;
mod kernel_includes;
mod kernels;
mod letter_case;
mod library_env;
mod load_run;
mod loader;
mod mesh;
mod missed_field;
mod module_files;
mod nan_guard;
mod no_tail_calls;
mod observers;
mod offline_source;
mod optim;
mod options;
mod preference;
mod print;
mod reader;
mod recipe_files;
mod record_files;
mod record_value;
mod records;
mod reference;
mod run;
mod runtime;
mod sample_log;
mod script_run;
mod shape_table;
mod source_text;
mod state_migration;
mod table;
mod tensor;
mod tensor_files;
mod tokenize;
mod tokenizer;
mod tokens;
mod train_tokenizer;
mod workers;

pub use checked::{Checked, CheckedCorpus, CheckedRows};
pub use console::{Answer, Console};
pub use dry_run::TensorDigest;
pub use errors::{Cause, RecipeError};
pub use host::{FailsHook, Host, ShareText};
pub use load_run::{ReadRun, StoredRun};
pub use loader::{stdlib_files, stdlib_hash};
pub use mesh::{OpenMesh, OpenedMesh, StrictShards, set_mesh_options};
pub use observers::{Histogram, Logged, LoggedImage, LoggedValue, Observed};
pub use perilune_engine::{Copies, StateInfo, profile, step_parts};
pub use perilune_policy::Policy;
pub use reference::{Page as ReferencePage, pages as reference_pages, stubs};
pub use run::{
    CheckedRecords, KeepSaid, NotFinite, ParamReads, ParamValue, RateRamp, Recipe, Run, StepNumbers, StepResult,
};
pub use runtime::{Failed, Loaded, Memory, Params, Runtime, RuntimeOptions};
pub use script_run::{ScriptDriver, ScriptRun};
pub use state_migration::{Described, DroppedStates, Source, StateMigration, Taking, compare};
pub use tensor::{Ref, Tensor};
pub use tokenizer::{Segment, Style};
