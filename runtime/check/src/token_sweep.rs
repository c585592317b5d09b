//! Reads a part of a corpus in parallel blocks, and finds ids beyond the vocabulary and stretches of one id.

use crate::corpus::Corpus;
use crate::field::Rows;
use crate::scan::{Options, is_fatal, spread};
use perilune_data::{Error, Result};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Mutex;
use std::time::Instant;

/// Tokens of a block: 1 MiB of ids.
const BLOCK: u64 = 1 << 18;
/// Those of a block of a sample.
const SAMPLED: u64 = 1 << 16;
/// The least number of equal ids that are a fault: shorter rulers and padding stand in good texts.
const LEAST: u64 = 64;

/// Tokens of a block, and those behind it that complete its last runs.
pub struct Block {
    pub start: u64,
    pub ids: Vec<u32>,
    /// The number of tokens that are the block's own.
    pub own: usize,
}

/// What is known of the tokens that were read.
#[derive(Default)]
pub struct Facts {
    pub read: u64,
    /// The least and the largest id.
    pub ids: Option<(u32, u32)>,
    pub outside: Rows,
    pub same: Same,
    /// Blocks that could not be read, and the first error.
    pub unreadable: Rows,
    pub error: Option<String>,
}

/// Stretches of one id.
#[derive(Default)]
pub struct Same {
    /// Windows that fit into such stretches.
    pub windows: Rows,
    pub longest: u64,
    /// The stretch that may go on: start, length, id.
    open: Option<(u64, u64, u32)>,
}

impl Same {
    fn add(&mut self, run: (u64, u64, u32), least: u64) {
        match &mut self.open {
            Some(open) if open.0 + open.1 == run.0 && open.2 == run.2 => open.1 += run.1,
            _ => {
                self.close(least);
                self.open = Some(run);
            }
        }
    }

    fn close(&mut self, least: u64) {
        if let Some((start, length, _)) = self.open.take().filter(|open| open.1 >= least) {
            self.longest = self.longest.max(length);
            (0..length / least).for_each(|k| self.windows.add(start + k * least));
        }
    }
}

/// Which blocks of a part are read.
pub struct Sweep<'a> {
    pub corpus: &'a Corpus,
    pub options: &'a Options,
    /// The time after which no further blocks are read.
    pub limit: Option<Instant>,
    /// Blocks have a multiple of so many tokens.
    pub unit: u64,
    /// Tokens behind a block that are read with it.
    pub margin: u64,
    pub buffers: Buffers,
}

/// Buffers of blocks that were read, for the next ones.
#[derive(Default)]
pub struct Buffers(Mutex<Vec<(Vec<u8>, Vec<u32>)>>);

impl Buffers {
    fn take(&self) -> (Vec<u8>, Vec<u32>) {
        self.0.lock().ok().and_then(|mut all| all.pop()).unwrap_or_default()
    }

    fn give(&self, mut buffers: (Vec<u8>, Vec<u32>)) {
        buffers.0.clear();
        buffers.1.clear();
        if let Ok(mut all) = self.0.lock() {
            all.push(buffers);
        }
    }
}

/// The least length of a stretch of one id that is a fault.
pub fn least_same(corpus: &Corpus) -> u64 {
    corpus.context.max(LEAST)
}

/// The tokens of a part that are read at most.
pub fn most_read(corpus: &Corpus, options: &Options) -> u64 {
    (corpus.part.end - corpus.part.start).min(options.tokens)
}

