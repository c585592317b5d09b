//! Runs one program on all devices of a mesh.
//!
//! [`MeshBackend`] implements the backend trait over one backend a device, each driven by a thread of its own, so the engine
//! records, plans and looks up a step once for any number of devices. A buffer of the mesh describes the whole tensor and its
//! placement; each device stores its part. Devices exchange data within collectives through an [`Exchange`].
//!
//! The mesh and placements are types of `core`, and the pass that divides a step is `plan/passes/shard`.
//!
//! Several processes: [`rendezvous`] finds the place of this one among those of a job, [`links`] connects them by TCP, [`launch`]
//! starts them on one host and [`submit`] writes job files. Each process drives some devices of the mesh, and messages to the
//! others go over the links. Tests that start, stop and kill processes are run by `.ci/soak`.

mod backend;
mod buffer;
mod exchange;
mod executable;
mod expert_placement;
mod host_list;
pub mod launch;
pub mod links;
mod options;
mod parts;
pub mod rendezvous;
pub mod submit;
mod workers;

pub use backend::MeshBackend;
pub use exchange::{Carrier, Exchange, Group, Mail, Rank, Round};
pub use expert_placement::{ExpertPlacement, replicate};
pub use links::Links;
pub use options::MeshOptions;
pub use rendezvous::Place;
