//! Reports indices out of range, and what a recipe's kernel was held back from. Each kernel that checks indices has a cell in host memory, in which it stores the
//! first bad index. A program has a cell more, for bad indices on other devices of its mesh (`mesh/mod.rs`).

use crate::driver::{Address, Device, Pinned};
use crate::guard::report::Subject;
use crate::guard::watchdog::History;
use perilune_core::error::{Error, Kind, Result};
use perilune_core::mesh::Axis;
use perilune_core::op::IndexFault;
use perilune_plan::ir::{Origin, Program};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// Words of a `Fault` (kernels/device/fault.cuh).
pub(super) const FAULT_WORDS: usize = 4;

/// Where the kernels of a program report bad indices.
pub(crate) struct DeviceErrors {
    pub(super) memory: Pinned,
    /// What the cells report; the last one is that of other devices.
    kernels: Vec<(Origin, Report)>,
    program: Arc<Program>,
    /// The first of its runs that may have reported something unseen; 0 before the first.
    since: AtomicU64,
}

#[derive(Clone)]
pub(crate) enum Report {
    Index(IndexFault),
    /// An access out of bounds, or the limit of time, in a recipe's kernel.
    Kernel(Arc<Subject>, Arc<History>),
    /// A bad index on another device: the value is its coordinate, the size the number of the axis.
    Peer,
}

impl Report {
    fn error(&self, value: i64, size: i64) -> Error {
        match self {
            Report::Index(fault) => fault.error(value, size),
            Report::Kernel(subject, history) => {
                let bases = history.of((size as u64 >> 32) as u32);
                subject.error(value as u64, size as u64, bases.as_deref())
            }
            Report::Peer => peer_fault(usize::try_from(size).ok().and_then(|k| Some((value, *Axis::ALL.get(k)?)))),
        }
    }
}

/// The error on a device whose mesh has a bad index on another one: at that coordinate along that axis, if known.
pub(super) fn peer_fault(at: Option<(i64, Axis)>) -> Error {
    let at = at.map_or(String::new(), |(k, axis)| format!(", at {k} along {}", axis.name()));
    Error::new(Kind::Elsewhere, "", format!("an index was out of range on another device of the mesh{at}"))
        .hint("that device reports the index")
}

impl DeviceErrors {
    /// Allocates a cell for each kernel, and one for other devices. `halt`: the word that stops State writes.
    pub fn new(
        device: &Arc<Device>,
        halt: Address,
        kernels: Vec<(Origin, Report)>,
        program: &Arc<Program>,
    ) -> Result<DeviceErrors> {
        let origin = kernels.first().map_or(Origin::NONE, |(origin, _)| *origin);
        let kernels: Vec<(Origin, Report)> = kernels.into_iter().chain([(origin, Report::Peer)]).collect();
        let memory = Pinned::new(device, kernels.len() * FAULT_WORDS * 8)?;
        (0..kernels.len()).for_each(|k| memory.write(k * FAULT_WORDS + 3, halt));
        Ok(DeviceErrors { memory, kernels, program: program.clone(), since: AtomicU64::new(0) })
    }

    /// Returns the cell in which a kernel reports a bad index on another device.
    pub fn peer_cell(&self) -> Address {
        self.memory.address + ((self.kernels.len() - 1) * FAULT_WORDS * 8) as u64
    }

    /// Returns whether a kernel has reported a bad index.
    fn is_set(&self) -> bool {
        (0..self.kernels.len()).any(|k| self.memory.read(k * FAULT_WORDS) as u32 != 0)
    }

    /// Returns the first report and clears all.
    fn take(&self) -> Option<Fault> {
        let mut first = None;
        for (k, (origin, fault)) in self.kernels.iter().enumerate() {
            let at = k * FAULT_WORDS;
            if self.memory.read(at) as u32 != 0 {
                let (value, size) = (self.memory.read(at + 1) as i64, self.memory.read(at + 2) as i64);
                self.memory.write(at, 0);
                let fault =
                    || Fault { program: self.program.clone(), origin: *origin, error: fault.error(value, size) };
                first.get_or_insert_with(fault);
            }
        }
        first
    }
}