impl Sweep<'_> {
    fn block(&self) -> u64 {
        let size = if self.options.tokens == u64::MAX { BLOCK } else { SAMPLED };
        self.unit * (size / self.unit.max(1)).max(1)
    }

    /// Reads the blocks: `each` maps them on several threads, and `fold` takes the results in the order in which they are read.
    pub fn read<T: Send>(&self, each: impl Fn(&Block) -> T + Sync, mut fold: impl FnMut(u64, T)) -> Result<Facts> {
        let (part, size, mut facts) = (&self.corpus.part, self.block(), Facts::default());
        let count = (part.end - part.start).div_ceil(size);
        let wanted = count.min((self.options.tokens / size).max(1));
        // Blocks that a time limit may cut off are read in an order whose beginning is an even sample too.
        let step = if self.limit.is_some() { golden_step(wanted) } else { 1 };
        let place = |k: u64| (u128::from(k) * u128::from(step) % u128::from(wanted.max(1))) as u64;
        let read = |k: u64| -> Result<Read<T>> {
            let start = part.start + spread(place(k), wanted, count) * size;
            self.read_block(start..part.end.min(start + size), &each)
        };
        let tasks = 2 * rayon::current_num_threads() as u64;
        let mut at = 0;
        while at < wanted && self.limit.is_none_or(|limit| Instant::now() < limit) {
            let end = wanted.min(at + tasks);
            let made: Vec<Result<Read<T>>> = (at..end).into_par_iter().map(read).collect();
            for block in made {
                self.fold(block?, &mut facts, &mut fold);
            }
            at = end;
        }
        facts.same.close(least_same(self.corpus));
        Ok(facts)
    }

    fn read_block<T>(&self, range: Range<u64>, each: &impl Fn(&Block) -> T) -> Result<Read<T>> {
        if self.options.interrupt.is_requested() {
            return Err(Error::Interrupted);
        }
        let (mut bytes, mut ids) = self.buffers.take();
        let behind = self.corpus.part.end.min(range.end + self.margin);
        let own = (range.end - range.start) as usize;
        if let Err(e) = self.corpus.tokens.read(range.start..behind, &mut bytes) {
            return if is_fatal(&e) { Err(e) } else { Ok(Read::Failed(range.start, e.to_string())) };
        }
        ids.reserve(bytes.len() / 4);
        for b in bytes.chunks_exact(4) {
            ids.push(u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        }
        let block = Block { start: range.start, ids, own };
        let owned = block.ids.get(..own).unwrap_or_default();
        let mut ids = (u32::MAX, 0);
        for id in owned {
            ids = (ids.0.min(*id), ids.1.max(*id));
        }
        let outside = self.outside(&range, owned, ids.1);
        let (mut same, mut at, least) = (Vec::new(), 0usize, least_same(self.corpus));
        for run in owned.chunk_by(|a, b| a == b) {
            let edge = at == 0 || at + run.len() == own;
            if let Some(id) = run.first().filter(|_| edge || run.len() as u64 >= least) {
                same.push((range.start + at as u64, run.len() as u64, *id));
            }
            at += run.len();
        }
        let made = each(&block);
        self.buffers.give((bytes, block.ids));
        Ok(Read::Done(Found { start: range.start, read: own as u64, ids, outside, same, made }))
    }

    /// Finds the tokens of a block that are no ids of the vocabulary.
    fn outside(&self, range: &Range<u64>, ids: &[u32], most: u32) -> Rows {
        let mut rows = Rows::default();
        for (part, of_file) in self.corpus.tokens.vocabularies(range.clone()) {
            let Some(limit) = of_file.into_iter().chain(self.corpus.vocabulary).min() else { continue };
            if u64::from(most) < limit {
                continue;
            }
            let own = ids.get((part.start - range.start) as usize..(part.end - range.start) as usize);
            (part.start..)
                .zip(own.unwrap_or_default())
                .filter(|t| u64::from(*t.1) >= limit)
                .for_each(|t| rows.add(t.0));
        }
        rows
    }

    fn fold<T>(&self, block: Read<T>, facts: &mut Facts, fold: &mut impl FnMut(u64, T)) {
        match block {
            Read::Failed(start, text) => {
                facts.unreadable.add(start);
                facts.error.get_or_insert(text);
            }
            Read::Done(found) => {
                facts.read += found.read;
                let (low, high) = facts.ids.unwrap_or(found.ids);
                facts.ids = Some((low.min(found.ids.0), high.max(found.ids.1)));
                facts.outside.merge(found.outside);
                found.same.into_iter().for_each(|run| facts.same.add(run, least_same(self.corpus)));
                fold(found.start, found.made);
            }
        }
    }
}

/// A block that was read, or the start of one that could not be, with the error.
enum Read<T> {
    Done(Found<T>),
    Failed(u64, String),
}

struct Found<T> {
    start: u64,
    read: u64,
    ids: (u32, u32),
    outside: Rows,
    same: Vec<(u64, u64, u32)>,
    made: T,
}

/// Returns a step that is coprime to `n` and near its golden section: its multiples modulo `n` fill the range evenly.
fn golden_step(n: u64) -> u64 {
    let gcd = |mut a: u64, mut b: u64| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    let first = (n as f64 * 0.618) as u64;
    (first.max(1)..=n.max(1)).find(|step| gcd(*step, n) == 1).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_has_one_place_in_the_order() {
        for n in [1u64, 2, 3, 6, 7, 100, 1024] {
            let step = golden_step(n);
            let places: std::collections::BTreeSet<u64> = (0..n).map(|k| k * step % n).collect();
            assert_eq!(places.len() as u64, n, "{n}");
        }
    }

    #[test]
    fn stretches_of_one_id_are_joined_across_blocks() {
        let mut same = Same::default();
        for run in [(0, 40, 7), (40, 60, 7), (100, 50, 8), (150, 20, 8), (170, 10, 7), (300, 63, 7)] {
            same.add(run, 64);
        }
        same.close(64);
        assert_eq!((same.windows.count, same.windows.rows, same.longest), (2, vec![0, 100], 100));
    }
}
