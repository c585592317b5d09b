//! Implements the CPU backend: buffers, the shared arena, and the compilation and execution of programs.

use crate::fingerprint::Words;
use crate::lanes::{Chaos, Lanes, freed};
use crate::library::Routine;
use crate::loops::Isa;
use crate::memory::{Block, CpuBuffer, FreeList};
use crate::region::{self, Context, PARALLEL_NS, Region};
use crate::worker_pool::{SendPtr, WorkerPool};
use perilune_core::error::{Error, Result};
use perilune_core::graph::Node;
use perilune_core::ops::join;
use perilune_core::ops::matmul::{LINEAR, MATMUL};
use perilune_core::{DType, Layout, host_memory};
use perilune_plan::ir::{InFlight, Kernel, Program, Storage};
use perilune_plan::{Backend, Buffer, BufferDesc, DeviceBuffer, Executable, Failure, Memory, RunContext, Snapshot};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Number of bytes that one task copies.
const COPY_CHUNK: usize = 1 << 20;

/// The CPU device.
pub struct Cpu {
    state: Arc<DeviceState>,
    isa: Isa,
    chaos: Option<Arc<Chaos>>,
}

/// The state that all programs of a device share.
struct DeviceState {
    pool: WorkerPool,
    free_list: Arc<FreeList>,
    /// Intermediate values of the running program; as large as the largest program needs. Its lock is the device's lock: it is
    /// held during every access to the memory of a buffer.
    arena: Mutex<Block>,
}

impl DeviceState {
    fn lock(&self) -> MutexGuard<'_, Block> {
        // Every run writes intermediate values before it reads them, so a panic leaves nothing invalid.
        self.arena.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Downcasts a buffer to this device's type.
    fn buffer<'a>(&self, buffer: &'a Buffer) -> Result<&'a CpuBuffer> {
        let found = buffer.as_any().downcast_ref::<CpuBuffer>().filter(|b| b.is_of(&self.free_list));
        found.ok_or_else(|| Error::system("cpu", "this is a bug: a buffer of another device was passed"))
    }
}

impl Cpu {
    /// Creates a device with that many threads; `None` selects as many as the machine has.
    pub fn new(threads: Option<usize>) -> Cpu {
        Cpu::limited(threads, None)
    }

    /// Creates a device whose buffers and arena take at most `limit` bytes.
    pub fn limited(threads: Option<usize>, limit: Option<usize>) -> Cpu {
        let arena = Block::new(0).unwrap_or_else(|e| panic!("{e}"));
        let free_list = Arc::new(FreeList::new(limit));
        let state = DeviceState { pool: WorkerPool::new(threads), free_list, arena: Mutex::new(arena) };
        // The command checks this flag first and reports a missing instruction set (`Isa::chosen`).
        Cpu { state: Arc::new(state), isa: Isa::chosen().unwrap_or(Isa::detect()), chaos: None }
    }

    /// The same device, with collectives delayed at random and memory without a value poisoned: for tests (see `crate::lanes`).
    #[must_use]
    pub fn chaotic(self, seed: u64) -> Cpu {
        Cpu { chaos: Some(Arc::new(Chaos::new(seed))), ..self }
    }

    pub fn threads(&self) -> usize {
        self.state.pool.threads()
    }
}

impl Backend for Cpu {
    fn name(&self) -> &str {
        "cpu"
    }

    fn describe(&self) -> String {
        let n = self.threads();
        format!("cpu ({n} thread{}, {})", if n == 1 { "" } else { "s" }, self.isa.name())
    }

    fn has_kernel(&self, node: &Node) -> bool {
        // In other dtypes `linear` is decomposed, so that its bias can fuse with the maps that follow.
        node.op == &LINEAR && node.dtype.size() == 2
    }

    fn can_store_layout(&self, node: &Node, output: usize, _: &Layout) -> bool {
        let supported = node.op == &MATMUL && node.dtype == DType::F32 || node.op == &join::CAT;
        output == 0 && supported
    }

    fn alloc(&self, desc: &BufferDesc) -> Result<Buffer> {
        Ok(Arc::new(CpuBuffer::new(desc, &self.state.free_list)?))
    }

    fn upload(&self, desc: &BufferDesc, bytes: &[u8]) -> Result<Buffer> {
        let buffer = CpuBuffer::new(desc, &self.state.free_list)?;
        if bytes.len() != buffer.nbytes() {
            let message = format!("this is a bug: {} bytes for a buffer of {}", bytes.len(), buffer.nbytes());
            return Err(Error::system("cpu", message));
        }
        // SAFETY: no other code has the buffer yet.
        unsafe { buffer.write(bytes) };
        Ok(Arc::new(buffer))
    }

