//! Divides the stream of a mixture among its datasets.
//!
//! The stream is cut into segments, each with a count of places for every dataset in any [`BLOCK`] of places from its first one. The
//! order of a block is a permutation by (seed, block), and the places of a dataset are numbered in that order, over all segments. So the
//! dataset of a place and the number of its record follow from the list of segments alone, and a segment may begin anywhere
//! without a record that is repeated or skipped.

use crate::error::{Error, Result};
use crate::sample_order::{Permutation, Stream};
use std::sync::{Arc, Mutex, PoisonError};

/// The places of a block.
pub const BLOCK: u64 = 1024;

/// The limit of segments, which checkpoints store as text.
pub const MAX_SEGMENTS: usize = 1 << 14;

/// The blocks whose order is kept: those that the batches being made are in.
const KEPT: usize = 8;

/// The place of each dataset in a block of a segment.
#[derive(Clone, PartialEq, Debug)]
struct Segment {
    first: u64,
    /// The number of its first block among those of all segments, which the permutation is a function of.
    block: u64,
    /// The places of each dataset in a block.
    counts: Vec<u64>,
    /// The records of each dataset that earlier segments take.
    before: Vec<u64>,
}

/// The dataset of each place of a block, and the number of the place among those of the dataset.
type Order = Vec<(u16, u16)>;

/// The segments of a mixture's stream.
#[derive(Debug)]
pub struct Schedule {
    seed: u64,
    segments: Vec<Segment>,
    orders: Mutex<Vec<(u64, Arc<Order>)>>,
}

impl Clone for Schedule {
    fn clone(&self) -> Schedule {
        Schedule { seed: self.seed, segments: self.segments.clone(), orders: Mutex::default() }
    }
}

impl Schedule {
    /// Creates a schedule of one segment that begins at `first`, before which `before` records of each dataset were taken.
    pub fn new(seed: u64, first: u64, before: Vec<u64>, counts: Vec<u64>) -> Schedule {
        let segments = vec![Segment { first, block: first.div_ceil(BLOCK), counts, before }];
        Schedule { seed, segments, orders: Mutex::default() }
    }

    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns the counts of the last segment.
    pub fn counts(&self) -> &[u64] {
        self.segments.last().map_or(&[], |s| &s.counts)
    }

    fn segment(&self, index: u64) -> Option<&Segment> {
        let after = self.segments.partition_point(|s| s.first <= index);
        self.segments.get(after.checked_sub(1)?)
    }

