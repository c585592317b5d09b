//! Implements the `Backend` trait on a GPU: buffers, the arena that all programs share, compilation and sensor
//! readings.

use crate::autotune::Search;
use crate::blas::{self, Blas};
use crate::dnn::Dnn;
use crate::driver::{self, Allocation, CopyStreams, CudaBuffer, Device, Heap, Module, Range};
use crate::dylib;
use crate::executable::{Communicators, Connection, CudaExecutable, Fault, Faults};
use crate::guard::Guard;
use crate::guard::watchdog::Watchdog;
use crate::nvrtc::{self, Compiler};
use perilune_core::env_flags;
use perilune_core::error::{Error, Kind, Result};
use perilune_core::graph::Node;
use perilune_core::{KernelLimits, Layout};
use perilune_plan::ir::{Origin, Program};
use perilune_plan::{Backend, Buffer, BufferDesc, DeviceBuffer, Executable, Failure, Memory, Snapshot};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// The GPU device.
pub struct Cuda {
    name: String,
    shared: Arc<SharedDevice>,
}

/// A device as its backend and its programs share it. The lock is held while work is queued, so that the work of a program enters the
/// stream, or a graph that is being captured, as a whole. Buffers are allocated and freed without it.
pub(crate) struct SharedDevice {
    context: Mutex<DeviceContext>,
    heap: Arc<Heap>,
    device: Arc<Device>,
    communicators: Arc<Communicators>,
}

/// State that all programs of a device share. Memory is the last field, so that it is unmapped after everything that
/// uses it.
pub(crate) struct DeviceContext {
    /// What connects the device to its mesh, once a run has had peers. Dropped first: other devices may use memory until then.
    pub connection: Option<Arc<Connection>>,
    /// Those of NCCL. A thread that ends them does not wait for the lock.
    pub communicators: Arc<Communicators>,
    pub compiler: Compiler,
    pub modules: HashMap<[u8; 32], Arc<Module>>,
    pub blas: Blas,
    /// cuDNN, opened when the first convolution asks for it; `Some(None)` without it.
    dnn: Option<Option<Dnn>>,
    /// Faults that have not been reported yet.
    notices: Vec<String>,
    /// Where the programs alive report bad indices.
    pub faults: Faults,
    /// A word that is not 0 after a bad index: kernels that write States return at once then.
    pub halt: Allocation,
    /// Numbers the launches of recipes' kernels, and limits their time.
    pub watchdog: Watchdog,
    /// The origin of the last error that an earlier run caused.
    fault_origin: Option<(Arc<Program>, Origin)>,
    pub heap: Arc<Heap>,
    /// Intermediate values of the running program.
    pub arena: Range,
    /// Scratch of kernels.
    pub scratch: Range,
    pub _workspace: Allocation,
    /// Whether steps are replayed as CUDA graphs.
    pub replay: bool,
    /// How algorithms for products are chosen.
    pub search: Search,
    /// Copies that do not wait for the compute stream.
    pub beside: CopyStreams,
    pub device: Arc<Device>,
}

impl Cuda {
    /// Opens GPU `ordinal`, with the limits of kernels of this process.
    pub fn new(ordinal: usize) -> Result<Cuda> {
        Cuda::limited(ordinal, perilune_core::kernel_limits::get())
    }

