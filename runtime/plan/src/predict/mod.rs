//! Predicts the time of a planned step on GPUs that are not in this machine.
//!
//! A prediction is the makespan of the step's program on one device: kernels run in program order, each for the time of its roofline
//! ([`kernel`]), and each collective for the time of its link ([`link`]), both from one table of rates ([`calibration`]). Two numbers
//! bound a step: the time where nothing overlaps, and the makespan with collectives on lanes of their own, one an axis, which start
//! when what they send is complete. With pipeline stages the programs of the devices along `pp` run together ([`timeline`]), in the
//! order that the schedule gave them, and wait for each other's messages. Nothing is measured here; a prediction is as good as the table.

mod calibration;
mod kernel;
mod link;
mod timeline;

pub use calibration::Calibration;
pub use kernel::KernelClass;
pub use link::{GPUS_OF_A_HOST, Link, Machine};

use crate::cache::PlannedStep;
use crate::ir::Kernel;
use crate::lanes;
use crate::transfers::{Transfer, transfers};
use perilune_core::ops::collective;
use rustc_hash::FxHashMap;
use timeline::{Event, Task};

/// A collective with its time.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sent {
    pub transfer: Transfer,
    pub link: Link,
    pub seconds: f64,
    /// For how long kernels wait for it if it overlaps with those before.
    pub waited: f64,
}

/// A device along `pp` in a step.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct DeviceTime {
    /// Seconds of its kernels and of what it sends.
    pub busy: f64,
    /// Bytes that it sends.
    pub sent: usize,
    /// Bytes of intermediate values, among them the activations of all micro-batches in flight.
    pub arena: usize,
}

/// The predicted time of a step on each device.
#[derive(Clone, Debug, Default)]
pub struct Prediction {
    /// Seconds of kernels by class, collectives included; with pipeline stages the mean of the devices along `pp`.
    pub classes: Vec<(KernelClass, f64)>,
    pub kernels: usize,
    /// Operations of matrix products, attention and convolutions, of all stages.
    pub flops: f64,
    pub sent: Vec<Sent>,
    /// Seconds of a step if nothing overlaps.
    pub serial: f64,
    /// Seconds of a step whose collectives run beside kernels.
    pub overlapped: f64,
    /// The devices along `pp`; empty without pipeline stages.
    pub devices: Vec<DeviceTime>,
}

impl Prediction {
    /// Seconds of all collectives.
    pub fn sending(&self) -> f64 {
        self.sent.iter().map(|s| s.seconds).sum()
    }

    /// The share of the time of devices in which they wait for other stages, if nothing overlaps; `None` without stages.
    pub fn bubble(&self) -> Option<f64> {
        let all = self.serial * self.devices.len() as f64;
        (all > 0.0).then(|| 1.0 - self.devices.iter().map(|d| d.busy).sum::<f64>() / all)
    }

    /// The part of the time of collectives that kernels hide if they overlap; 1 without collectives.
    pub fn hidden(&self) -> f64 {
        let all = self.sending() / self.devices.len().max(1) as f64;
        if all > 0.0 { ((self.serial - self.overlapped) / all).clamp(0.0, 1.0) } else { 1.0 }
    }
}

/// Predicts a step. The program is that of each device of the machine's mesh, or lists those of the devices along `pp`.
pub fn predict(step: &PlannedStep, machine: &Machine) -> Prediction {
    let program = &*step.program;
    let machine = &Machine { route: program.route, ..*machine };
    let mut out = Prediction { kernels: program.kernels.len(), ..Prediction::default() };
    let mut classes: FxHashMap<KernelClass, f64> = FxHashMap::default();
    let mut all = transfers(step).into_iter();
    // The programs of the devices along pp: their numbers of kernels, and bytes of intermediate values.
    let programs: Vec<(usize, usize)> = match &program.stages[..] {
        [] => vec![(program.kernels.len(), program.arena_bytes)],
        stages => stages.iter().map(|s| (s.program.kernels.len(), s.program.arena_bytes)).collect(),
    };
    let mut kernels = program.kernels.iter();
    let mut tasks: Vec<Vec<Task>> = Vec::with_capacity(programs.len());
    // Which collective each task is that sends something.
    let mut numbers: FxHashMap<(usize, usize), usize> = FxHashMap::default();
    let mut sent_bytes = vec![0; programs.len()];
    for (k, (count, _)) in programs.iter().enumerate() {
        let mut own = Vec::with_capacity(*count);
        for kernel in kernels.by_ref().take(*count) {
            let class = KernelClass::of(kernel);
            let event = event(kernel);
            let seconds = match (event, all.as_slice().first().copied()) {
                (Event::Collective(_) | Event::Send { .. }, Some(mut transfer)) => {
                    all.next();
                    // All tensors of the call cross the link as one.
                    while let Some(more) = all.as_slice().first().copied().filter(|more| more.call == transfer.call) {
                        transfer.bytes += more.bytes;
                        all.next();
                    }
                    let seconds = machine.collective(transfer.op, transfer.axis, transfer.bytes);
                    let link = machine.link(transfer.axis);
                    numbers.insert((k, own.len()), out.sent.len());
                    sent_bytes[k] += transfer.sent(&machine.mesh);
                    out.sent.push(Sent { transfer, link, seconds, waited: 0.0 });
                    seconds
                }
                _ => kernel::seconds(machine.rates, program, kernel),
            };
            if matches!(class, KernelClass::Product | KernelClass::Attention | KernelClass::Convolution) {
                out.flops += crate::show::cost(program, kernel).flops as f64;
            }
            *classes.entry(class).or_default() += seconds / programs.len() as f64;
            own.push(Task { event, seconds, reads: kernel.reads(), writes: kernel.writes() });
        }
        tasks.push(own);
    }
    out.classes = KernelClass::ALL.into_iter().filter_map(|c| Some((c, *classes.get(&c)?))).collect();
    let (serial, beside) = (timeline::run(&tasks, false), timeline::run(&tasks, true));
    (out.serial, out.overlapped) = (serial.end, beside.end);
    for (task, waited) in beside.waited {
        if let Some(sent) = numbers.get(&task).map(|number| &mut out.sent[*number]) {
            // Of the wait for a message only the last part is its transfer; before, its stage has not sent it.
            let is_message = sent.transfer.op == collective::SEND.name;
            sent.waited = if is_message { waited.min(sent.seconds) } else { waited };
        }
    }
    if !program.stages.is_empty() {
        let device = |((busy, sent), (_, arena))| DeviceTime { busy, sent, arena };
        out.devices = serial.busy.into_iter().zip(sent_bytes).zip(programs).map(device).collect();
    }
    out
}

/// What a kernel does for the clock.
fn event(kernel: &Kernel) -> Event {
    match kernel {
        Kernel::Library(l) if l.op == &collective::SEND => Event::Send { to: l.attrs[1] as usize, number: l.attrs[2] },
        Kernel::Library(l) if l.op == &collective::RECV => {
            Event::Receive { from: l.attrs[1] as usize, number: l.attrs[2] }
        }
        Kernel::Library(l) if KernelClass::of(kernel) == KernelClass::Collective => Event::Collective(lanes::axis(l)),
        _ => Event::Compute,
    }
}
