//! Confines this process with the walls of the operating system: what it may open, which system calls it may make, how much it may
//! take.
//!
//! A process that runs a stranger's recipe enters the walls in two parts:
//!
//! 1. [`enter_files`] while it has one thread: no new privileges, limits, Landlock. Landlock binds the calling thread and the threads
//!    that it starts later, so it comes before the devices are opened, and [`needs`] lists the files that CUDA opens.
//! 2. [`enter_calls`] when devices and libraries are open and before the recipe's first line: seccomp, for all threads at once.
//!
//! Both return a [`Walls`]: what each wall did when a forbidden act was attempted. A wall that the kernel lacks is reported and is no
//! error; the caller decides whether to go on. On other systems than Linux all walls are missing.
//!
//! ```no_run
//! use perilune_confine::{Files, enter_calls, enter_files};
//!
//! let files = Files { read: vec!["/data".into()], write: vec!["runs/a".into()], ..Files::default() };
//! let mut walls = enter_files(&files).expect("limits that can be set");
//! walls.extend(enter_calls().expect("a filter that compiles"));
//! assert!(walls.missing().is_empty(), "{walls}");
//! ```
//!
//! Not here: the boundary of the language (`runtime/policy`, `runtime/lua/src/boundary`), which holds without these walls, and the
//! supervisor that starts the confined process (`repl/src/confined`).
#![forbid(unsafe_code)]

#[cfg(target_os = "linux")]
mod calls;
#[cfg(target_os = "linux")]
mod cgroup;
#[cfg(target_os = "linux")]
mod files;
#[cfg(target_os = "linux")]
mod limits;
pub mod needs;
#[cfg(not(target_os = "linux"))]
mod other;
#[cfg(target_os = "linux")]
mod probes;
mod walls;

#[cfg(target_os = "linux")]
pub use calls::enter_calls;
#[cfg(target_os = "linux")]
pub use cgroup::Group;
#[cfg(target_os = "linux")]
pub use files::enter_files;
#[cfg(target_os = "linux")]
pub use limits::die_with_parent;
#[cfg(not(target_os = "linux"))]
pub use other::{Group, die_with_parent, enter_calls, enter_files};
pub use walls::{Error, Files, Stand, Wall, Walls};
