//! Moves the pieces of a collective by copy engines while other kernels run.
//!
//! A kernel that reads the memory of other GPUs holds its multiprocessors while it waits for the links, and the kernels beside it wait for
//! them. Copy engines need no multiprocessor. So a phase that only moves bytes is a few copies, and one that combines pieces
//! first fetches those of other devices into memory of its own, a part at a time, and then takes the time of that memory alone. A collective
//! that other steps wait for at once has nothing to run beside, and reads the others' memory by its kernel, which takes one pass less.
//!
//! A kernel that combines begins when a block of another kernel ends, which may take as long as the copy before it. So these kernels
//! run on streams of their own, several at a time, and the lane fetches the next part meanwhile.

use super::memory::Call;
use crate::driver::{Address, Device, Event, Lane};
use crate::library::collective::{MOST, Phase};
use perilune_core::error::Result;
use std::sync::Arc;

/// Bytes of a piece from which copy engines move it: for a small one the launch of a copy takes longer than the copy.
const LEAST: usize = 512 << 10;
/// Most bytes that are fetched before they are combined, in two halves.
const FETCHED: usize = 64 << 20;
/// The alignment of what is fetched from each device.
const ALIGN: usize = 256;
/// Kernels that combine at the same time.
const STREAMS: usize = 4;

/// What copy engines use for a collective: memory of the lane.
pub(super) struct Engines {
    pub scratch: Address,
    pub nbytes: usize,
}

/// Queues a copy of bytes of a device in the lane: from an address of its piece or result, to one of this device.
pub(super) type ToFetch<'a> = dyn Fn(usize, Address, Address, usize) -> Result<()> + 'a;

/// The streams that combine what a lane has fetched.
pub(super) struct Combiners {
    streams: [Lane; STREAMS],
    /// The half of the memory that is filled next.
    half: usize,
    /// For each half, when it is filled, and when each stream has read it.
    filled: [Event; 2],
    read: [[Event; STREAMS]; 2],
}

/// A part of what a phase combines: `count` elements from `begin` on.
pub(super) struct Fetch<'a> {
    pub call: &'a Call,
    pub phase: &'a Phase,
    /// Where the phase finds the piece of each device, and the result of this one.
    pub bases: [u64; MOST],
    pub result: Address,
    begin: usize,
    count: usize,
}

/// The elements that a phase combines, if copy engines fetch the others' pieces for it.
fn combined(call: &Call, phase: &Phase) -> Option<usize> {
    phase.combined().filter(|n| n * call.sizes[0] >= LEAST)
}

/// The bytes of memory that a collective of `ranks` devices takes for pieces of others.
pub(super) fn fetched(calls: &[Call], ranks: usize) -> usize {
    let of = |call: &Call| {
        let n = call.phases.first().and_then(|phase| combined(call, phase)).unwrap_or(0);
        (n * call.sizes[0]).next_multiple_of(ALIGN) * ranks.saturating_sub(1)
    };
    calls.iter().map(of).fold(0, usize::saturating_add).saturating_mul(2).min(FETCHED)
}

impl Engines {
    /// Queues a phase that only moves bytes, if copy engines serve it. `at`: this device's coordinate, and how many there are. `bases`:
    /// where the phase finds the piece or result of each device. `result`: that of this device.
    pub fn moves(
        &self,
        phase: &Phase,
        [own, ranks]: [usize; 2],
        bases: &[u64; MOST],
        result: Address,
        fetch: &ToFetch,
    ) -> Result<bool> {
        let Some(spans) = phase.spans(own, ranks) else { return Ok(false) };
        let is_served = spans.iter().any(|span| span.nbytes >= LEAST);
        for span in spans.iter().filter(|_| is_served) {
            let (from, to) = (bases[span.rank] + span.from as u64, result + span.to as u64);
            if from != to {
                fetch(span.rank, from, to, span.nbytes)?;
            }
        }
        Ok(is_served)
    }

    /// The parts of a phase that combines pieces, if copy engines fetch them.
    pub fn parts<'a>(
        &self,
        call: &'a Call,
        phase: &'a Phase,
        ranks: usize,
        bases: [u64; MOST],
        result: Address,
    ) -> Vec<Fetch<'a>> {
        let Some(n) = combined(call, phase).filter(|_| ranks > 1) else { return Vec::new() };
        let most = self.half() / (ranks - 1) / ALIGN * ALIGN / call.sizes[0];
        if most == 0 {
            return Vec::new();
        }
        let part = |begin| Fetch { call, phase, bases, result, begin, count: most.min(n - begin) };
        (0..n).step_by(most).map(part).collect()
    }

    /// The bytes of half of the memory.
    fn half(&self) -> usize {
        self.nbytes / 2 / ALIGN * ALIGN
    }
}

impl Fetch<'_> {
    /// Bytes of the elements of a device.
    fn nbytes(&self) -> usize {
        self.count * self.call.sizes[0]
    }

    /// Bytes that are fetched from `others` devices.
    fn taken(&self, others: usize) -> usize {
        self.nbytes().next_multiple_of(ALIGN) * others
    }

    /// Where the elements of a device are.
    fn place(&self, rank: usize) -> u64 {
        self.bases[rank] + (self.phase.first + rank * self.phase.step + self.begin * self.call.sizes[0]) as u64
    }
}

impl Combiners {
    pub fn new(device: &Arc<Device>) -> Result<Combiners> {
        let event = || Event::untimed(device);
        let read = || Ok([event()?, event()?, event()?, event()?]);
        let stream = || Lane::new(device);
        Ok(Combiners {
            streams: [stream()?, stream()?, stream()?, stream()?],
            half: 0,
            filled: [event()?, event()?],
            read: [read()?, read()?],
        })
    }

