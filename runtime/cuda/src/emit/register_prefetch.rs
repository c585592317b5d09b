//! Emits prefetches of the next row into registers.
//!
//! A row of 16-bit floats stays packed in registers while an intermediate takes its place in shared memory; the loads of the next row are
//! issued during the last passes, which read only the intermediate. Column sums prefetch their next row in the same way.

use super::emitter::Emitter;
use super::expr;
use super::loop_nest::Indexing;
use crate::launch::Props;
use crate::schedule::reduction_order::{self, BLOCK, CHUNK, OCTET};

/// Registers that a thread needs besides the prefetched row; ptxas needs more from sm_100 on.
const WORK: [usize; 2] = [44, 52];

pub struct RegisterPrefetch {
    load: usize,
    cols: usize,
    teams: usize,
    /// For each chunk of a team, the maximum number of blocks per warp.
    blocks: Vec<usize>,
    /// Packs per block.
    packs: usize,
}

impl RegisterPrefetch {
    /// Plans the prefetch, if the row fits the available registers of a thread.
    pub fn new(
        g: &Emitter,
        props: &Props,
        loads: &[usize],
        cols: usize,
        teams: usize,
        registers: usize,
    ) -> Option<RegisterPrefetch> {
        let work = WORK[usize::from(props.arch.0 >= 10)];
        let load = g.intermediate?.load;
        let of = |j: usize| (cols - j * teams * CHUNK).min(CHUNK).div_ceil(8 * BLOCK);
        let blocks: Vec<usize> = (0..reduction_order::chunks(cols).div_ceil(teams)).map(of).collect();
        let words = blocks.iter().sum::<usize>() * OCTET / 2;
        let fits = loads == [load] && g.dtype(load).is_half() && g.v.is_multiple_of(2) && words + work <= registers;
        fits.then(|| RegisterPrefetch { load, cols, teams, blocks, packs: OCTET / g.v })
    }

    pub fn declare(&self, g: &mut Emitter) {
        let packs = self.blocks.iter().sum::<usize>() * self.packs;
        g.text.line(format!("u32 words{}[{packs}][{}];", self.load, g.v / 2));
    }

    /// Iterates over a team's chunks: `m` is the number of the chunk, and `step` emits the packs of one block.
    pub fn each_chunk(
        &self,
        g: &mut Emitter,
        begin: &dyn Fn(&mut Emitter),
        step: &mut dyn FnMut(&mut Emitter, usize, &Indexing),
        end: &dyn Fn(&mut Emitter),
    ) {
        let (t, mut first) = (g.index_type(), 0);
        for (j, &blocks) in self.blocks.iter().enumerate() {
            let (before, after) = (j * self.teams, (j + 1) * self.teams);
            let whole = after * CHUNK <= self.cols;
            let chunks = reduction_order::chunks(self.cols);
            g.text.open(if after <= chunks { String::new() } else { format!("if (team < {})", chunks - before) });
            g.text.line(format!("const {t} m = team + {before}, b = m * {CHUNK} + origin;"));
            begin(g);
            g.text.unrolled("c", blocks);
            g.prefetch_slot = Some(format!("{first} + c * {} + k", self.packs));
            let partial = g.ragged() && !whole;
            let decl = g.walked(t, format!("b + c * {} + k * {}", 8 * BLOCK, 32 * g.v), partial);
            let guard = if whole { "true" } else { "at < cols" }.into();
            step(g, self.packs, &Indexing { decl, guard, partial, full: whole, columns: OCTET });
            g.prefetch_slot = None;
            g.text.close();
            end(g);
            g.text.close();
            first += blocks * self.packs;
        }
    }
}

impl Emitter<'_> {
    /// Issues the loads of the packs of `indexing`, of the row that begins at `name`.
    pub fn prefetch_registers(&mut self, packs: usize, indexing: &Indexing, name: &str) {
        let (Some(words), v, t) = (self.prefetch_slot.clone(), self.v, self.index_type()) else { return };
        self.text.unrolled("k", packs);
        for line in &indexing.decl {
            self.text.line(line);
        }
        for &i in &self.staged {
            let (pointer, nc, bytes) = (&self.loads[&i].pointer, self.loads[&i].constant, v * self.dtype(i).size());
            let from = format!("{pointer} + ({name}{i} + ({t})at)");
            self.text.line(format!("if ({}) load_words<{bytes}, {nc}>(words{i}[{words}], {from});", indexing.guard));
        }
        self.text.close();
    }

    /// The words of pack `k` of a staged load, if they are in registers: an argument, and one that determines their
    /// type.
    pub fn words(&self, i: usize) -> Option<String> {
        let type_of = format!("({}*)0", expr::stored(self.dtype(i)));
        self.prefetch_slot.as_ref().map(|at| format!("words{i}[{at}], {type_of}"))
    }

    /// Declares the registers that hold `packs` packs of each of those loads as they come from memory.
    pub fn declare_prefetch(&mut self, loads: &[usize], packs: usize) {
        for &i in loads {
            self.text.line(format!("u32 words{i}[{packs}][{}] = {{}};", self.pack_words(i)));
        }
        self.staged = loads.to_vec();
    }

    /// Issues the loads of the packs of `indexing`, of the row that begins at `name`.
    pub fn prefetch_words(&mut self, packs: usize, indexing: &Indexing, name: &str) {
        let t = self.index_type();
        self.text.unrolled("k", packs);
        for line in &indexing.decl {
            self.text.line(line);
        }
        self.text.open(format!("if ({})", indexing.guard));
        for &i in &self.staged {
            let (pointer, nc, bytes) = (&self.loads[&i].pointer, self.loads[&i].constant, 4 * self.pack_words(i));
            self.text.line(format!("load_words<{bytes}, {nc}>(words{i}[k], {pointer} + ({name}{i} + ({t})at));"));
        }
        self.text.close();
        self.text.close();
    }

    /// Unpacks the prefetched packs into registers. Packs outside the row are zeros.
    pub fn unpack_words_now(&mut self, packs: usize) {
        let v = self.v;
        for &i in &self.staged {
            let (c, s) = (expr::computed(self.dtype(i)), expr::stored(self.dtype(i)));
            self.text.line(format!("{c} r{i}[{}];", packs * v));
            self.text.line("#pragma unroll");
            self.text.line(format!(
                "for (int k = 0; k < {packs}; k++) unpack_words_now<{v}>(r{i} + k * {v}, words{i}[k], ({s}*)0);"
            ));
        }
    }

    fn pack_words(&self, i: usize) -> usize {
        self.v * self.dtype(i).size() / 4
    }
}