    /// Opens GPU `ordinal`, with these limits of recipes' kernels.
    pub fn limited(ordinal: usize, limits: KernelLimits) -> Result<Cuda> {
        let device = Device::open(ordinal, Guard::of(&limits))?;
        let heap = Heap::new(&device)?;
        let workspace = heap.alloc(blas::WORKSPACE)?;
        let halt = heap.alloc(4)?;
        device.upload(halt.address, &[0; 4])?;
        let communicators: Arc<Communicators> = Arc::default();
        let context = DeviceContext {
            connection: None,
            communicators: communicators.clone(),
            compiler: Compiler::new(device.props.arch, nvrtc::folder())?,
            modules: HashMap::new(),
            blas: Blas::new(&device, workspace.address)?,
            beside: CopyStreams::new(&device)?,
            dnn: None,
            notices: Vec::new(),
            faults: Faults::default(),
            halt,
            watchdog: Watchdog::new(&device, limits)?,
            fault_origin: None,
            arena: Range::new(&device)?,
            scratch: Range::new(&device)?,
            _workspace: workspace,
            replay: env_flags::REPLAY.is_on(true),
            search: Search::of_env(),
            heap: heap.clone(),
            device: device.clone(),
        };
        let shared = SharedDevice { context: Mutex::new(context), heap, device, communicators };
        Ok(Cuda { name: format!("cuda:{ordinal}"), shared: Arc::new(shared) })
    }

    /// The number of GPUs that this process may open.
    pub fn count() -> Result<usize> {
        Device::count()
    }

    /// What tells kinds of GPUs apart: name, architecture and size.
    pub fn kind(&self) -> String {
        let d = &self.shared.device;
        let (major, minor) = d.props.arch;
        let gib = d.total_bytes as f64 / (1u64 << 30) as f64;
        format!("{}, sm_{major}{minor}, {} SMs, {gib:.0} GiB", d.name, d.props.sms)
    }

    /// Opens the device with that name: `cuda` or `cuda:N`.
    pub fn named(name: &str) -> Result<Cuda> {
        let ordinal = match name.strip_prefix("cuda") {
            Some("") => Some(0),
            Some(rest) => rest.strip_prefix(':').and_then(|n| n.parse().ok()),
            None => None,
        };
        match ordinal {
            Some(n) => Cuda::new(n),
            None => Err(Error::argument("device", format!("{name:?} is not a device")).hint("use cpu, cuda or cuda:0")),
        }
    }
}

pub(crate) fn address(buffer: &Buffer, nbytes: usize) -> Result<u64> {
    match buffer.as_any().downcast_ref::<CudaBuffer>() {
        Some(b) if b.nbytes() >= nbytes => Ok(b.address()),
        Some(_) => Err(Error::system("cuda", format!("this is a bug: a buffer is smaller than {nbytes} bytes"))),
        None => Err(Error::system("cuda", "this is a bug: a buffer of another device was passed")),
    }
}

/// Records run `number` as the maker of an output.
pub(crate) fn made(buffer: &Buffer, number: u64) {
    if let Some(b) = buffer.as_any().downcast_ref::<CudaBuffer>() {
        b.set_last_write(number);
        b.set_maker(number);
    }
}

/// Records run `number` as the writer of a State, and as its maker if the State had no value before.
pub(crate) fn state_written(buffer: &Buffer, number: u64) {
    if let Some(b) = buffer.as_any().downcast_ref::<CudaBuffer>() {
        if b.last_write() == 0 {
            b.set_maker(number);
        }
        b.set_last_write(number);
    }
}

/// Returns the run that made the buffer as an output or wrote the first value of a State into it, or 0.
pub(crate) fn made_by(buffer: &Buffer) -> u64 {
    buffer.as_any().downcast_ref::<CudaBuffer>().map_or(0, CudaBuffer::maker)
}

impl Backend for Cuda {
    fn name(&self) -> &str {
        &self.name
    }

    fn describe(&self) -> String {
        format!("{} ({})", self.name, self.kind())
    }

    fn peak_flops(&self, precision: &str) -> Option<f64> {
        let d = &self.shared.device;
        crate::peak::flops(&d.name, d.props.arch, d.props.sms, d.clock_hz()?, precision)
    }

    fn probe(&self) -> Option<perilune_plan::Probe> {
        crate::nvml::probe(&self.shared.device.pci_address()?)
    }

