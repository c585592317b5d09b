//! Divides a step along `pp` into pipeline stages, which work on its micro-batches one after the other.
//!
//! The micro-batches are those that the recording has: each backward pass ends one. [`cut`] decides, once a run, which stage stores which
//! State. The pass [`split`] follows these placements in every step ([`assign`]) and orders the nodes of each stage by a
//! [`Schedule`], which is a [`Table`] and names the device of each stage; a device may have several. The stages of a device become a program
//! of their own, and [`join`] lists those of all devices as one.

mod assign;
mod cell_work;
pub mod cut;
mod generators;
pub mod join;
mod late_weights;
mod regroup;
pub mod schedule;
pub mod split;
pub mod table;

pub use cut::{Cut, StageCost};
pub use schedule::Schedule;
pub use table::{Action, Cell, Table, Timeline};
