//! Predicts the time of a planned step on GPUs that are not in this machine.
//!
//! A prediction is the makespan of the step's program on one device: kernels run in program order, each for the time of its roofline
//! ([`kernel`]), and each collective for the time of its link ([`link`]), both from one table of rates ([`calibration`]). Two numbers
//! bound a step: the sum, where nothing overlaps, and the makespan with collectives on lanes of their own, one an axis, which start
//! when what they send is complete. Nothing is measured here; a prediction is as good as the table.

mod calibration;
mod kernel;
mod link;

pub use calibration::Calibration;
pub use kernel::KernelClass;
pub use link::{GPUS_OF_A_HOST, Link, Machine};

use crate::cache::PlannedStep;
use crate::ir::{Program, ValueId};
use crate::transfers::{Transfer, transfers};
use perilune_core::mesh::Axis;
use rustc_hash::FxHashMap;

/// A collective with its time.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sent {
    pub transfer: Transfer,
    pub link: Link,
    pub seconds: f64,
    /// For how long kernels wait for it if it overlaps with those before.
    pub waited: f64,
}

/// The predicted time of a step on each device.
#[derive(Clone, Debug, Default)]
pub struct Prediction {
    /// Seconds of kernels by class, collectives included.
    pub classes: Vec<(KernelClass, f64)>,
    pub kernels: usize,
    /// Operations of matrix products, attention and convolutions.
    pub flops: f64,
    pub sent: Vec<Sent>,
    /// Seconds of a step if nothing overlaps.
    pub serial: f64,
    /// Seconds of a step whose collectives run beside kernels.
    pub overlapped: f64,
}

impl Prediction {
    /// Seconds of all collectives.
    pub fn sending(&self) -> f64 {
        self.sent.iter().map(|s| s.seconds).sum()
    }

    /// The part of the time of collectives that kernels hide if they overlap; 1 without collectives.
    pub fn hidden(&self) -> f64 {
        let all = self.sending();
        if all > 0.0 { ((self.serial - self.overlapped) / all).clamp(0.0, 1.0) } else { 1.0 }
    }
}

/// Predicts a step. The program is that of each device of the machine's mesh.
pub fn predict(step: &PlannedStep, machine: &Machine) -> Prediction {
    let program = &*step.program;
    let mut out = Prediction { kernels: program.kernels.len(), ..Prediction::default() };
    let mut classes: FxHashMap<KernelClass, f64> = FxHashMap::default();
    let mut all = transfers(step).into_iter();
    let mut times = Vec::with_capacity(program.kernels.len());
    for kernel in &program.kernels {
        let class = KernelClass::of(kernel);
        let (seconds, axis) = match (class, all.as_slice().first().copied()) {
            (KernelClass::Collective, Some(mut transfer)) => {
                all.next();
                // All tensors of the call cross the link as one.
                while let Some(more) = all.as_slice().first().copied().filter(|more| more.call == transfer.call) {
                    transfer.bytes += more.bytes;
                    all.next();
                }
                let seconds = machine.collective(transfer.op, transfer.axis, transfer.bytes);
                let link = machine.link(transfer.axis);
                out.sent.push(Sent { transfer, link, seconds, waited: 0.0 });
                (seconds, Some(transfer.axis))
            }
            _ => (kernel::seconds(machine.rates, program, kernel), None),
        };
        if matches!(class, KernelClass::Product | KernelClass::Attention | KernelClass::Convolution) {
            out.flops += crate::show::cost(program, kernel).flops as f64;
        }
        *classes.entry(class).or_default() += seconds;
        out.serial += seconds;
        times.push((seconds, axis));
    }
    out.classes = KernelClass::ALL.into_iter().filter_map(|c| Some((c, *classes.get(&c)?))).collect();
    out.overlapped = makespan(program, &times, &mut out.sent);
    out
}

/// Schedules kernels in program order on one lane and collectives on one lane for each axis, and notes who waits for whom.
fn makespan(program: &Program, times: &[(f64, Option<Axis>)], sent: &mut [Sent]) -> f64 {
    // For each value, when it is complete and the collective that made it.
    let mut ready: FxHashMap<ValueId, (f64, Option<usize>)> = FxHashMap::default();
    let (mut compute, mut lanes, mut number) = (0.0f64, [(0.0f64, 0); Axis::ALL.len()], 0);
    for (kernel, (seconds, axis)) in program.kernels.iter().zip(times) {
        let reads = kernel.reads();
        let last = reads.iter().filter_map(|v| ready.get(v)).max_by(|a, b| a.0.total_cmp(&b.0)).copied();
        let (complete, cause) = last.unwrap_or((0.0, None));
        let (end, own) = match axis {
            Some(axis) => {
                let lane = &mut lanes[*axis as usize];
                *lane = (lane.0.max(complete) + seconds, number);
                number += 1;
                (lane.0, Some(lane.1))
            }
            None => {
                if let Some(by) = cause.filter(|_| complete > compute) {
                    sent[by].waited += complete - compute;
                }
                compute = compute.max(complete) + seconds;
                (compute, None)
            }
        };
        for v in kernel.writes() {
            ready.insert(v, (end, own));
        }
    }
    let last = lanes.into_iter().max_by(|a, b| a.0.total_cmp(&b.0));
    match last.filter(|(end, _)| *end > compute) {
        Some((end, by)) => {
            sent[by].waited += end - compute;
            end
        }
        None => compute,
    }
}