/// A bad index that a kernel reported.
pub(crate) struct Fault {
    pub program: Arc<Program>,
    pub origin: Origin,
    pub error: Error,
}

/// Where the programs of a device report bad indices, and which runs a report invalid.
///
/// The runs of a device are numbered (`copy_streams`). After a report, State writes do nothing until the host has seen it:
/// the results of the run that failed and of those queued behind it are not to be used.
#[derive(Default)]
pub(crate) struct Faults {
    pub cells: Vec<Weak<DeviceErrors>>,
    /// The last run that is known to have finished without a report.
    clean: u64,
    /// Numbers of the first and last run that a report invalid, oldest first.
    invalid: Vec<(u64, u64)>,
}

impl Faults {
    /// Returns whether a report has arrived.
    pub fn arrived(&mut self) -> bool {
        self.cells.retain(|c| c.strong_count() > 0);
        self.is_reported()
    }

    /// As [`Faults::arrived`].
    pub fn is_reported(&self) -> bool {
        self.cells.iter().filter_map(Weak::upgrade).any(|cells| cells.is_set())
    }

    /// Returns whether a run that is not known to be clean belongs to a program that reports bad indices.
    pub fn may_report(&self) -> bool {
        let cells = self.cells.iter().filter_map(Weak::upgrade);
        cells.map(|c| c.since.load(Ordering::Relaxed)).any(|since| since > self.clean)
    }

    /// Notes that run `number` is of the program of `cells`.
    pub fn starts(&self, cells: &DeviceErrors, number: u64) {
        if cells.since.load(Ordering::Relaxed) <= self.clean {
            cells.since.store(number, Ordering::Relaxed);
        }
    }

    /// Notes that run `number` and all before it have finished without a report.
    pub fn finished(&mut self, number: u64) {
        self.clean = self.clean.max(number);
    }

    /// Takes the first report and clears the others. The device is idle, and `queued` is its last run.
    pub fn take(&mut self, queued: u64) -> Option<Fault> {
        let cells = self.cells.iter().filter_map(Weak::upgrade);
        let reports: Vec<(u64, Fault)> =
            cells.filter_map(|c| Some((c.since.load(Ordering::Relaxed), c.take()?))).collect();
        // The failed run is one of a program that reported.
        let first = reports.iter().map(|(since, _)| *since).min().unwrap_or(0);
        self.invalidate(first, queued);
        reports.into_iter().min_by_key(|(since, _)| *since).map(|(_, fault)| fault)
    }

    /// Invalidates the runs from `first`, if that is not known to be clean, to `queued`.
    fn invalidate(&mut self, first: u64, queued: u64) {
        self.invalid.push((first.max(self.clean + 1), queued));
        self.clean = queued;
    }

    /// Returns the error for using what run `number` made, if a report invalid that run.
    pub fn check(&self, number: u64) -> Result<()> {
        if !self.invalid.iter().any(|(first, last)| (*first..=*last).contains(&number)) {
            return Ok(());
        }
        let message = "this value was computed by a step with an index out of range, or by one queued behind it";
        Err(Error::argument("", message)
            .hint("read a result of each step to see an error in its step; compute the value again, or create the State again"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_since_the_first_run_that_may_have_failed_are_invalid() {
        let mut faults = Faults::default();
        faults.finished(2);
        faults.invalidate(5, 9);
        faults.finished(7);
        let invalid: Vec<u64> = (0..12).filter(|n| faults.check(*n).is_err()).collect();
        assert_eq!(invalid, [5, 6, 7, 8, 9], "3 and 4 are of programs that report nothing");
        faults.invalidate(8, 11);
        assert!(faults.check(10).is_err() && faults.check(11).is_err() && faults.check(12).is_ok());
    }
}
