//! Runs a command of this program as a confined child: a stranger's recipe, with the powers that a person grants and no others.
//!
//! [`supervise`] starts this binary again with the same arguments, a clean environment and two pipes. The child reads its [`Start`] from
//! one of them, enters the walls of files while it has one thread ([`child::enter`], from `main`), opens its devices and libraries,
//! enters the walls of system calls and reports all of them before the recipe's first line ([`child::seal`], from
//! `device.rs`). The supervisor answers whether to go on. Later the child asks for addresses of data over the pipe; the supervisor alone
//! downloads. It passes on signals and the exit status, ends the child at its limits of time and memory, and is the child's end
//! when it ends itself.
//!
//! For another command that confines, such as `run` of a bundle:
//!
//! ```ignore
//! let terms = Terms {
//!     recipe: Some(extracted.join("recipe.lua")),    // its folder's .lua files can be required
//!     reads: vec![extracted, data_file],              // what the recipe may read, and what it must find there
//!     run_dir: Some(run_dir),                         // made if it is not there; the only place that is written
//!     kernels: granted.kernels,
//!     time: granted.time,
//!     net: args.net.clone(),
//!     ..Terms::default()
//! };
//! return confined::supervise(arguments, &terms);      // the words of a command line: "perilune", "run", …
//! ```
//!
//! The arguments are those of any command that makes a `Runtime`. In the child the policy of the command is made of the terms alone: what
//! `--allow-read`, `--set` and the current directory would open there is ignored, so the arguments may keep them. A temporary directory
//! among the reads has to outlive the call, which returns after the child has ended.
//!
//! | file | |
//! |---|---|
//! | `args.rs` | the options of `--untrusted` |
//! | `environment.rs` | the variables of the child |
//! | `modules.rs` | the files of the recipe's folder that can be required |
//! | `private.rs` | the folder of one confined process: its cache, its downloads |
//! | `protocol.rs` | the messages of the pipes |
//! | `remembered.rs` | grants that a person has given for good |
//! | `supervisor.rs`, `child.rs` | the two processes |

mod args;
pub mod child;
mod environment;
mod modules;
mod private;
mod protocol;
#[allow(dead_code, reason = "bundles, which are run elsewhere, use it")]
pub mod remembered;
mod supervisor;

pub use args::UntrustedArgs;
pub use child::grants;
pub use supervisor::supervise;

use crate::fetching::NetArgs;
use perilune_core::kernel_limits::{self, EXPIRED_STATUS, KernelLimits};
use std::path::PathBuf;
use std::time::Duration;

/// The time that a launch of a stranger's kernel may take.
pub const KERNEL_TIME: Duration = Duration::from_secs(10);

/// Sets the limits of recipes' kernels for this process. The first call counts.
pub fn limit_kernels(check: bool, time: Option<Duration>) {
    let expired = |error: &perilune_core::Error| {
        crate::console_out::complain("error", &error.to_string());
        EXPIRED_STATUS
    };
    kernel_limits::set(KernelLimits { check, time, expired: Some(expired) });
}

/// What a confined command may touch. Relative paths start from the current directory; what is not there is an error, but for the run
/// directory, which is made.
#[derive(Clone, Debug, Default)]
pub struct Terms {
    /// The recipe: it is read, and the `.lua` files beneath its folder can be required.
    pub recipe: Option<PathBuf>,
    /// Files and directories that the recipe may read.
    pub reads: Vec<PathBuf>,
    /// Files and directories that the recipe reads under other names, such as the data of a bundle: those names, and what has them
    /// here. Relative names start where the recipe's paths do.
    pub places: Vec<(PathBuf, PathBuf)>,
    /// Directories in which the recipe may write.
    pub writes: Vec<PathBuf>,
    /// Files and directories that the program reads for the command, closed to the recipe: the run that is resumed.
    pub opens: Vec<PathBuf>,
    /// Files and directories that the program writes for the command, closed to the recipe: a log.
    pub keeps: Vec<PathBuf>,
    /// The directory of results. Without one the command writes nothing.
    pub run_dir: Option<PathBuf>,
    /// The directory from which relative paths of the recipe start, if it is not the current one.
    pub start: Option<PathBuf>,
    /// Whether the recipe may launch kernels of its own source.
    pub kernels: bool,
    /// Whether the accesses of such kernels are checked.
    pub check_kernels: bool,
    /// The time that a launch of such a kernel may take; by default [`KERNEL_TIME`].
    pub kernel_time: Option<Duration>,
    /// The hosts that the supervisor downloads from.
    pub net: NetArgs,
    /// The most memory of the process, tensors on the CPU included; by default three quarters of the machine's.
    pub memory: Option<u64>,
    /// The time after which the process is ended, with exit status 124.
    pub time: Option<Duration>,
    /// Whether to go on where the system lacks a wall, without asking.
    pub accept_missing_walls: bool,
}
