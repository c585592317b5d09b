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