    fn download(&self, buffer: &Buffer) -> Result<Vec<u8>> {
        let mut out = host_memory::reserve("cpu", buffer.nbytes())?;
        let _lock = self.state.lock();
        // SAFETY: the device is locked.
        out.extend_from_slice(unsafe { self.state.buffer(buffer)?.read() });
        Ok(out)
    }

    /// Copies synchronously, on all threads: fresh memory costs a page fault for each page.
    fn snapshot(&self, buffers: &[Buffer], _room: Option<usize>) -> Result<Snapshot> {
        let _lock = self.state.lock();
        let mut all = Vec::with_capacity(buffers.len());
        for buffer in buffers {
            // SAFETY: the device is locked.
            let from = unsafe { self.state.buffer(buffer)?.read() };
            let mut to = host_memory::filled("cpu", from.len())?;
            self.state.pool.for_each_chunk(from.len() > COPY_CHUNK, &mut to, COPY_CHUNK, |k, piece| {
                piece.copy_from_slice(&from[k * COPY_CHUNK..k * COPY_CHUNK + piece.len()]);
            });
            all.push(to);
        }
        Ok(Snapshot::of(all))
    }

    fn memory(&self) -> Memory {
        self.state.free_list.memory()
    }

    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>> {
        perilune_plan::check::check(&program).map_err(|e| Error::system("plan", format!("this is a bug: {e}")))?;
        let kernels = program.kernels.iter().map(|k| compile(&program, k, self.isa)).collect::<Result<Vec<_>>>()?;
        let parallel = self.threads() > 1 && kernels.iter().any(|k| k.work() > PARALLEL_NS);
        let state = |v: &perilune_plan::ir::ValueId| matches!(program.values[v.0 as usize].storage, Storage::Input(_));
        let first_state_write = program.kernels.iter().position(|k| k.writes().iter().any(state)).unwrap_or(usize::MAX);
        let threads = self.threads();
        let temporary_bytes = kernels.iter().map(|k| k.temporary_bytes(threads)).max().unwrap_or(0);
        let program = known_indices(program, &kernels, first_state_write);
        let index_checks = IndexChecks::of(&program, &kernels, first_state_write);
        Ok(Box::new(CpuProgram {
            state: self.state.clone(),
            chaos: self.chaos.clone(),
            freed: if self.chaos.is_some() { freed(&program) } else { Vec::new() },
            program,
            kernels,
            parallel,
            first_state_write,
            index_checks,
            temporary_bytes,
            has_run: AtomicBool::new(false),
        }))
    }
}

/// Compiles one kernel of a program for an instruction set.
pub(crate) fn compile(program: &Program, kernel: &Kernel, isa: Isa) -> Result<CompiledKernel> {
    let region = |r| region::compile(program, r, isa);
    Ok(match kernel {
        Kernel::Region(r) => CompiledKernel::Region(region(r)?),
        Kernel::Multi(list) => CompiledKernel::Multi(list.iter().map(region).collect::<Result<_>>()?),
        Kernel::Library(l) => {
            CompiledKernel::Library(Routine::compile(program, l, isa)?, l.epilogue.as_ref().map(region).transpose()?)
        }
    })
}

pub(crate) enum CompiledKernel {
    Region(Region),
    Multi(Vec<Region>),
    /// A library op and its epilogue. The epilogue runs after the whole op; it is elementwise, so the bits are the
    /// same.
    Library(Routine, Option<Region>),
}

impl CompiledKernel {
    /// See `Region::temporary_bytes`.
    fn temporary_bytes(&self, threads: usize) -> usize {
        let region = |r: &Region| r.temporary_bytes(threads);
        match self {
            CompiledKernel::Region(r) => region(r),
            CompiledKernel::Multi(list) => list.iter().map(region).max().unwrap_or(0),
            CompiledKernel::Library(l, e) => l.temporary_bytes().max(e.as_ref().map_or(0, region)),
        }
    }

    fn work(&self) -> f64 {
        match self {
            CompiledKernel::Region(r) => r.work(),
            CompiledKernel::Multi(list) => list.iter().map(Region::work).sum(),
            CompiledKernel::Library(l, e) => l.work() + e.as_ref().map_or(0.0, Region::work),
        }
    }

    /// See `crate::fingerprint`.
    pub fn fingerprint(&self, words: &mut Words) {
        match self {
            CompiledKernel::Region(r) => {
                words.put(0);
                r.fingerprint(words);
            }
            CompiledKernel::Multi(list) => {
                words.put(1);
                words.put(list.len());
                list.iter().for_each(|r| r.fingerprint(words));
            }
            CompiledKernel::Library(l, e) => {
                words.put(2);
                l.fingerprint(words);
                words.put(usize::from(e.is_some()));
                e.iter().for_each(|r| r.fingerprint(words));
            }
        }
    }
}

