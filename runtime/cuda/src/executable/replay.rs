//! Replays a program as a CUDA graph: binds its operands to places, and keeps the graphs captured so far.
//!
//! A captured graph contains the addresses of its operands. States and the arena stay where they are, but a batch and the
//! results of a step may lie elsewhere in every run. A program whose operands come back to a few sets of addresses has a
//! graph for each. If there are more, the small operands that moved are *staged*: graphs use a buffer of the program's own in
//! the place of each, and a copy before or after the graph carries its contents. Only large operands still add graphs then.

use crate::backend::DeviceContext;
use crate::driver::{Address, Allocation, Replay};
use perilune_core::error::Result;
use std::collections::VecDeque;

/// Maximum bytes of one staged operand. Copying 4 MiB takes about 4 µs on an H100.
pub const STAGED_BYTES: usize = 4 << 20;
/// Maximum bytes of all staged operands of a program.
const ALL_STAGED: usize = 32 << 20;
/// Sets of addresses after which operands are staged. A copy delays the next graph, so a few graphs are better.
const SETS: usize = 8;
/// Maximum captured graphs of a program.
const GRAPHS: usize = 64;

/// Decides which operands of a program are staged.
#[derive(Default)]
pub(super) struct Moves {
    /// Addresses of the operands in the last run; empty before the first.
    last: Vec<Address>,
    /// The operands that have moved between two runs.
    moved: Vec<bool>,
    /// Bytes of operands chosen so far.
    bytes: usize,
}

impl Moves {
    /// Notes where the operands are in this run.
    pub fn note(&mut self, operands: &[Address]) {
        self.moved.resize(operands.len(), false);
        for ((now, last), moved) in operands.iter().zip(&self.last).zip(&mut self.moved) {
            *moved |= now != last;
        }
        self.last.clear();
        self.last.extend_from_slice(operands);
    }

    /// Returns the operands that have moved and are to be staged from now on. `bytes(k)`: the size of operand `k`, or `None`
    /// if it has to stay or is staged already.
    pub fn choose(&mut self, bytes: impl Fn(usize) -> Option<usize>) -> Vec<usize> {
        let mut chosen = Vec::new();
        for k in (0..self.moved.len()).filter(|k| self.moved[*k]) {
            let fits = |n: &usize| *n <= STAGED_BYTES && self.bytes + n <= ALL_STAGED;
            if let Some(n) = bytes(k).filter(fits) {
                self.bytes += n;
                chosen.push(k);
            }
        }
        chosen
    }
}

/// An operand of a program: an input or output buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operand {
    pub nbytes: usize,
    /// Whether the program writes it although it is an input: a State, which is never staged.
    pub is_state: bool,
    pub is_output: bool,
}

/// The graphs of a program at some places, in the order of its parts between collectives; empty before the first replay.
pub(super) type Captured = Vec<Replay>;

/// The graphs of a program.
#[derive(Default)]
pub(super) struct Graphs {
    moves: Moves,
    /// The buffer of each staged operand, by operand; shorter than their list.
    staged: Vec<Option<Allocation>>,
    /// Each key with its graph, once it has been seen twice. The most recently used is first.
    captured: VecDeque<(Vec<Address>, Captured)>,
}

impl Graphs {
    /// Notes where the operands are in this run, and stages those that move if there are many sets of addresses.
    pub fn observe(&mut self, context: &DeviceContext, operands: &[Operand], at: &[Address]) -> Result<()> {
        self.staged.resize_with(operands.len(), || None);
        self.moves.note(at);
        if self.captured.len() < SETS {
            return Ok(());
        }
        let staged = &self.staged;
        let size = |k: usize| (!operands[k].is_state && staged[k].is_none()).then_some(operands[k].nbytes);
        for k in self.moves.choose(size) {
            self.staged[k] = Some(context.heap.alloc(operands[k].nbytes)?);
            // The graphs captured so far contain the operand's own address.
            self.captured.clear();
        }
        Ok(())
    }

