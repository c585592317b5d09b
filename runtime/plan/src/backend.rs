//! The seam to devices: what a backend must do, and nothing about how.

use crate::ir::Program;
use perilune_core::Layout;
use perilune_core::error::{Error, Result};
use perilune_core::graph::Node;
use std::any::Any;
use std::fmt::Debug;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::thread::JoinHandle;

/// Memory of a device, freed on drop. Cheap to clone.
pub type Buffer = Rc<dyn DeviceBuffer>;

pub trait DeviceBuffer: Debug {
    fn nbytes(&self) -> usize;
    /// The backend's own type behind it.
    fn as_any(&self) -> &dyn Any;
}

/// Bytes of a device's memory that this process has.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Memory {
    /// In buffers and the arena.
    pub allocated: usize,
    /// Taken from the device, in use or kept for the next use.
    pub reserved: usize,
    /// The most that was ever allocated.
    pub peak: usize,
    /// What there is, where that is known.
    pub limit: Option<usize>,
}

/// How a device fares. What it does not say is none.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct Readings {
    /// Per cent of the time in which some kernel ran.
    pub utilization: Option<f64>,
    /// Bytes in use by everybody, and those there are.
    pub memory_used: Option<f64>,
    pub memory_total: Option<f64>,
    /// Watts.
    pub power: Option<f64>,
    pub power_limit: Option<f64>,
    /// Degrees Celsius.
    pub temperature: Option<f64>,
    pub clock_mhz: Option<f64>,
    /// What holds the clocks down.
    pub throttled: Vec<&'static str>,
}

/// Reads a device's sensors; it may be sent to a thread.
pub type Probe = Box<dyn FnMut() -> Option<Readings> + Send>;

/// Bytes of buffers as they were when it was taken, whatever is written to them later. It may be sent to a thread.
pub struct Snapshot {
    /// Bytes of memory that its copies hold; 0 once they are gone. Whoever drops the bytes that `bytes` gave sets it, if it
    /// is not 0 by then.
    pub held: Arc<AtomicUsize>,
    /// Why the caller had to wait until the bytes were on the host, on a device that can do without.
    pub waited: Option<String>,
    /// ControlDeps for the device and gives the bytes of each buffer.
    pub bytes: Box<dyn FnOnce() -> Result<Vec<Vec<u8>>> + Send>,
}

impl Snapshot {
    /// One whose bytes are on the host already.
    pub fn of(bytes: Vec<Vec<u8>>) -> Snapshot {
        let held = Arc::new(AtomicUsize::new(bytes.iter().map(Vec::len).sum()));
        Snapshot { held, waited: None, bytes: Box::new(move || Ok(bytes)) }
    }
}

pub trait Backend {
    /// `cpu`, `cuda:0` …
    fn name(&self) -> &str;

    /// A line for people: `cpu (2 threads, AVX-512)`.
    fn describe(&self) -> String;

    /// Whether this device runs a fused op as one kernel; otherwise the planner takes its decomposition.
    fn has_kernel(&self, node: &Node) -> bool;

    /// Whether the kernel of a library op, or of one that it keeps, can write that output through `layout`; in order it always
    /// can.
    fn can_store_layout(&self, _node: &Node, _output: usize, _layout: &Layout) -> bool {
        false
    }

    /// Bytes that rows of large products in 16 bits or TF32 had better be a multiple of, if that matters much (see `align`).
    fn row_bytes(&self) -> Option<usize> {
        None
    }

    /// Whether what computes rows can store them so, with zeros behind each (see `ir::Region::pitch`).
    fn fills_rows(&self) -> bool {
        false
    }

    /// Uninitialised memory; out-of-memory is an `Err`.
    fn alloc(&self, nbytes: usize) -> Result<Buffer>;

    /// Memory holding `bytes`.
    fn upload(&self, bytes: &[u8]) -> Result<Buffer>;

    /// The first `nbytes` bytes of a buffer, after all work queued so far.
    fn download(&self, buffer: &Buffer, nbytes: usize) -> Result<Vec<u8>>;

    /// Overwrites the start of a buffer, after all work queued so far.
    fn write(&self, buffer: &Buffer, bytes: &[u8]) -> Result<()>;

    /// The first bytes of buffers, so many of each, after all work queued so far. `room`: what copies of them may take of the
    /// device's memory, if not all that is free.
    fn snapshot(&self, parts: &[(Buffer, usize)], _room: Option<usize>) -> Result<Snapshot> {
        Ok(Snapshot::of(parts.iter().map(|(buffer, n)| self.download(buffer, *n)).collect::<Result<_>>()?))
    }

    /// What the device's memory holds now.
    fn memory(&self) -> Memory {
        Memory::default()
    }

    /// The text that kernel `k` of a program is compiled from, if this device compiles text.
    fn source(&self, _program: &Program, _k: usize) -> Option<Result<String>> {
        None
    }

    /// FLOP/s that the device reaches at most in products of a precision (`f32`, `tf32`, `bf16`, `fp16`), where published.
    fn peak_flops(&self, _precision: &str) -> Option<f64> {
        None
    }

    /// The device's sensors, if it has some.
    fn probe(&self) -> Option<Probe> {
        None
    }

    /// Begins to make, in a thread of its own, the machine code that `compile` would make anew for this program. `None`: there
    /// is nothing of the kind to wait for.
    fn prepare(&self, _program: &Program) -> Result<Option<JoinHandle<()>>> {
        Ok(None)
    }

    /// Makes a program runnable.
    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>>;
}

/// A compiled program.
pub trait Executable {
    /// Runs it: `inputs` and `slots` in the order of the program, `outputs` freshly allocated and of the program's sizes.
    ///
    /// An error (an index out of range) names the kernel's place as [`Failure`]; inputs that the program state_writes to may
    /// then be partly written, so backends check before they write where they can.
    ///
    /// With `times`, the seconds each kernel took are added to its entry there (one a kernel, in order).
    fn run(
        &self,
        inputs: &[Buffer],
        slots: &[u64],
        outputs: &[Buffer],
        times: Option<&mut [f64]>,
    ) -> std::result::Result<(), Failure>;
}

/// A kernel that failed, and why.
#[derive(Clone, Debug)]
pub struct Failure {
    pub origin: crate::ir::Origin,
    pub error: Error,
}
