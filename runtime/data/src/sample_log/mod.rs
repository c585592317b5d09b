//! Stores which samples each step of a run trained on, with their losses: the sample log.
//!
//! An entry is a sample in a step. Entries are kept compressed in blocks of 65,536 (about 14 bytes an entry), which are also the format of
//! the file in a run directory ([`block`]); a table has the statistics of each sample. A step that is taken again, after a resume
//! or an edit, replaces what was stored of it and of later steps.

mod block;

pub use block::{Block, decode};

use crate::error::Result;
use rustc_hash::FxHashMap;

/// The entries of a block.
const BLOCK: usize = 1 << 16;
/// The chained hash before the first block.
pub type Hash = [u8; 32];

/// A sample: a row of a source.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SampleId {
    /// The number of its source among [`SampleLog::sources`].
    pub source: u16,
    pub row: u64,
    /// Its number among the samples that a stage made of the row.
    pub sub: u32,
}

/// A sample in a step.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Entry {
    /// The number of steps done after it, from 1.
    pub step: u32,
    pub id: SampleId,
    /// The mean loss over the targets of the sample; NaN if it has none.
    pub loss: f32,
    /// What the recipe multiplied the loss by.
    pub weight: f32,
    /// The norm of the gradient of `loss` with respect to the logits; NaN if it is not known.
    pub gradient: f32,
}

/// The statistics of a sample over all steps that trained on it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Stats {
    pub count: u32,
    /// Those of the last step.
    pub step: u32,
    pub loss: f32,
    pub weight: f32,
    pub gradient: f32,
    /// The mean of the losses, and the sum of squared differences from it (Welford, Technometrics 4, 1962).
    pub mean: f64,
    squares: f64,
}

impl Stats {
    /// The standard deviation of the losses; 0 for one.
    pub fn deviation(&self) -> f64 {
        if self.count < 2 { 0.0 } else { (self.squares / f64::from(self.count - 1)).max(0.0).sqrt() }
    }
}

/// What [`SampleLog::worst`] orders by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// The loss when the sample was trained on last.
    Last,
    Mean,
    Gradient,
}

/// The samples of all steps of a run.
#[derive(Default, Debug)]
pub struct SampleLog {
    sources: Vec<String>,
    /// How many of the sources the blocks name.
    named: usize,
    blocks: Vec<Block>,
    /// Entries behind those of the blocks.
    open: Vec<Entry>,
    table: FxHashMap<SampleId, Stats>,
    /// What the chain of hashes begins with.
    origin: Hash,
    /// How often blocks were removed.
    rewinds: u64,
}

impl SampleLog {
    /// Creates an empty log, whose chain of hashes begins with that of `name`.
    pub fn new(name: &str) -> SampleLog {
        SampleLog { origin: *blake3::hash(name.as_bytes()).as_bytes(), ..SampleLog::default() }
    }

    /// Returns the number of a source, which it gets if it is new. Sources beyond 65,535 share the last number.
    pub fn source(&mut self, name: &str) -> u16 {
        let known = self.sources.iter().position(|s| s == name);
        let at = known.unwrap_or_else(|| {
            if self.sources.len() < usize::from(u16::MAX) {
                self.sources.push(name.to_string());
            }
            self.sources.len() - 1
        });
        at as u16
    }

    /// The names of the sources, by number.
    pub fn sources(&self) -> &[String] {
        &self.sources
    }

    /// The last step that has entries; 0 if none has.
    pub fn last_step(&self) -> u32 {
        self.open.last().map(|e| e.step).or_else(|| self.blocks.last().map(|b| b.last_step)).unwrap_or(0)
    }

    /// Appends the entries of a step. What was stored of this step and of later ones is dropped first.
    ///
    /// # Errors
    /// A block cannot be compressed or read.
    pub fn add(&mut self, step: u32, entries: impl IntoIterator<Item = Entry>) -> Result<()> {
        if step <= self.last_step() {
            self.rewind(step.saturating_sub(1))?;
        }
        for entry in entries {
            let entry = Entry { step, ..entry };
            see(&mut self.table, &entry);
            self.open.push(entry);
        }
        if self.open.len() >= BLOCK { self.seal() } else { Ok(()) }
    }

