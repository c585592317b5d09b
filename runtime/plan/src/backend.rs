//! Defines the interface that a device backend implements.

use crate::buffer_desc::BufferDesc;
use crate::ir::{Origin, Program};
use crate::message_slots::MessageSlots;
use perilune_core::error::{Error, Result};
use perilune_core::graph::Node;
use perilune_core::mesh::Axis;
use perilune_core::{Interrupt, Layout, Mesh};
use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::thread::JoinHandle;

/// Memory of a device, freed on drop. Cheap to clone.
pub type Buffer = Arc<dyn DeviceBuffer>;

pub trait DeviceBuffer: Debug + Send + Sync {
    fn desc(&self) -> &BufferDesc;
    /// Bytes of the tensor that it stores.
    fn nbytes(&self) -> usize {
        self.desc().nbytes()
    }
    /// Downcasts to the backend's own type.
    fn as_any(&self) -> &dyn Any;
}

/// Device memory as this process uses it, in bytes.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Memory {
    /// In buffers and the arena.
    pub allocated: usize,
    /// Allocated from the device, in use or cached.
    pub reserved: usize,
    /// The maximum of `allocated` so far.
    pub peak: usize,
    /// The device's memory, where that is known.
    pub limit: Option<usize>,
}

/// Sensor readings of a device; `None` where it reports nothing.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct Readings {
    /// Per cent of the time in which a kernel ran.
    pub utilization: Option<f64>,
    /// Bytes in use by all processes, and the device's total.
    pub memory_used: Option<f64>,
    pub memory_total: Option<f64>,
    /// Watts.
    pub power: Option<f64>,
    pub power_limit: Option<f64>,
    /// Degrees Celsius.
    pub temperature: Option<f64>,
    pub clock_mhz: Option<f64>,
    /// Reasons for reduced clocks.
    pub throttled: Vec<&'static str>,
}

/// Reads a device's sensors; it may move to another thread.
pub type Probe = Box<dyn FnMut() -> Option<Readings> + Send>;

/// The contents of buffers at one moment, unaffected by later writes. It may move to another thread.
pub struct Snapshot {
    /// Bytes of memory that the copies take, or 0 once they are freed. The code that drops the result of `bytes` sets
    /// it to 0 if necessary.
    pub held: Arc<AtomicUsize>,
    /// Why the copy was synchronous, on a device that can copy asynchronously.
    pub waited: Option<String>,
    /// Waits for the device and returns the bytes of each buffer.
    pub bytes: Box<dyn FnOnce() -> Result<Vec<Vec<u8>>> + Send>,
}

impl Snapshot {
    /// Creates a snapshot whose bytes are on the host already.
    pub fn of(bytes: Vec<Vec<u8>>) -> Snapshot {
        let held = Arc::new(AtomicUsize::new(bytes.iter().map(Vec::len).sum()));
        Snapshot { held, waited: None, bytes: Box::new(move || Ok(bytes)) }
    }
}

/// A device. Several threads may share one: a method that reaches the device takes its lock, and a run holds it to its end, so that
/// programs run one after the other.
pub trait Backend: Send + Sync {
    /// Such as `cpu` or `cuda:0`.
    fn name(&self) -> &str;

    /// A one-line description: `cpu (2 threads, AVX-512)`.
    fn describe(&self) -> String;

    /// Whether this device runs a fused op as one kernel; otherwise the planner decomposes it.
    fn has_kernel(&self, node: &Node) -> bool;

    /// Whether the kernel of a library op or of a fused op can store this output with `layout`; contiguous is always
    /// supported.
    fn can_store_layout(&self, _node: &Node, _output: usize, _layout: &Layout) -> bool {
        false
    }

    /// The row alignment in bytes that large products in 16 bits or TF32 need to be fast, if there is one (see
    /// `passes::pad_gemm`).
    fn row_bytes(&self) -> Option<usize> {
        None
    }

    /// Whether regions can store rows padded with zeros (see `ir::Region::pitch`).
    fn fills_rows(&self) -> bool {
        false
    }

    /// Whether a bad index is reported after later kernels were queued, and stops State writes on the device. Then only
    /// regions write States, after the last kernel that may report one (see `index_checks`).
    fn defers_index_faults(&self) -> bool {
        false
    }

    /// Whether devices of a mesh may exchange tensors through host memory as well (see [`crate::route`]).
    fn has_host_memory_route(&self) -> bool {
        false
    }

    /// Returns the program and the kernel that caused the last error of `download` or `run`, if an earlier run did.
    fn take_fault_origin(&self) -> Option<(Arc<Program>, Origin)> {
        None
    }

    /// How it makes the memory through which messages between pipeline stages pass, if that lies on the device beside the arena.
    fn message_slots(&self) -> Option<MessageSlots> {
        None
    }

    /// Returns the mesh of devices that this one stands for.
    fn mesh(&self) -> Mesh {
        Mesh::ONE
    }

    /// The number of processes that drive devices of the mesh.
    fn processes(&self) -> usize {
        1
    }

    /// Tells the other processes where the recipe is, for their messages.
    fn set_place(&self, _place: String) {}

    /// Compares a digest with those of the other processes; all of them call it, in the same order. A difference is an error in all
    /// of them, with the first lines that differ of what `describe` returns. `what` names what is compared.
    fn agree(&self, _what: &str, _digest: &[u8], _describe: &mut dyn FnMut() -> String) -> Result<()> {
        Ok(())
    }

    /// Lets the processes go on together after some of them may have run programs that the others have not; all of them call it.
    fn realign(&self) -> Result<()> {
        Ok(())
    }

    /// Allocates uninitialised memory; out-of-memory is an `Err`.
    fn alloc(&self, desc: &BufferDesc) -> Result<Buffer>;