    fn has_kernel(&self, node: &Node) -> bool {
        crate::executable::has_kernel(node, &self.shared.device.props)
            || (crate::conv::has_kernel(node)
                && self.shared.lock().is_ok_and(|mut context| {
                    let adds = crate::conv::adds(node);
                    context.dnn().is_some_and(|dnn| adds.is_none_or(|(kind, dtype)| dnn.adds(kind, dtype)))
                }))
    }

    fn can_store_layout(&self, node: &Node, output: usize, layout: &Layout) -> bool {
        let kernels =
            [crate::attention::can_store_layout, crate::conv::can_store_layout, crate::library::pool::can_store_layout];
        kernels.iter().any(|writes| writes(node, output, layout))
    }

    fn row_bytes(&self) -> Option<usize> {
        Some(crate::blas::ALIGNMENT as usize)
    }

    fn fills_rows(&self) -> bool {
        true
    }

    fn has_host_memory_route(&self) -> bool {
        self.shared.device.props.has_host_memory_route()
    }

    fn defers_index_faults(&self) -> bool {
        true
    }

    fn message_slots(&self) -> Option<perilune_plan::MessageSlots> {
        Some(crate::driver::SLOTS)
    }

    fn take_fault_origin(&self) -> Option<(Arc<Program>, Origin)> {
        self.shared.lock().ok()?.fault_origin.take()
    }

    fn alloc(&self, desc: &BufferDesc) -> Result<Buffer> {
        Ok(Arc::new(CudaBuffer::new(desc, &self.shared.heap)?))
    }

    fn upload(&self, desc: &BufferDesc, bytes: &[u8]) -> Result<Buffer> {
        let buffer = CudaBuffer::new(desc, &self.shared.heap)?;
        if bytes.len() != buffer.nbytes() {
            let message = format!("this is a bug: {} bytes for a buffer of {}", bytes.len(), buffer.nbytes());
            return Err(Error::system("cuda", message));
        }
        let mut context = self.shared.lock()?;
        buffer.set_last_write(context.beside.number());
        context.beside.uploads.upload(buffer.address(), bytes)?;
        Ok(Arc::new(buffer))
    }

    fn download(&self, buffer: &Buffer) -> Result<Vec<u8>> {
        let (mut out, from) = (vec![0; buffer.nbytes()], address(buffer, buffer.nbytes())?);
        let mut context = self.shared.lock()?;
        let number = buffer.as_any().downcast_ref::<CudaBuffer>().map_or(u64::MAX, CudaBuffer::last_write);
        let finished = match context.beside.download(from, &mut out, number)? {
            Some(run) => run,
            None => {
                context.device.download(from, &mut out)?;
                context.beside.queued()
            }
        };
        self.shared.communicators.raise()?;
        context.check_download(finished, made_by(buffer))?;
        Ok(out)
    }

    fn snapshot(&self, buffers: &[Buffer], room: Option<usize>) -> Result<Snapshot> {
        let parts = buffers.iter().map(|buffer| Ok((address(buffer, buffer.nbytes())?, buffer.nbytes())));
        let mut context = self.shared.lock()?;
        self.shared.communicators.raise()?;
        // A checkpoint must not pass States off as those of a step whose bad index has not been reported yet.
        if context.faults.may_report() {
            context.device.synchronize()?;
            let queued = context.beside.queued();
            buffers.iter().try_for_each(|buffer| context.check_download(queued, made_by(buffer)))?;
        }
        driver::snapshot(&context.device, parts.collect::<Result<_>>()?, room)
    }

    fn memory(&self) -> Memory {
        let (used, peak, mapped) = self.shared.heap.counts();
        // The arena and the scratch stay as large as the largest program required, the landing as the largest batch.
        let held =
            |context: &DeviceContext| context.arena.mapped() + context.scratch.mapped() + context.beside.uploads.held();
        let fixed = self.shared.lock().map_or(0, |context| held(&context));
        let fixed = fixed + self.shared.device.snapshots.held() + self.shared.device.landing_bytes();
        let limit = Some(self.shared.device.total_bytes);
        Memory { allocated: used + fixed, reserved: mapped + fixed, peak: peak + fixed, limit }
    }