    /// Drops the entries of the steps after `step`.
    ///
    /// # Errors
    /// A block cannot be read.
    pub fn rewind(&mut self, step: u32) -> Result<()> {
        if self.last_step() <= step {
            return Ok(());
        }
        let kept = self.blocks.partition_point(|b| b.last_step <= step);
        if let Some(cut) = self.blocks.get(kept) {
            let mut open = cut.entries()?;
            open.append(&mut self.open);
            self.open = open;
            // The names of the blocks that go are written again.
            self.named = self.blocks[..kept].iter().map(|b| b.names).sum();
            self.blocks.truncate(kept);
            self.rewinds += 1;
        }
        self.open.retain(|e| e.step <= step);
        self.table.clear();
        for block in &self.blocks {
            block.entries()?.iter().for_each(|e| see(&mut self.table, e));
        }
        self.open.iter().for_each(|e| see(&mut self.table, e));
        Ok(())
    }

    /// Makes a block of the entries that are in none, for a file.
    ///
    /// # Errors
    /// They cannot be compressed.
    pub fn seal(&mut self) -> Result<()> {
        if self.open.is_empty() {
            return Ok(());
        }
        let block = Block::new(&self.open, &self.sources[self.named..], self.head())?;
        self.named = self.sources.len();
        self.blocks.push(block);
        self.open.clear();
        Ok(())
    }

    /// The blocks, and how often some of them were removed: a file that was written before that must be written anew.
    pub fn blocks(&self) -> (&[Block], u64) {
        (&self.blocks, self.rewinds)
    }

    /// The hash of the last block, chained through all of them.
    pub fn head(&self) -> Hash {
        self.blocks.last().map_or(self.origin, |b| b.hash)
    }

    /// Whether the chain of hashes passes this one.
    pub fn passes(&self, head: &Hash) -> bool {
        *head == self.origin || self.blocks.iter().any(|b| b.hash == *head)
    }

    /// Lists the entries of a step, in their order in the batch.
    ///
    /// # Errors
    /// A block cannot be read.
    pub fn samples(&self, step: u32) -> Result<Vec<Entry>> {
        let first = self.blocks.partition_point(|b| b.last_step < step);
        let mut out = Vec::new();
        for block in self.blocks[first..].iter().take_while(|b| b.first_step <= step) {
            out.extend(block.entries()?.into_iter().filter(|e| e.step == step));
        }
        out.extend(self.open.iter().filter(|e| e.step == step));
        Ok(out)
    }

    /// Lists the entries of the steps `first` to `last`, in their order.
    ///
    /// # Errors
    /// A block cannot be read.
    pub fn range(&self, first: u32, last: u32) -> Result<Vec<Entry>> {
        let at = self.blocks.partition_point(|b| b.last_step < first);
        let mut out = Vec::new();
        for block in self.blocks[at..].iter().take_while(|b| b.first_step <= last) {
            out.extend(block.entries()?.into_iter().filter(|e| (first..=last).contains(&e.step)));
        }
        out.extend(self.open.iter().filter(|e| (first..=last).contains(&e.step)));
        Ok(out)
    }

    /// Returns the statistics of a sample.
    pub fn of(&self, id: SampleId) -> Option<&Stats> {
        self.table.get(&id)
    }

    /// Lists the `count` samples with the largest values, the largest first; equal ones by their ids. Samples without a value are left out.
    pub fn worst(&self, count: usize, order: Order) -> Vec<(SampleId, Stats)> {
        let value = |s: &Stats| match order {
            Order::Last => f64::from(s.loss),
            Order::Mean => s.mean,
            Order::Gradient => f64::from(s.gradient),
        };
        let mut all: Vec<(SampleId, Stats)> =
            self.table.iter().filter(|(_, s)| !value(s).is_nan()).map(|(id, s)| (*id, *s)).collect();
        let by = |a: &(SampleId, Stats), b: &(SampleId, Stats)| value(&b.1).total_cmp(&value(&a.1)).then(a.0.cmp(&b.0));
        if count < all.len() && count > 0 {
            all.select_nth_unstable_by(count - 1, by);
        }
        all.truncate(count);
        all.sort_unstable_by(by);
        all
    }

    /// The number of samples that were trained on.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }
}

/// Adds an entry to the statistics of its sample.
fn see(table: &mut FxHashMap<SampleId, Stats>, e: &Entry) {
    let new =
        Stats { count: 0, step: 0, loss: f32::NAN, weight: 1.0, gradient: f32::NAN, mean: f64::NAN, squares: 0.0 };
    let s = table.entry(e.id).or_insert(new);
    (s.step, s.loss, s.weight, s.gradient) = (e.step, e.loss, e.weight, e.gradient);
    if e.loss.is_nan() {
        return;
    }
    s.count = s.count.saturating_add(1);
    let (loss, before) = (f64::from(e.loss), if s.count == 1 { f64::from(e.loss) } else { s.mean });
    s.mean = before + (loss - before) / f64::from(s.count);
    s.squares += (loss - before) * (loss - s.mean);
}

#[cfg(test)]
mod tests;