/// How a program with a bad index leaves its States as they were.
#[derive(Default)]
struct IndexChecks {
    /// Kernels after the first State write whose indices are known before it: they are checked there.
    early: Vec<usize>,
    /// The other kernels after it that take indices: those are computed after the first State write.
    late: Vec<usize>,
    /// Inputs that are written before a kernel of `late`: they are copied, and restored if that kernel fails.
    restored: Vec<u32>,
}

/// A program in which collectives whose results later kernels take as indices are waited for where these are checked, before the first
/// State write.
fn known_indices(program: Arc<Program>, kernels: &[CompiledKernel], first_state_write: usize) -> Arc<Program> {
    let storage = |v: u32| program.values[v as usize].storage;
    let later = kernels.iter().skip(first_state_write);
    let indices: Vec<u32> = later
        .filter_map(|k| if let CompiledKernel::Library(routine, _) = k { routine.index_operand() } else { None })
        .flatten()
        .collect();
    let is_index = |at: usize| {
        let written = program.kernels[at].writes();
        indices.iter().any(|index| written.iter().any(|v| v.0 == *index || storage(v.0) == storage(*index)))
    };
    let is_early = |f: &InFlight| f.start < first_state_write && f.wait > first_state_write && is_index(f.start);
    if !program.in_flight.iter().any(is_early) {
        return program;
    }
    let mut known = (*program).clone();
    for flight in &mut known.in_flight {
        if is_early(flight) {
            flight.wait = first_state_write;
        }
    }
    Arc::new(known)
}

impl IndexChecks {
    fn of(program: &Program, kernels: &[CompiledKernel], first_state_write: usize) -> IndexChecks {
        let mut out = IndexChecks::default();
        let storage = |v: &perilune_plan::ir::ValueId| program.values[v.0 as usize].storage;
        for at in first_state_write..kernels.len() {
            let CompiledKernel::Library(routine, _) = &kernels[at] else { continue };
            let Some(operand) = routine.index_operand() else { continue };
            let since = &program.kernels[first_state_write..at];
            let is_written = |value: u32| {
                let own = program.values[value as usize].storage;
                since.iter().flat_map(Kernel::writes).any(|v| v.0 == value || storage(&v) == own)
            };
            if !operand.is_some_and(is_written) {
                out.early.push(at);
                continue;
            }
            out.late.push(at);
            for v in since.iter().flat_map(Kernel::writes) {
                if let Storage::Input(k) = storage(&v)
                    && !out.restored.contains(&k)
                {
                    out.restored.push(k);
                }
            }
        }
        out
    }
}

struct CpuProgram {
    state: Arc<DeviceState>,
    chaos: Option<Arc<Chaos>>,
    /// For chaos: the bytes of the arena that each kernel is the last to use.
    freed: Vec<Vec<Range<usize>>>,
    program: Arc<Program>,
    kernels: Vec<CompiledKernel>,
    /// Whether at least one kernel is large enough for more than one thread.
    parallel: bool,
    /// The first kernel that writes a State. A run can be cancelled before it.
    first_state_write: usize,
    index_checks: IndexChecks,
    /// The most that a kernel allocates besides its values, and whether the machine was seen to have it.
    temporary_bytes: usize,
    has_run: AtomicBool,
}

impl CpuProgram {
    /// The address of each value in this run.
    fn addresses(&self, inputs: &[Buffer], outputs: &[Buffer], arena: &Block) -> Result<Vec<SendPtr<u8>>> {
        let p = &self.program;
        let bound = |list: &[Buffer], k: usize, nbytes: usize| -> Result<*mut u8> {
            match list.get(k) {
                Some(b) if b.nbytes() >= nbytes => Ok(self.state.buffer(b)?.ptr()),
                _ => Err(Error::system(
                    "cpu",
                    format!("this is a bug: buffer {k} is missing or smaller than {nbytes} bytes"),
                )),
            }
        };
        let mut addresses = Vec::with_capacity(p.values.len());
        for v in &p.values {
            addresses.push(SendPtr(match v.storage {
                Storage::Input(k) => bound(inputs, k as usize, v.nbytes())?,
                Storage::Output(k) => bound(outputs, k as usize, v.nbytes())?,
                // SAFETY: `check` holds arena values within `arena_bytes`, and the arena has at least those.
                Storage::Arena(at) => unsafe { arena.ptr().add(at) },
            }));
        }
        Ok(addresses)
    }
}

/// Waits for the collectives that end before kernel `at`. The wait is a part of their time, and so is the time in flight, which is
/// `hidden`.
fn wait(
    lanes: &mut Lanes,
    at: usize,
    times: &mut Option<&mut [f64]>,
    hidden: &mut Option<&mut [f64]>,
) -> std::result::Result<(), Failure> {
    for (k, [in_flight, waited]) in lanes.wait(at)? {
        times.iter_mut().for_each(|times| times[k] += waited);
        hidden.iter_mut().for_each(|hidden| hidden[k] += in_flight);
    }
    Ok(())
}

