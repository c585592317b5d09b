//! Rewrites the PTX of a recipe's kernel, so that it accesses only the buffers of its launch, and stops at its limit of time.
//!
//! With `--check-kernels` every access to global memory, also by a generic address, is made only if it is aligned and lies within an
//! input (to read), an output, or a variable of the module; a generic address may also be one of shared, local or constant memory
//! (`isspacep`). Otherwise a load reads zeros and a store goes to a spare buffer, so the kernel goes on without an effect. The first
//! violation is written to a cell of the launch, which the host reads. With a time limit, a kernel reads a word of the host at each
//! backward branch, at most once a millisecond, and its threads exit when the word has the number of the launch.
//!
//! The checks have no branches and no calls, so that the assembler sees the same basic blocks and contracts the same products and sums:
//! the results of a correct kernel keep their bits.
//!
//! | file | |
//! |---|---|
//! | `lexer.rs` | tokens of PTX |
//! | `access.rs` | what each instruction does with memory: a list of what is allowed |
//! | `module.rs` | reads a module and prints it with checks |
//! | `checks.rs` | the instructions of a check |
//! | `report.rs` | what a violation is called |
//! | `watchdog.rs` | tells kernels to end at their limit, and ends the process if one does not |

use perilune_core::KernelLimits;

mod access;
mod checks;
mod lexer;
mod module;
pub mod report;
pub(crate) mod watchdog;

/// What the code of a recipe's kernels is made to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Guard {
    /// Check every access.
    pub check: bool,
    /// End when the host says so.
    pub stop: bool,
}

impl Guard {
    /// Kernels as they are written.
    pub const NONE: Guard = Guard { check: false, stop: false };

    /// What limits ask for.
    pub fn of(limits: &KernelLimits) -> Guard {
        Guard { check: limits.check, stop: limits.time.is_some() }
    }

    /// Whether the code is rewritten.
    pub fn is_on(self) -> bool {
        self.check || self.stop
    }
}

/// A version of the rewritten code, part of the key of a cached kernel. Every change of what `rewrite` prints increments it.
pub const REVISION: u32 = 2;

/// How the launch passes what the checks use: the kernel's parameters are the addresses of inputs and outputs, the numbers, the bytes of
/// each input and output, and four words: the cell, the halt word, the stop word, and the number of the launch in its upper half.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    pub inputs: usize,
    pub outputs: usize,
    pub numbers: usize,
}

impl Layout {
    fn buffers(&self) -> usize {
        self.inputs + self.outputs
    }

    /// The parameter with the bytes of buffer `k`.
    fn bytes(&self, k: usize) -> usize {
        self.buffers() + self.numbers + k
    }

    fn cell(&self) -> usize {
        2 * self.buffers() + self.numbers
    }

    fn halt(&self) -> usize {
        self.cell() + 1
    }

    fn stop(&self) -> usize {
        self.cell() + 2
    }

    fn launch(&self) -> usize {
        self.cell() + 3
    }

    fn params(&self) -> usize {
        self.cell() + 4
    }
}

/// Why a kernel is not rewritten.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal {
    /// The line of the recipe's text, or 0.
    pub line: u32,
    pub message: String,
}

/// Returns the module with its checks. `entry` is its only kernel, and `file` is the name that `#line` gives the recipe's text.
///
/// # Errors
/// The module has an instruction or directive that the rewriter does not know, or that accesses memory in a way that is not checked.
pub fn rewrite(ptx: &str, entry: &str, file: &str, layout: Layout, guard: Guard) -> Result<String, Refusal> {
    module::rewrite(ptx, entry, file, layout, guard)
}
