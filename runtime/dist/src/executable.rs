//! Runs a program on all devices of a mesh at once.

use crate::backend::Shared;
use crate::buffer::MeshBuffer;
use crate::exchange::Rank;
use perilune_core::Interrupt;
use perilune_core::error::{Error, Kind, Result};
use perilune_core::mesh::Axis;
use perilune_plan::ir::{Origin, Program};
use perilune_plan::{Buffer, Executable, Failure, RunContext};
use rustc_hash::FxHasher;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// A program, compiled for each device.
pub struct MeshExecutable {
    pub(crate) shared: Arc<Shared>,
    pub(crate) program: Arc<Program>,
    /// Those of the devices that this process drives.
    pub(crate) devices: Arc<[Box<dyn Executable>]>,
    /// For each device what stands for the buffers that its stages do not use; empty without stages.
    pub(crate) unused: Arc<[Buffer]>,
    /// Identifies the program among processes; 0 with one process.
    pub(crate) signature: u64,
}

/// The operands of one run, shared by the threads of all devices.
struct Operands {
    inputs: Vec<Buffer>,
    /// The run-time numbers of the recording; those of a device are added to them.
    recorded: Vec<u64>,
    outputs: Vec<Buffer>,
    interrupt: Interrupt,
    timed: bool,
    /// See [`MeshExecutable::identity`].
    identity: u64,
}

type Outcome = std::result::Result<[Vec<f64>; 2], Failure>;

/// Which of the outcomes of a failed run is the cause of the others: that of the device that failed first, unless this one has stopped
/// for a mistake that another one reports.
fn cause(results: &[Outcome], first: usize) -> usize {
    let is = |k: Kind| move |outcome: &Outcome| matches!(outcome, Err(failure) if failure.error.kind == k);
    match results.get(first) {
        Some(outcome) if is(Kind::Elsewhere)(outcome) => results.iter().position(is(Kind::Argument)).unwrap_or(first),
        _ => first,
    }
}

impl MeshExecutable {
    /// Identifies a run among processes: its program, and the numbers of the recording, which are the same in all of them.
    fn identity(&self, recorded: &[u64]) -> u64 {
        if self.signature == 0 {
            return 0;
        }
        let mut hash = FxHasher::default();
        (self.signature, recorded).hash(&mut hash);
        hash.finish().max(1)
    }

    /// Runs the program as the `k`-th device of this process. Returns the seconds of its kernels, if they are timed, and those
    /// of collectives beside others.
    fn run_device(&self, k: usize, run: u64, operands: &Operands) -> Outcome {
        let fail = |error| Failure { origin: Origin::NONE, error };
        let Shared { mesh, ranks, backends, exchange, .. } = &*self.shared;
        let rank = ranks[k];
        let part = |b: &Buffer| MeshBuffer::of(b, mesh)?.part(rank, &*backends[k]);
        let at = mesh.coordinates(rank);
        let stage = self.program.stages.get(at[Axis::Pp as usize]);
        let parts = |all: &[Buffer]| all.iter().map(part).collect::<Result<Vec<_>>>();
        let (inputs, outputs) = match stage {
            None => (parts(&operands.inputs).map_err(fail)?, parts(&operands.outputs).map_err(fail)?),
            Some(stage) => {
                // A device makes no part of what its stage neither reads nor writes.
                let input = |(i, b)| if stage.uses[i] { part(b) } else { Ok(self.unused[k].clone()) };
                let inputs = operands.inputs.iter().enumerate().map(input).collect::<Result<Vec<_>>>();
                let own = stage.outputs.iter().map(|o| part(&operands.outputs[*o as usize]));
                (inputs.map_err(fail)?, own.collect::<Result<Vec<_>>>().map_err(fail)?)
            }
        };
        let numbers = self.program.numbers(&operands.recorded, &at);
        let peers = Rank::new(exchange.clone(), run, rank).of_program(operands.identity).in_stages(stage.is_some());
        let kernels = stage.map_or(self.program.kernels.len(), |stage| stage.program.kernels.len());
        let zeros = vec![0.0; if operands.timed { kernels } else { 0 }];
        let (mut times, mut hidden) = (zeros.clone(), zeros);
        let context = RunContext {
            interrupt: &operands.interrupt,
            times: operands.timed.then_some(&mut times),
            hidden: operands.timed.then_some(&mut hidden),
            peers: Some(&peers),
        };
        self.devices[k].run(&inputs, &numbers, &outputs, context)?;
        if stage.is_some() {
            peers.end().map_err(fail)?;
        }
        Ok([times, hidden])
    }
}