impl Executable for CpuProgram {
    fn run(
        &self,
        inputs: &[Buffer],
        slots: &[u64],
        outputs: &[Buffer],
        context: RunContext<'_>,
    ) -> std::result::Result<(), Failure> {
        let origin = self.program.kernels.first().map_or(perilune_plan::ir::Origin::NONE, |k| k.origin());
        let fail = |error| Failure { origin, error };
        if slots.len() < self.program.slots.len() {
            return Err(fail(Error::system("cpu", "this is a bug: a run-time number is missing")));
        }
        let RunContext { interrupt, mut times, mut hidden, peers } = context;
        let mut arena = self.state.lock();
        self.state.free_list.enlarge(&mut arena, self.program.arena_bytes).map_err(fail)?;
        let values = self.addresses(inputs, outputs, &arena).map_err(fail)?;
        let context = Context { values: &values, slots, pool: &self.state.pool, peers };
        let (kernels, plan) = (&self.kernels[..], &self.program.kernels[..]);
        if !self.has_run.load(Ordering::Relaxed) {
            // Before any State is written: a kernel without memory for its temporaries fails in the middle of a step.
            host_memory::check("cpu", self.temporary_bytes).map_err(fail)?;
            self.has_run.store(true, Ordering::Relaxed);
        }
        let mut before: Vec<(&CpuBuffer, Vec<u8>)> = Vec::new();
        for k in &self.index_checks.restored {
            let input = &inputs[*k as usize];
            let buffer = self.state.buffer(input).map_err(fail)?;
            let mut bytes = host_memory::reserve("cpu", input.nbytes()).map_err(fail)?;
            // SAFETY: the device is locked.
            bytes.extend_from_slice(unsafe { buffer.read() });
            before.push((buffer, bytes));
        }
        let run = |r: &Region, at: usize| r.run(&context).map_err(|error| Failure { origin: plan[at].origin(), error });
        // Either all devices of a mesh write their States, or none.
        let agree = |lanes: &mut Lanes, at: usize| {
            let Some(peers) = peers else { return Ok(()) };
            lanes.send_all()?;
            peers.barrier().map_err(|error| Failure { origin: plan[at].origin(), error })
        };
        let chaos = self.chaos.as_deref();
        if chaos.is_some() {
            // SAFETY: the device is locked, and the arena has that many bytes.
            unsafe { arena.ptr().write_bytes(0xff, self.program.arena_bytes) };
        }
        let mut lanes = Lanes::new(&self.program, kernels, &context, chaos);
        let mut all = || {
            for (at, k) in kernels.iter().enumerate() {
                if at <= self.first_state_write {
                    let stop = |error| Failure { origin: plan[at].origin(), error };
                    interrupt.check().map_err(stop)?;
                }
                wait(&mut lanes, at, &mut times, &mut hidden)?;
                if at == self.first_state_write {
                    for &later in &self.index_checks.early {
                        if let CompiledKernel::Library(routine, _) = &kernels[later] {
                            routine.check_indices(&context)?;
                        }
                    }
                    agree(&mut lanes, at)?;
                }
                lanes.poison(at, &self.freed, arena.ptr());
                let start = times.is_some().then(std::time::Instant::now);
                match k {
                    _ if lanes.start(at)? => {}
                    CompiledKernel::Region(r) => run(r, at)?,
                    CompiledKernel::Multi(list) => region::run_many(list, &context)
                        .map_err(|error| Failure { origin: plan[at].origin(), error })?,
                    CompiledKernel::Library(l, e) => {
                        l.run(&context)?;
                        e.iter().try_for_each(|r| run(r, at))?
                    }
                }
                if self.index_checks.late.contains(&at) {
                    agree(&mut lanes, at)?;
                }
                if let (Some(times), Some(start)) = (&mut times, start) {
                    times[at] += start.elapsed().as_secs_f64();
                }
                lanes.disturb()?;
            }
            wait(&mut lanes, kernels.len(), &mut times, &mut hidden)
        };
        if self.parallel {
            self.state.pool.wake_all();
        }
        all().inspect_err(|_| {
            for (buffer, bytes) in &before {
                // SAFETY: the device is locked, and no kernel runs any more.
                unsafe { buffer.write(bytes) };
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_send_sync<T: Send + Sync>() {}

    /// A compile-time assertion: the device, its buffers and its programs may move to another thread.
    #[test]
    fn device_buffers_and_programs_are_send() {
        assert_send_sync::<Cpu>();
        assert_send_sync::<CpuBuffer>();
        assert_send_sync::<CpuProgram>();
    }
}
