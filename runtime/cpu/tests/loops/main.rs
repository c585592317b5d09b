//! Tests the vector loops on every instruction set of this processor. They are a program of their own because unit tests would compile
//! every loop a second time.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod block;
mod cast;
mod interpreter;
#[cfg(target_arch = "x86_64")]
mod row_pipeline;
#[cfg(target_arch = "x86_64")]
mod superinstructions;

use perilune_cpu::loops::Isa;
#[cfg(target_arch = "x86_64")]
use perilune_cpu::loops::fused_interpreter::{FusedOp, Opcode, Operand};

/// The vector classes of this processor.
fn vector_classes() -> Vec<Isa> {
    let best = Isa::ALL.iter().position(|isa| *isa == Isa::detect()).unwrap_or(0);
    Isa::ALL[..=best].iter().copied().filter(|isa| *isa != Isa::Baseline).collect()
}

/// The ops of a listed sequence; each has the operand with its own number.
#[cfg(target_arch = "x86_64")]
fn ops(entry: &[(Opcode, Option<u8>)]) -> Vec<FusedOp> {
    let op = |(k, &(opcode, local)): (usize, &(Opcode, Option<u8>))| {
        let v = k as u16;
        let operand = match (opcode, local) {
            (Opcode::Sum, k) => Operand::Sum(k.expect("a sum has a number"), v),
            (_, Some(k)) => Operand::Local(k),
            (opcode, _) if opcode.is_broadcast() => Operand::RowBroadcast(v),
            _ => Operand::View(v),
        };
        FusedOp { opcode, operand }
    };
    entry.iter().enumerate().map(op).collect()
}