    /// Fetches and combines parts, in memory of the lane. What the lane queues afterwards follows. `at`: this device's coordinate, and
    /// how many there are.
    pub fn run(
        &mut self,
        lane: &Lane,
        engines: &Engines,
        [own, ranks]: [usize; 2],
        parts: &[Fetch],
        fetch: &ToFetch,
    ) -> Result<()> {
        let mut rest = parts;
        while !rest.is_empty() {
            let (group, others) = rest.split_at(fitting(rest, ranks - 1, engines.half()));
            (rest, self.half) = (others, self.half ^ 1);
            let (filled, read) = (&self.filled[self.half], &self.read[self.half]);
            read.iter().try_for_each(|read| lane.wait_for(read))?;
            let mut slot = engines.scratch + (self.half * engines.half()) as u64;
            let mut pieces = vec![[0; MOST]; group.len()];
            for (part, pieces) in group.iter().zip(&mut pieces) {
                pieces[own] = part.place(own);
                for k in 1..ranks {
                    let rank = (own + k) % ranks;
                    fetch(rank, part.place(rank), slot, part.nbytes())?;
                    pieces[rank] = slot;
                    slot += part.taken(1) as u64;
                }
            }
            lane.record(filled)?;
            let used = group.len().min(STREAMS);
            self.streams[..used].iter().try_for_each(|stream| stream.wait_for(filled))?;
            for (k, (part, pieces)) in group.iter().zip(pieces).enumerate() {
                let out = part.result + (part.phase.out + part.begin * part.call.sizes[1]) as u64;
                part.call.launch(&self.streams[k % STREAMS], &part.phase.of(part.count), [own, ranks], pieces, out)?;
            }
            self.streams[..used].iter().zip(read).try_for_each(|(stream, read)| stream.record(read))?;
        }
        self.read.iter().flatten().try_for_each(|read| lane.wait_for(read))
    }
}

/// How many parts have room together; one at least.
fn fitting(parts: &[Fetch], others: usize, room: usize) -> usize {
    let mut taken = 0usize;
    let fits = |part: &&Fetch| {
        taken += part.taken(others);
        taken <= room
    };
    parts.iter().take_while(fits).count().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::library::collective::{Span, Task};

    fn phase(task: Task, [first, step, out]: [usize; 3]) -> Phase {
        Phase { function: 0, task, reads_results: false, first, step, out, grid: [1; 3] }
    }

    fn call(n: usize) -> Call {
        let all = phase(Task::Reduce { n, len: n, row: n }, [0; 3]);
        Call { phases: vec![all], entries: Vec::new(), sizes: [2, 4], in_place: false }
    }

    #[test]
    fn what_is_fetched_fits_and_is_bounded() {
        assert_eq!(fetched(&[call(LEAST / 2 - 1)], 2), 0, "too little");
        assert_eq!(fetched(&[call(LEAST / 2), call(LEAST)], 2), 2 * 3 * LEAST, "together, in each half");
        assert_eq!(fetched(&[call(LEAST)], 4), 2 * 6 * LEAST);
        assert_eq!(fetched(&[call(LEAST)], 1), 0, "a device alone");
        assert_eq!(fetched(&[call(FETCHED)], 2), FETCHED);
    }

    #[test]
    fn parts_cover_a_phase_and_fit_in_half_of_the_memory() {
        let (engines, ranks) = (Engines { scratch: 0, nbytes: 2 * LEAST }, 3);
        let (small, large) = (call(LEAST / 2), call(LEAST + 1));
        fn parts<'a>(engines: &Engines, call: &'a Call) -> Vec<Fetch<'a>> {
            engines.parts(call, &call.phases[0], 3, [1 << 30; MOST], 0)
        }
        let covered = parts(&engines, &large).iter().map(|part| (part.begin, part.count)).collect::<Vec<_>>();
        let each = LEAST / 2 / 2;
        assert_eq!(covered, [(0, each), (each, each), (2 * each, each), (3 * each, each), (4 * each, 1)]);
        assert_eq!(parts(&engines, &large)[1].place(2), (1 << 30) + 2 * each as u64);
        let all: Vec<Fetch> = parts(&engines, &small).into_iter().chain(parts(&engines, &large)).collect();
        assert_eq!(fitting(&all, ranks - 1, engines.half()), 1);
        assert_eq!(fitting(&all[all.len() - 1..], ranks - 1, 1), 1, "one at least");
        assert_eq!(fitting(&all, ranks - 1, 4 * engines.half()), 4);
    }

    #[test]
    fn rows_are_combined_by_the_kernel_alone() {
        let rows =
            Phase { task: Task::Reduce { n: 64, len: 4, row: 8 }, ..phase(Task::Span { total: 0, from: 0 }, [0; 3]) };
        assert_eq!(rows.combined(), None);
        assert_eq!(rows.spans(0, 2), None);
        assert_eq!(call(64).phases[0].combined(), Some(64));
    }

    #[test]
    fn spans_are_the_parts_of_a_result() {
        let span = |rank, from, to, nbytes| Span { rank, from, to, nbytes };
        let gather = phase(Task::Spans { total: 25, step: 10, others: false }, [0; 3]);
        assert_eq!(gather.spans(1, 3).unwrap(), [span(2, 0, 20, 5), span(0, 0, 0, 10), span(1, 0, 10, 10)]);
        let others = phase(Task::Spans { total: 15, step: 10, others: true }, [0, 10, 0]);
        assert_eq!(others.spans(0, 3).unwrap(), [span(1, 10, 10, 5)], "the last has nothing");
        let one = phase(Task::Span { total: 7, from: 2 }, [0; 3]);
        assert_eq!(one.spans(0, 3).unwrap(), [span(2, 0, 0, 7)]);
    }
}