    /// Returns the order of a block of a segment, from those kept where it is one of them.
    fn order(&self, segment: &Segment, block: u64) -> Arc<Order> {
        let number = segment.block + block;
        let mut kept = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, order)) = kept.iter().find(|(n, _)| *n == number) {
            return order.clone();
        }
        let permutation = Permutation::new(BLOCK, self.seed, number, Stream::Mix);
        let (mut ends, mut at) = (Vec::with_capacity(segment.counts.len()), 0);
        for count in &segment.counts {
            at += count;
            ends.push(at);
        }
        let mut taken = vec![0u16; ends.len()];
        let order = (0..BLOCK).map(|slot| {
            let slot = permutation.at(slot);
            let dataset = ends.partition_point(|end| *end <= slot);
            let rank = taken[dataset];
            taken[dataset] += 1;
            (dataset as u16, rank)
        });
        let order = Arc::new(order.collect::<Order>());
        if kept.len() == KEPT {
            kept.remove(0);
        }
        kept.push((number, order.clone()));
        order
    }

    /// Returns the dataset of a place and the number of its record. `None` before the first segment, after an edit that
    /// changed the datasets.
    pub fn at(&self, index: u64) -> Option<(usize, u64)> {
        let segment = self.segment(index)?;
        let (block, place) = ((index - segment.first) / BLOCK, (index - segment.first) % BLOCK);
        let (dataset, rank) = *self.order(segment, block).get(place as usize)?;
        let dataset = usize::from(dataset);
        let whole = segment.before[dataset].saturating_add(block * segment.counts[dataset]);
        Some((dataset, whole.saturating_add(u64::from(rank))))
    }

    /// Returns how many records of each dataset the places before `index` take.
    pub fn taken(&self, index: u64) -> Vec<u64> {
        let Some(segment) = self.segment(index) else { return self.segments[0].before.clone() };
        let (block, place) = ((index - segment.first) / BLOCK, (index - segment.first) % BLOCK);
        let mut taken: Vec<u64> =
            segment.before.iter().zip(&segment.counts).map(|(before, count)| before + block * count).collect();
        for (dataset, _) in self.order(segment, block).iter().take(place as usize) {
            taken[usize::from(*dataset)] += 1;
        }
        taken
    }

    /// Gives the places from `first` on other counts. Segments that begin there or later are replaced.
    ///
    /// # Errors
    /// There would be more than [`MAX_SEGMENTS`].
    pub fn append(&mut self, first: u64, counts: Vec<u64>) -> Result<()> {
        let before = self.taken(first);
        while self.segments.len() > 1 && self.segments.last().is_some_and(|s| s.first >= first) {
            self.segments.pop();
        }
        let full = self.segments.len() >= MAX_SEGMENTS;
        let Some(last) = self.segments.last_mut() else { return Ok(()) };
        if last.counts == counts {
            return Ok(());
        }
        if last.first >= first {
            last.counts = counts;
        } else if full {
            return Err(Error::argument("data.mix", format!("the weights have changed {MAX_SEGMENTS} times"))
                .hint("ask for them less often: { every = 1000 }, or round what the function returns"));
        } else {
            let block = last.block + (first - last.first).div_ceil(BLOCK);
            self.segments.push(Segment { first, block, counts, before });
        }
        // The order of a block that was cut may have been made with the counts that are replaced.
        self.orders = Mutex::default();
        Ok(())
    }

    /// Writes the schedule as text: the seed and the first segment with the records before it, then the others.
    pub fn text(&self) -> String {
        let numbers = |list: &[u64]| list.iter().map(u64::to_string).collect::<Vec<_>>().join(" ");
        let mut parts = vec![format!("{} {}", self.seed, numbers(&self.segments[0].before))];
        parts.extend(self.segments.iter().map(|s| format!("{} {}", s.first, numbers(&s.counts))));
        parts.join("; ")
    }

    /// Reads the text of a schedule of `datasets` datasets; `None` if it is none.
    pub fn parse(text: &str, datasets: usize) -> Option<Schedule> {
        let numbers = |part: &str| part.split_whitespace().map(|n| n.parse::<u64>().ok()).collect::<Option<Vec<_>>>();
        let parts = text.split(';').take(MAX_SEGMENTS + 2).map(numbers).collect::<Option<Vec<_>>>()?;
        // Numbers of places and records stay far from overflow.
        let bound = |list: &[u64]| list.iter().all(|n| *n < 1 << 56);
        let (head, segments) = parts.split_first()?;
        let (seed, before) = head.split_first()?;
        if before.len() != datasets || !bound(before) || segments.len() > MAX_SEGMENTS {
            return None;
        }
        let mut schedule: Option<Schedule> = None;
        for segment in segments {
            let (first, counts) = segment.split_first()?;
            if counts.len() != datasets || !bound(segment) || counts.iter().sum::<u64>() != BLOCK {
                return None;
            }
            match &mut schedule {
                None => schedule = Some(Schedule::new(*seed, *first, before.to_vec(), counts.to_vec())),
                Some(s) if s.segments.last()?.first < *first => s.append(*first, counts.to_vec()).ok()?,
                Some(_) => return None,
            }
        }
        schedule
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use perilune_core::philox::philox4x32;

    /// Over random segments, each dataset has each of its records once and in order, and its share of every whole block.
    #[test]
    fn segments_anywhere_repeat_and_skip_no_record() {
        for seed in 0..60u32 {
            let mut counter = 0;
            let mut draw = |below: u32| {
                counter += 1;
                u64::from(philox4x32([counter, 0, 0, 0], [seed, 3])[0] % below)
            };
            let datasets = draw(4) as usize + 1;
            let mut counts = || {
                let mut left = BLOCK;
                let mut list = Vec::new();
                for _ in 1..datasets {
                    list.push(draw(1025).min(left));
                    left -= list[list.len() - 1];
                }
                list.push(left);
                list
            };
            let mut schedule = Schedule::new(u64::from(seed), 0, vec![0; datasets], counts());
            let (mut next, mut cuts) = (vec![0u64; datasets], Vec::new());
            let changes: Vec<Vec<u64>> = (0..5).map(|_| counts()).collect();
            let mut cut = 0;
            for counts in changes {
                cut += draw(3000);
                schedule.append(cut, counts.clone()).unwrap();
                cuts.push((cut, counts));
            }
            let text = schedule.text();
            let again = Schedule::parse(&text, datasets).unwrap();
            assert_eq!(again.segments, schedule.segments);
            for index in 0..cut + 3000 {
                assert_eq!(schedule.taken(index), next, "seed {seed}, place {index}");
                let (dataset, record) = schedule.at(index).unwrap();
                assert_eq!(record, next[dataset], "seed {seed}, place {index}");
                assert_eq!(again.at(index), Some((dataset, record)));
                next[dataset] += 1;
            }
            let (last, counts) = cuts.last().unwrap();
            let (from, to) = (schedule.taken(*last), schedule.taken(last + BLOCK));
            let share: Vec<u64> = to.iter().zip(&from).map(|(a, b)| a - b).collect();
            assert_eq!(&share, counts, "seed {seed}");
        }
    }

    #[test]
    fn damaged_texts_are_no_schedules() {
        let mut good = Schedule::new(7, 0, vec![0, 0], vec![512, 512]);
        good.append(100, vec![1024, 0]).unwrap();
        assert_eq!(good.text(), "7 0 0; 0 512 512; 100 1024 0");
        for text in
            ["", "7", "7 0 0", "7 0; 0 1024", "7 0 0; 0 512 511", "7 0 0; 0 512 512; 0 1024 0", "x 0 0; 0 512 512"]
        {
            assert!(Schedule::parse(text, 2).is_none(), "{text}");
        }
        assert!(Schedule::parse("7 0 99999999999999999999; 0 512 512", 2).is_none());
        assert!(Schedule::parse("7 0 0; 0 512 512", 3).is_none());
    }

    #[test]
    fn a_decision_replaces_later_ones_and_equal_counts_begin_no_segment() {
        let mut s = Schedule::new(1, 0, vec![0, 0], vec![512, 512]);
        s.append(50, vec![512, 512]).unwrap();
        assert_eq!(s.segments.len(), 1);
        s.append(50, vec![1000, 24]).unwrap();
        s.append(90, vec![24, 1000]).unwrap();
        s.append(60, vec![1024, 0]).unwrap();
        assert_eq!(s.text(), "1 0 0; 0 512 512; 50 1000 24; 60 1024 0");
        // Before the first segment of a schedule that an edit began there is none.
        let edited = Schedule::new(1, 2000, vec![7, 9], vec![512, 512]);
        assert_eq!((edited.at(1999), edited.taken(2000)), (None, vec![7, 9]));
    }
}
