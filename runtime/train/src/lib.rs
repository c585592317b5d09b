//! Trains a recipe: steps, evaluations, checkpoints, hot reload, resume and replay.
//!
//! A [`RunSpec`] describes a run as plain data. A [`Trainer`] drives it in a [`perilune_lua::Runtime`] that the caller opens,
//! and reports every [`Event`] to a [`Listener`]. Another thread, or a signal handler, makes requests through a [`Control`],
//! which belongs to that run alone. The crate prints nothing, reads no arguments and never ends the process. It writes only to
//! the run directory (`rundir.rs`), and to the MLflow store that the caller names. In a job of several processes each has a trainer, with the links to the others (`job.rs`).
//!
//! ```no_run
//! use perilune_lua::{Runtime, RuntimeOptions};
//! use perilune_policy::Policy;
//! use perilune_train::{Control, Event, RunSpec, Trainer};
//! use std::rc::Rc;
//! use std::sync::Arc;
//!
//! # fn main() -> perilune_train::Result<()> {
//! let spec = RunSpec { recipe: "recipes/digits.lua".into(), checkpoint_every: Some(100), ..RunSpec::default() };
//! let control = Control::default();
//! let listener = Rc::new(|event: &Event<'_>| {
//!     if let Event::Step { step, loss, .. } = event {
//!         println!("{step} {loss}");
//!     }
//! });
//! let outcome = Trainer::new(spec, control, listener).run(|spec| {
//!     let backend = Arc::new(perilune_cpu::Cpu::new(None));
//!     let print = Rc::new(|text: &str| println!("{text}"));
//!     let (params, policy) = (spec.params.clone(), Policy::builder().recipe(&spec.recipe).build());
//!     Ok(Runtime::new(RuntimeOptions { backend, params, policy, strict: true, print })?)
//! })?;
//! println!("{:?} after {} steps", outcome.end, outcome.steps);
//! # Ok(())
//! # }
//! ```

#![deny(unsafe_code)]

mod anomaly;
pub mod audit;
mod branch;
pub mod bundled;
mod cancel;
mod checkpoints;
mod claim;
mod data_check;
mod data_hash;
mod data_record;
pub mod digests;
pub mod envelope;
mod error;
mod events;
mod git;
pub mod history;
mod hot_reload;
mod job;
mod log_lines;
mod media;
mod metrics_log;
mod mlflow;
mod monitor;
pub mod numbers;
mod observers;
pub mod params;
mod performance;
mod perturb;
mod replay;
mod restart;
mod resume;
mod retention;
mod run_files;
mod run_lock;
mod run_log;
mod rundir;
pub mod runs;
mod sample_file;
mod saved_run;
mod script_run;
mod session;
mod shared_run;
mod source;
mod spec;
mod state_names;
pub mod sweep;
mod tensorboard;
mod trainer;
mod training_loop;
mod weights;

pub use audit::{Audited, Difference, Recording, Window};
pub use cancel::Control;
pub use data_check::{CheckedData, MOST_IDS, checked_data};
pub use envelope::{Comparison, Envelope, Verdict};
pub use error::{Error, Result, disk, plain};
pub use events::{Event, Listener, SCHEMA};
pub use hot_reload::{Candidate, NextVersion, Reloader, StartOptions};
pub use metrics_log::MetricsLog;
pub use replay::Replay;
pub use resume::{Resume, record_of};
pub use retention::Retention;
pub use saved_run::{SavedRun, enable_load_run, evaluate};
pub use source::{Source, mentions};
pub use spec::RunSpec;
pub use state_names::check_state_names;
pub use trainer::{Outcome, Trainer};
pub use training_loop::End;
pub use weights::weights_hash;
