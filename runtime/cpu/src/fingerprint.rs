//! Serializes compiled kernels as numbers, so that tests can pin what the compiler makes of a program.
//!
//! The numbers hold tile ops, opcodes, registers, loop shapes and tiles, in order. They do not change when a type, a
//! field or a variant is renamed: each enum of this crate is written by the codes in this module and in
//! `region::fingerprint`, and element types and functions (`DType`, `MapFn`, `ReduceFn`) by their codes. They
//! change with the order or choice of ops and opcodes, the layout of scratch memory and the tile sizes. They also
//! change if a `MapFn` or `ReduceFn` is inserted before others, so append new ones. Addresses of loops are omitted,
//! since the function and the element type determine them.

use crate::backend;
use crate::loops::Isa;
use perilune_core::error::Result;
use perilune_core::{DType, Layout, Shape};
use perilune_plan::ir::{Program, Source};
use std::collections::HashMap;

/// A list of numbers in which values and slots are numbered by first appearance: kernels that differ only in these are
/// equal.
#[derive(Default)]
pub struct Words {
    pub list: Vec<u64>,
    values: HashMap<u32, u64>,
    slots: HashMap<u32, u64>,
}

impl Words {
    pub fn put(&mut self, n: usize) {
        self.list.push(n as u64);
    }

    pub fn signed(&mut self, n: isize) {
        self.list.push(n as u64);
    }

    pub fn value(&mut self, id: u32) {
        let next = self.values.len() as u64;
        // The absent id keeps a fixed code.
        let number = if id == u32::MAX { u64::MAX } else { *self.values.entry(id).or_insert(next) };
        self.list.push(number);
    }

    pub fn slot(&mut self, id: u32) {
        let next = self.slots.len() as u64;
        let number = *self.slots.entry(id).or_insert(next);
        self.list.push(number);
    }

    pub fn dtype(&mut self, dtype: DType) {
        self.put(dtype as usize);
    }

    pub fn shape(&mut self, shape: &Shape) {
        self.put(shape.rank());
        shape.dims().iter().for_each(|d| self.put(*d));
    }

    pub fn layout(&mut self, l: &Layout) {
        self.shape(&l.shape);
        l.strides().iter().for_each(|s| self.signed(*s));
        self.signed(l.offset);
    }

    pub fn source(&mut self, source: &Source) {
        match *source {
            Source::Value(v) => {
                self.put(0);
                self.value(v.0);
            }
            Source::Block { input, start } => {
                self.put(5);
                self.value(input.0);
                self.slot(start);
            }
            Source::Slot(s) => {
                self.put(1);
                self.slot(s);
            }
            Source::Constant(bits) => self.list.extend([2, bits]),
            Source::Iota { start } => {
                self.put(3);
                start.into_iter().for_each(|slot| self.slot(slot));
            }
            Source::Uniform { seed, counter, start } => {
                self.put(4);
                self.slot(seed);
                self.slot(counter);
                start.into_iter().for_each(|slot| self.slot(slot));
            }
        }
    }
}

/// Appends the fingerprint of kernel `k` of a program, compiled for an instruction set that this machine may lack.
pub fn kernel(program: &Program, k: usize, isa: Isa, words: &mut Words) -> Result<()> {
    backend::compile(program, &program.kernels[k], isa)?.fingerprint(words);
    Ok(())
}