impl Executable for MeshExecutable {
    /// `slots`: the run-time numbers of the first device.
    fn run(
        &self,
        inputs: &[Buffer],
        slots: &[u64],
        outputs: &[Buffer],
        context: RunContext<'_>,
    ) -> std::result::Result<(), Failure> {
        let run = self.shared.next_run();
        let recorded = slots.len().saturating_sub(self.program.starts.len());
        let operands = Arc::new(Operands {
            inputs: inputs.to_vec(),
            recorded: slots[..recorded].to_vec(),
            outputs: outputs.to_vec(),
            interrupt: context.interrupt.clone(),
            timed: context.times.is_some(),
            identity: self.identity(&slots[..recorded]),
        });
        let exchange = self.shared.exchange.clone();
        let own = MeshExecutable {
            shared: self.shared.clone(),
            program: self.program.clone(),
            devices: self.devices.clone(),
            unused: self.unused.clone(),
            signature: self.signature,
        };
        let own = Arc::new(own);
        let on_panic = self.shared.clone();
        let results = self.shared.workers.on_all(
            move |k| on_panic.exchange.fail(run, on_panic.ranks[k]),
            move |k| {
                let outcome = own.run_device(k, run, &operands);
                if outcome.is_err() {
                    own.shared.exchange.fail(run, own.shared.ranks[k]);
                }
                outcome
            },
        );
        let failed = exchange.failed(run);
        exchange.end(run);
        let mut results = results.map_err(|error| Failure { origin: Origin::NONE, error })?;
        if failed.is_some() || results.iter().any(Outcome::is_err) {
            // The failure of this run is about to be reported, for all devices.
            self.shared.backends.iter().for_each(|backend| backend.cut_off(None));
        }
        if let Some(rank) = failed {
            // It is a device of this process.
            let first = self.shared.ranks.binary_search(&rank).unwrap_or_default();
            return match results.swap_remove(cause(&results, first)) {
                Err(failure) => Err(failure),
                Ok(_) => Err(Failure {
                    origin: Origin::NONE,
                    error: Error::system("mesh", format!("this is a bug: device {rank} failed without an error")),
                }),
            };
        }
        let Shared { mesh, ranks, .. } = &*self.shared;
        for (which, sums) in [context.times, context.hidden].into_iter().enumerate() {
            let Some(mut sums) = sums else { continue };
            let mut add = |count: usize, own: Option<&Outcome>| {
                let (first, rest) = std::mem::take(&mut sums).split_at_mut(count);
                if let Some(Ok(own)) = own {
                    first.iter_mut().zip(&own[which]).for_each(|(sum, seconds)| *sum += seconds);
                }
                sums = rest;
            };
            if self.program.stages.is_empty() {
                add(self.program.kernels.len(), results.first());
            }
            // The kernels of the program are those of the devices along pp, one after the other; one of each is in the sum, if this
            // process drives it.
            for (k, stage) in self.program.stages.iter().enumerate() {
                let first = ranks.iter().position(|rank| mesh.coordinates(*rank)[Axis::Pp as usize] == k);
                add(stage.program.kernels.len(), first.and_then(|first| results.get(first)));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_of_a_failed_run_is_not_a_device_that_stopped_for_another_one() {
        let failed = |kind| Err(Failure { origin: Origin::NONE, error: Error::new(kind, "", "") });
        let results =
            || vec![Ok(Default::default()), failed(Kind::Elsewhere), failed(Kind::System), failed(Kind::Argument)];
        assert_eq!([1, 2, 3].map(|first| cause(&results(), first)), [3, 2, 3]);
        assert_eq!(cause(&results()[..3], 1), 1, "another process reports it");
    }
}
