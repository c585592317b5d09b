//! Interprets a sequence of elementwise f32 functions on blocks that stay in registers.
//!
//! A loop of `map` reads its operands from the L1 cache and stores its result there. The interpreter keeps an
//! accumulator of eight vectors in registers and runs a list of [`FusedOp`]s on it, so that an op costs the load of its
//! operand and its arithmetic. A value that is read again later is stored in a small local buffer that stays in L1. All
//! operands advance together, a few cache lines at a time, so the processor fetches them from memory while it computes.
//!
//! Each op computes the same function of each element as the loop it replaces, so the bits are the same.
//!
//! The opcode table is repeated in four places, which must agree: [`Opcode`] and its mapping from `MapFn` (`opcode`),
//! the interpreter (`interpret`), the superinstructions (`loops::superinstructions`), and the loops of `map_fns!` that
//! they replace. `tests/loops` compares the interpreter with those loops for every opcode.

mod interpret;
mod opcode;

pub use interpret::interpreter;
#[cfg(target_arch = "x86_64")]
pub use interpret::{avx2, avx512};
pub use opcode::*;

/// Orders this thread's non-temporal stores before its later stores. Called once at the end of a thread's part of a
/// kernel; a fence after each tile would stall on the stores.
pub fn store_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has this instruction.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}
