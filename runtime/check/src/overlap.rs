//! Finds evaluation records whose text stands in longer training records, by runs of 13 words.
//!
//! A record is leaked if training records have at least half of the runs of one of its texts, and 3 at least. Runs that three evaluation records
//! have are boilerplate and do not count. Texts of fewer than 15 words are compared as a whole only (`duplicates`, `near`).

use crate::duplicates::Id;
use crate::normal::word_runs;
use crate::roles::Roles;
use crate::scan::{Scanned, text_of};
use perilune_data::Result;
use rustc_hash::FxHashMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Words of a run.
const WORDS: usize = 13;
/// Evaluation records from which a run is boilerplate.
const BOILERPLATE: u8 = 3;
/// The least number of common runs.
const LEAST: u32 = 3;
/// Runs that are kept: 32 bytes each.
const MOST: usize = 16 << 20;

/// Runs of words of the evaluation records.
#[derive(Default)]
pub struct Overlap {
    /// The slot of each run.
    slots: FxHashMap<u64, u32>,
    /// In how many evaluation records it is, and the last of them.
    records: Vec<(u8, Id)>,
    /// The first training record that has it.
    seen: Vec<AtomicU64>,
}

impl Overlap {
    /// Collects the runs of evaluation splits.
    pub fn of(scanned: &[Scanned<'_>], roles: &Roles) -> Result<Overlap> {
        let mut out = Overlap::default();
        if !roles.has_text() {
            return Ok(out);
        }
        for (s, split) in (0u32..).zip(scanned) {
            for place in 0..split.keys.len() as u32 {
                let id = (s, place);
                word_runs(&text_of(split, u64::from(place), roles)?, WORDS, |_, hash| {
                    let next = out.records.len();
                    if next >= MOST {
                        return;
                    }
                    let slot = *out.slots.entry(hash).or_insert(next as u32) as usize;
                    match out.records.get_mut(slot) {
                        None => out.records.push((1, id)),
                        Some(known) if known.1 != id => *known = (known.0.saturating_add(1), id),
                        Some(_) => {}
                    }
                });
            }
        }
        out.seen = out.records.iter().map(|_| AtomicU64::new(u64::MAX)).collect();
        Ok(out)
    }

    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Looks for the runs in a training record.
    pub fn look(&self, text: &str, place: u64) {
        word_runs(text, WORDS, |_, hash| {
            if let Some(seen) = self.slots.get(&hash).and_then(|slot| self.seen.get(*slot as usize)) {
                seen.fetch_min(place, Ordering::Relaxed);
            }
        });
    }

    /// Returns the evaluation records that are leaked, with the first training record, but for those that are `known`. The training split is the
    /// first of `scanned`.
    pub fn leaks(&self, scanned: &[Scanned<'_>], roles: &Roles, known: impl Fn(Id) -> bool) -> Result<Vec<(Id, Id)>> {
        let mut out = Vec::new();
        if self.is_empty() {
            return Ok(out);
        }
        for (s, split) in (0u32..).zip(scanned).filter(|s| s.1.split.evaluation) {
            for place in (0..split.keys.len() as u32).filter(|p| !known((s, *p))) {
                // Of each text: runs, common runs, the first training record.
                let mut parts: Vec<(u32, u32, u64)> = Vec::new();
                word_runs(&text_of(split, u64::from(place), roles)?, WORDS, |part, hash| {
                    let Some(slot) = self.slots.get(&hash).map(|slot| *slot as usize) else { return };
                    if self.records.get(slot).is_none_or(|r| r.0 >= BOILERPLATE) {
                        return;
                    }
                    if parts.len() <= part {
                        parts.resize(part + 1, (0, 0, u64::MAX));
                    }
                    let seen = self.seen.get(slot).map_or(u64::MAX, |seen| seen.load(Ordering::Relaxed));
                    let counts = &mut parts[part];
                    *counts = (counts.0 + 1, counts.1 + u32::from(seen != u64::MAX), counts.2.min(seen));
                });
                if let Some(leak) = parts.iter().find(|p| p.1 >= LEAST && p.1 * 2 >= p.0) {
                    out.push(((s, place), (0, u32::try_from(leak.2).unwrap_or(u32::MAX))));
                }
            }
        }
        Ok(out)
    }
}