    /// Returns the addresses that a graph uses: those of the staged buffers, and of the operands that are not staged.
    pub fn bound(&self, at: &[Address]) -> Vec<Address> {
        let place = |(k, own): (usize, &Address)| self.staged[k].as_ref().map_or(*own, |buffer| buffer.address);
        at.iter().enumerate().map(place).collect()
    }

    /// Returns whether a program ran at these places before, in a run that `remember` noted.
    pub fn is_known(&self, places: &[Address]) -> bool {
        self.captured.iter().any(|(key, _)| key == places)
    }

    /// Notes the places of a run that was not replayed.
    pub fn remember(&mut self, places: Vec<Address>) {
        if !self.is_known(&places) {
            self.captured.push_front((places, Vec::new()));
            self.captured.truncate(GRAPHS);
        }
    }

    /// Replays the graphs for `places`, which are known. `launch` launches them, and captures them first if there are none. `at`: where
    /// the operands are.
    pub fn replay(
        &mut self,
        context: &DeviceContext,
        operands: &[Operand],
        at: &[Address],
        places: &[Address],
        launch: impl FnOnce(&mut Captured) -> Result<()>,
    ) -> Result<()> {
        let Some(found) = self.captured.iter().position(|(key, _)| key == places) else { return Ok(()) };
        let Some((key, mut graphs)) = self.captured.remove(found) else { return Ok(()) };
        let done = self.copy(context, operands, at, false).and_then(|()| launch(&mut graphs));
        self.captured.push_front((key, graphs));
        done?;
        self.copy(context, operands, at, true)
    }

    /// Queues the copies of staged inputs into their buffers, or of staged outputs out of them.
    fn copy(&self, context: &DeviceContext, operands: &[Operand], at: &[Address], outputs: bool) -> Result<()> {
        for ((operand, own), staged) in operands.iter().zip(at).zip(&self.staged) {
            if let Some(buffer) = staged
                && operand.is_output == outputs
                && operand.nbytes > 0
            {
                let (from, to) = if outputs { (buffer.address, *own) } else { (*own, buffer.address) };
                context.device.copy(from, to, operand.nbytes)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATE: Operand = Operand { nbytes: 64, is_state: true, is_output: false };

    /// Notes the addresses of consecutive runs; returns which operands are staged then.
    fn staged(operands: &[Operand], runs: &[&[Address]]) -> Vec<usize> {
        let mut moves = Moves::default();
        runs.iter().for_each(|at| moves.note(at));
        moves.choose(|k| (!operands[k].is_state).then_some(operands[k].nbytes))
    }

    #[test]
    fn only_small_operands_that_move_are_staged() {
        let batch = Operand { nbytes: 1 << 20, is_state: false, is_output: false };
        let large = Operand { nbytes: STAGED_BYTES + 1, ..batch };
        let loss = Operand { nbytes: 4, is_state: false, is_output: true };
        let operands = [STATE, batch, large, loss, batch];
        assert_eq!(staged(&operands, &[&[1, 2, 3, 4, 5]]), [0usize; 0], "one run");
        assert_eq!(staged(&operands, &[&[1, 2, 3, 4, 5], &[1, 2, 3, 4, 5]]), [0usize; 0], "nothing moved");
        assert_eq!(
            staged(&operands, &[&[1, 2, 3, 4, 5], &[9, 8, 7, 6, 5]]),
            [1, 3],
            "a State, a large one, one at rest"
        );
        assert_eq!(staged(&operands, &[&[1, 2, 3, 4, 5], &[1, 9, 3, 4, 5], &[1, 9, 3, 8, 5]]), [1, 3], "one by one");
    }

    #[test]
    fn staged_bytes_are_bounded() {
        let operands = vec![Operand { nbytes: STAGED_BYTES, is_state: false, is_output: false }; 20];
        let (before, after) = ((1..=20).collect::<Vec<_>>(), (101..=120).collect::<Vec<_>>());
        assert_eq!(staged(&operands, &[&before, &after]).len(), ALL_STAGED / STAGED_BYTES);
    }
}