    fn source(&self, program: &Program, k: usize) -> Option<Result<String>> {
        Some(crate::offline_target::text(program, k, &self.shared.device.props))
    }

    fn take_notices(&self) -> Vec<String> {
        self.shared.lock().map_or(Vec::new(), |mut context| std::mem::take(&mut context.notices))
    }

    fn prepare(&self, programs: &[Program]) -> Result<Option<JoinHandle<()>>> {
        let mut context = self.shared.lock()?;
        let mut functions = Vec::new();
        for program in programs {
            functions.extend(crate::executable::functions(&mut context, program)?);
        }
        Ok(context.compiler.prepare(&functions))
    }

    fn cut_off(&self, why: Option<&Error>) {
        match why {
            Some(why) => self.shared.communicators.cut_off(why),
            None => self.shared.communicators.forget(),
        }
    }

    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>> {
        perilune_plan::check::check(&program).map_err(|e| Error::system("plan", format!("this is a bug: {e}")))?;
        Ok(Box::new(CudaExecutable::new(&self.shared, program)?))
    }
}

impl SharedDevice {
    /// Locks the device for this thread, with its CUDA context current.
    pub fn lock(&self) -> Result<MutexGuard<'_, DeviceContext>> {
        self.device.bind()?;
        // A run fills in what it reads, so a panic leaves nothing invalid.
        Ok(self.context.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl DeviceContext {
    /// Returns cuDNN, if it is installed and enabled. A cuDNN that fails to start is reported once; `doctor` reports a
    /// missing one.
    pub fn dnn(&mut self) -> Option<&Dnn> {
        let open = || {
            if !env_flags::CUDNN.is_on(true) || dylib::load("cuDNN").is_err() {
                return None;
            }
            let made = Dnn::new(&self.device);
            made.map_err(|e| self.notices.push(crate::dnn::left_out(&e))).ok()
        };
        self.dnn.get_or_insert_with(open).as_ref()
    }

    /// cuDNN, if [`DeviceContext::dnn`] has opened it.
    pub fn opened_dnn(&self) -> Option<&Dnn> {
        self.dnn.as_ref()?.as_ref()
    }

    /// Fails if a kernel has reported a bad index. Waits for the device then and lets States be written again.
    fn take_fault(&mut self) -> Result<Option<Fault>> {
        // That of an error before, if nobody asked for it.
        self.fault_origin = None;
        if !self.faults.arrived() {
            return Ok(None);
        }
        self.device.synchronize()?;
        let fault = self.faults.take(self.beside.queued());
        self.device.upload(self.halt.address, &[0; 4])?;
        Ok(fault)
    }

    /// Fails if an earlier run had a bad index; called by a run of `program`.
    pub fn check_faults(&mut self, program: &Arc<Program>) -> std::result::Result<(), Failure> {
        match self.take_fault().map_err(|error| Failure { origin: Origin::NONE, error })? {
            None => Ok(()),
            Some(Fault { program: failed, origin, error }) => {
                if !Arc::ptr_eq(program, &failed) && error.kind != Kind::Elsewhere {
                    self.fault_origin = Some((failed, origin));
                }
                Err(Failure { origin, error })
            }
        }
    }

    /// Fails if a run had a bad index, or if the one that made a downloaded buffer was invalidated by it. `finished`: the last run
    /// that has finished.
    fn check_download(&mut self, finished: u64, maker: u64) -> Result<()> {
        if let Some(Fault { program, origin, error }) = self.take_fault()? {
            self.fault_origin = Some((program, origin)).filter(|_| error.kind != Kind::Elsewhere);
            return Err(error);
        }
        self.faults.finished(finished);
        self.faults.check(maker)
    }
}
