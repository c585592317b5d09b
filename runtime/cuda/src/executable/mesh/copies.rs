//! Moves the pieces of a collective by copy engines while other kernels run.
//!
//! A kernel that reads the memory of other GPUs holds its multiprocessors while it waits for the links, and the kernels beside it wait for
//! them. Copy engines need no multiprocessor. So a phase that only moves bytes is a few copies, and one that combines pieces
//! first fetches those of other devices into memory of its own, a part at a time, and then takes the time of that memory alone. A collective
//! that other steps wait for at once has nothing to run beside, and reads the others' memory by its kernel, which takes one pass less.

use super::memory::Call;
use crate::driver::{Address, Lane};
use crate::library::collective::{MOST, Phase};
use perilune_core::error::Result;

/// Bytes of a piece from which copy engines move it: for a small one the launch of a copy takes longer than the copy.
const LEAST: usize = 512 << 10;
/// Most bytes that are fetched at once.
const FETCHED: usize = 32 << 20;
/// The alignment of what is fetched from each device.
const ALIGN: usize = 256;

/// What copy engines use for a collective.
pub(super) struct Engines {
    /// Memory of the lane, and its bytes.
    pub scratch: Address,
    pub nbytes: usize,
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
    calls.iter().map(of).max().unwrap_or(0).min(FETCHED)
}

impl Engines {
    /// Queues a phase, if copy engines serve it. `at`: this device's coordinate, and how many there are. `bases`: where the phase finds the
    /// piece or result of each device. `result`: that of this device.
    pub fn run(
        &self,
        lane: &Lane,
        call: &Call,
        phase: &Phase,
        at: [usize; 2],
        bases: &[u64; MOST],
        result: Address,
    ) -> Result<bool> {
        let [own, ranks] = at;
        if let Some(spans) = phase.spans(own, ranks) {
            let is_served = spans.iter().any(|span| span.nbytes >= LEAST);
            for span in spans.iter().filter(|_| is_served) {
                let (from, to) = (bases[span.rank] + span.from as u64, result + span.to as u64);
                if from != to {
                    lane.copy(from, to, span.nbytes)?;
                }
            }
            return Ok(is_served);
        }
        let Some(n) = combined(call, phase) else { return Ok(false) };
        let [size, result_size] = call.sizes;
        let room = self.nbytes / ranks.saturating_sub(1).max(1) / ALIGN * ALIGN;
        let most = room / size;
        if ranks < 2 || most == 0 {
            return Ok(false);
        }
        for begin in (0..n).step_by(most) {
            let count = most.min(n - begin);
            let place = |rank: usize| bases[rank] + (phase.first + rank * phase.step + begin * size) as u64;
            let mut pieces = [0; MOST];
            pieces[own] = place(own);
            for k in 1..ranks {
                let (rank, slot) = ((own + k) % ranks, self.scratch + ((k - 1) * room) as u64);
                lane.copy(place(rank), slot, count * size)?;
                pieces[rank] = slot;
            }
            call.launch(lane, &phase.of(count), at, pieces, result + (phase.out + begin * result_size) as u64)?;
        }
        Ok(true)
    }
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
        Call { phases: vec![all], entries: Vec::new(), sizes: [2, 4] }
    }

    #[test]
    fn what_is_fetched_fits_and_is_bounded() {
        assert_eq!(fetched(&[call(LEAST / 2 - 1)], 2), 0, "too little");
        assert_eq!(fetched(&[call(LEAST / 2), call(LEAST)], 2), 2 * LEAST);
        assert_eq!(fetched(&[call(LEAST)], 4), 6 * LEAST);
        assert_eq!(fetched(&[call(LEAST)], 1), 0, "a device alone");
        assert_eq!(fetched(&[call(FETCHED)], 2), FETCHED);
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
