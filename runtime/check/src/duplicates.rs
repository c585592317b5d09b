//! Finds exact duplicates, by the hash of normalized texts, within a split and across splits.

use crate::scan::Scanned;
use rustc_hash::FxHashSet;

/// A record: the number of its split, and its place there.
pub type Id = (u32, u32);

/// Groups of equal records.
#[derive(Default)]
pub struct Exact {
    /// Records that repeat an earlier one of their split, with that one.
    pub repeated: Vec<(Id, Id)>,
    /// Records of evaluation splits that a training split has, with the first there.
    pub leaked: Vec<(Id, Id)>,
    /// Records whose text has another label elsewhere in the split, with the first of that text.
    pub conflicts: Vec<(Id, Id)>,
    leaks: FxHashSet<Id>,
    /// Records that are not the first of their text among all splits.
    later: FxHashSet<Id>,
}

impl Exact {
    pub fn is_leak(&self, id: Id) -> bool {
        self.leaks.contains(&id)
    }

    pub fn is_later(&self, id: Id) -> bool {
        self.later.contains(&id)
    }
}

/// Compares the keys of all records.
pub fn find(scanned: &[Scanned<'_>]) -> Exact {
    use rayon::prelude::*;
    let mut all: Vec<(u128, Id, u64)> = Vec::new();
    for (s, split) in (0u32..).zip(scanned) {
        all.extend((0u32..).zip(&split.keys).filter(|k| k.1.exact != 0).map(|(p, k)| (k.exact, (s, p), k.label)));
    }
    all.par_sort_unstable();
    let mut out = Exact::default();
    for group in all.chunk_by(|a, b| a.0 == b.0).filter(|g| g.len() > 1) {
        let Some(&(_, first, _)) = group.first() else { continue };
        out.later.extend(group.iter().skip(1).map(|g| g.1));
        for of_split in group.chunk_by(|a, b| a.1.0 == b.1.0) {
            let Some(&(_, own, label)) = of_split.first() else { continue };
            for (_, id, other) in of_split.iter().skip(1) {
                out.repeated.push((*id, own));
                if *other != label {
                    out.conflicts.push((*id, own));
                }
            }
            let evaluation = |id: Id| scanned.get(id.0 as usize).is_some_and(|s| s.split.evaluation);
            // Training splits are first in a group.
            if evaluation(own) && !evaluation(first) {
                out.leaked.extend(of_split.iter().map(|g| (g.1, first)));
            }
        }
    }
    out.repeated.sort_unstable();
    out.leaked.sort_unstable();
    out.conflicts.sort_unstable();
    out.leaks = out.leaked.iter().map(|l| l.0).collect();
    out
}