    /// Allocates memory that stores a tensor, whose elements `bytes` holds in row-major order.
    fn upload(&self, desc: &BufferDesc, bytes: &[u8]) -> Result<Buffer>;

    /// Returns the elements of the tensor that a buffer stores, after all work queued so far.
    fn download(&self, buffer: &Buffer) -> Result<Vec<u8>>;

    /// Copies buffers, after all work queued so far. `room`: maximum bytes of device memory for the copies; all free memory
    /// if absent.
    fn snapshot(&self, buffers: &[Buffer], _room: Option<usize>) -> Result<Snapshot> {
        Ok(Snapshot::of(buffers.iter().map(|buffer| self.download(buffer)).collect::<Result<_>>()?))
    }

    /// Returns the memory use of the device.
    fn memory(&self) -> Memory {
        Memory::default()
    }

    /// The text that kernel `k` of a program is compiled from, if this device compiles text.
    fn source(&self, _program: &Program, _k: usize) -> Option<Result<String>> {
        None
    }

    /// The published peak FLOP/s of products in a precision (`f32`, `tf32`, `bf16`, `fp16`).
    fn peak_flops(&self, _precision: &str) -> Option<f64> {
        None
    }

    /// Returns a probe of the device's sensors, if it has any.
    fn probe(&self) -> Option<Probe> {
        None
    }

    /// Returns faults since the last call, each once: an installed library that failed, and what runs instead.
    fn take_notices(&self) -> Vec<String> {
        Vec::new()
    }

    /// Ends what is in flight with devices of other processes, because one of them has failed: any thread may call it, also during a run.
    /// `None`: the failure has been reported, and need not be raised by the next call.
    fn cut_off(&self, _why: Option<&Error>) {}

    /// Starts a thread that generates the machine code that `compile` will need for these programs. `None` if there is nothing
    /// to generate.
    fn prepare(&self, _programs: &[Program]) -> Result<Option<JoinHandle<()>>> {
        Ok(None)
    }

    /// Compiles a program for this device.
    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>>;
}

/// A compiled program. Several threads may run it, one after the other.
pub trait Executable: Send + Sync {
    /// Runs the program: `inputs` and `slots` in the order of the program, `outputs` freshly allocated with the
    /// program's sizes.
    ///
    /// An error (an index out of range) names the kernel as [`Failure`]. The States that the program writes may then be
    /// partly written, so backends check before they write where possible.
    fn run(
        &self,
        inputs: &[Buffer],
        slots: &[u64],
        outputs: &[Buffer],
        context: RunContext<'_>,
    ) -> std::result::Result<(), Failure>;
}

/// Names an exchange in which this device has sent its message and has yet to receive those of the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ticket {
    pub axis: Axis,
    /// Exchanges along the axis before this one, in this run.
    pub number: u64,
}

/// Connects the devices of a mesh for collectives.
pub trait Peers: Debug + Sync {
    /// The coordinate of this device along `axis`.
    fn coordinate(&self, axis: Axis) -> usize;

    /// Begins an exchange: sends `bytes` to the devices along `axis`, without waiting for them. All of them must begin the same
    /// exchanges in the same order.
    fn send(&self, axis: Axis, bytes: &[u8]) -> Result<Ticket>;

    /// Ends an exchange, once: returns what each of the devices has sent, in the order of their coordinates. Exchanges may end in any
    /// order. Returns an error, on all of them, if one has failed.
    fn receive(&self, ticket: Ticket) -> Result<Vec<Arc<[u8]>>>;

    /// Begins an exchange and ends it.
    fn exchange(&self, axis: Axis, bytes: &[u8]) -> Result<Vec<Arc<[u8]>>> {
        self.receive(self.send(axis, bytes)?)
    }

    /// Sends `bytes` to the device at coordinate `to` along `axis`, without waiting for it. `number` names the message: no other one of
    /// the run from here to there has it.
    fn send_to(&self, axis: Axis, _to: usize, _number: u64, _bytes: &[u8]) -> Result<()> {
        Err(Error::system("mesh", format!("these devices send each other nothing along {}", axis.name())))
    }

    /// Waits for the message with that number of the device at coordinate `from` along `axis`. Returns an error if a device fails.
    fn receive_from(&self, axis: Axis, _from: usize, _number: u64) -> Result<Arc<[u8]>> {
        Err(Error::system("mesh", format!("these devices send each other nothing along {}", axis.name())))
    }

    /// Whether the devices along `pp` run programs of their own in this run. What these write and check differs, so where all devices
    /// agree none may be left out.
    fn has_stages(&self) -> bool {
        false
    }

    /// Waits until all devices of the mesh have called it. Returns an error, on all of them, if one has failed.
    fn barrier(&self) -> Result<()> {
        Ok(())
    }
}

/// What belongs to one run beside its operands.
#[derive(Debug)]
pub struct RunContext<'a> {
    /// Ends the run between two kernels, as long as no State has been written.
    pub interrupt: &'a Interrupt,
    /// Receives the seconds that each kernel takes, added to its entry: one per kernel, in order.
    pub times: Option<&'a mut [f64]>,
    /// Receives, with `times`, the seconds for which each collective runs beside other kernels; `times` has the rest of its seconds.
    pub hidden: Option<&'a mut [f64]>,
    /// The other devices of the mesh; `None` on a single device, whose programs have no collectives.
    pub peers: Option<&'a dyn Peers>,
}

impl<'a> RunContext<'a> {
    /// A run on a single device that is not timed.
    pub fn new(interrupt: &'a Interrupt) -> RunContext<'a> {
        RunContext { interrupt, times: None, hidden: None, peers: None }
    }
}

/// A kernel that failed, and why.
#[derive(Clone, Debug)]
pub struct Failure {
    pub origin: Origin,
    pub error: Error,
}
