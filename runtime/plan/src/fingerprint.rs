//! Hashes the kernels of a program independently of its numbering, to count those that another program lacks.
//!
//! Values, slots and recording positions are numbered over a whole program, so the numbers of an unchanged layer change
//! when something before it does. Here each kernel is numbered separately.

use crate::ir::{Kernel, Program};
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

/// A hash of each kernel of a program, in order. Equal kernels have equal hashes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Fingerprint {
    pub kernels: Vec<u64>,
}

impl Fingerprint {
    pub fn of(program: &Program) -> Fingerprint {
        Fingerprint { kernels: program.kernels.iter().map(signature).collect() }
    }

    /// One number for all kernels in their order, the same in every process of one release.
    pub fn digest(&self) -> u64 {
        let mut hash = DefaultHasher::new();
        self.kernels.hash(&mut hash);
        hash.finish().max(1)
    }

    /// Counts the kernels that `other` lacks.
    pub fn new_beside(&self, other: &Fingerprint) -> usize {
        let mut there: HashMap<u64, usize> = HashMap::new();
        for k in &other.kernels {
            *there.entry(*k).or_default() += 1;
        }
        // One compiled kernel serves all launches with the same hash.
        self.kernels.iter().filter(|k| !there.contains_key(k)).count()
    }
}

fn signature(kernel: &Kernel) -> u64 {
    let text = format!("{kernel:?}");
    let mut hash = DefaultHasher::new();
    let mut names: HashMap<(&str, &str), usize> = HashMap::new();
    let mut rest = text.as_str();
    const NUMBERED: [&str; 3] = ["ValueId(", "Slot(", "Origin("];
    while let Some((at, kind)) = NUMBERED.iter().filter_map(|k| Some((rest.find(k)?, *k))).min() {
        let (before, tail) = rest.split_at(at + kind.len());
        let end = tail.find(')').unwrap_or(tail.len());
        before.hash(&mut hash);
        if kind != "Origin(" {
            let next = names.len();
            names.entry((kind, &tail[..end])).or_insert(next).hash(&mut hash);
        }
        rest = &tail[end..];
    }
    rest.hash(&mut hash);
    hash.finish()
}
