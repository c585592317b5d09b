//! The device itself: buffers, the shared arena, compiled programs and how they run.

use crate::library::Routine;
use crate::loops::Isa;
use crate::memory::{Block, CpuBuffer, FreeList};
use crate::region::{self, Context, PARALLEL_NS, Region};
use crate::worker_pool::{SendPtr, WorkerPool};
use perilune_core::error::{Error, Result};
use perilune_core::graph::Node;
use perilune_core::ops::matmul::{LINEAR, MATMUL};
use perilune_core::ops::movement;
use perilune_core::{DType, Layout};
use perilune_plan::ir::{Kernel, Program, Storage};
use perilune_plan::{Backend, Buffer, Executable, Failure, Memory, Snapshot};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// Bytes that one thread copies at a time.
const COPIED: usize = 1 << 20;

/// The CPU as a device.
pub struct Cpu {
    shared: Rc<Machine>,
    isa: Isa,
}

/// What all programs of a device share.
struct Machine {
    pool: WorkerPool,
    free: Rc<FreeList>,
    /// Intermediate values of whichever program runs; as large as the largest needs.
    arena: RefCell<Block>,
}

impl Cpu {
    /// A device of that many threads; `None`: as many as the machine has.
    pub fn new(threads: Option<usize>) -> Cpu {
        Cpu::limited(threads, None)
    }

    /// A device whose buffers and arena take at most `limit` bytes.
    pub fn limited(threads: Option<usize>, limit: Option<usize>) -> Cpu {
        let arena = Block::new(0).unwrap_or_else(|e| panic!("{e}"));
        let free = Rc::new(FreeList::new(limit));
        let shared = Machine { pool: WorkerPool::new(threads), free, arena: RefCell::new(arena) };
        Cpu { shared: Rc::new(shared), isa: Isa::detect() }
    }

    pub fn threads(&self) -> usize {
        self.shared.pool.threads()
    }
}

fn cpu_buffer(buffer: &Buffer) -> Result<&CpuBuffer> {
    let found = buffer.as_any().downcast_ref();
    found.ok_or_else(|| Error::system("cpu", "this is a bug: a buffer of another device was passed"))
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
        // Elsewhere the bias can share a map with what follows.
        node.op == &LINEAR && node.dtype.size() == 2
    }

    fn can_store_layout(&self, node: &Node, output: usize, _: &Layout) -> bool {
        let swaps = node.op == &MATMUL && node.dtype == DType::F32 || node.op == &movement::CAT;
        output == 0 && swaps
    }

    fn alloc(&self, nbytes: usize) -> Result<Buffer> {
        Ok(Rc::new(CpuBuffer::new(nbytes, &self.shared.free)?))
    }

    fn upload(&self, bytes: &[u8]) -> Result<Buffer> {
        let buffer = CpuBuffer::new(bytes.len(), &self.shared.free)?;
        buffer.write(bytes);
        Ok(Rc::new(buffer))
    }

    fn download(&self, buffer: &Buffer, nbytes: usize) -> Result<Vec<u8>> {
        if buffer.nbytes() < nbytes {
            return Err(Error::system("cpu", format!("this is a bug: {nbytes} bytes read of {}", buffer.nbytes())));
        }
        Ok(cpu_buffer(buffer)?.read(nbytes).to_vec())
    }

    fn write(&self, buffer: &Buffer, bytes: &[u8]) -> Result<()> {
        if buffer.nbytes() < bytes.len() {
            let message = format!("this is a bug: {} bytes written to a buffer of {}", bytes.len(), buffer.nbytes());
            return Err(Error::system("cpu", message));
        }
        cpu_buffer(buffer)?.write(bytes);
        Ok(())
    }

    /// The loop waits for the copies, so the threads share them: fresh memory costs a fault for each page.
    fn snapshot(&self, parts: &[(Buffer, usize)], _room: Option<usize>) -> Result<Snapshot> {
        let mut all = Vec::with_capacity(parts.len());
        for (buffer, nbytes) in parts {
            if buffer.nbytes() < *nbytes {
                let message = format!("this is a bug: {nbytes} bytes saved of {}", buffer.nbytes());
                return Err(Error::system("cpu", message));
            }
            let from = cpu_buffer(buffer)?.read(*nbytes);
            let mut to = vec![0; *nbytes];
            self.shared.pool.for_each_chunk(*nbytes > COPIED, &mut to, COPIED, |k, piece| {
                piece.copy_from_slice(&from[k * COPIED..k * COPIED + piece.len()]);
            });
            all.push(to);
        }
        Ok(Snapshot::of(all))
    }

    fn memory(&self) -> Memory {
        self.shared.free.memory()
    }

    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>> {
        perilune_plan::check::check(&program).map_err(|e| Error::system("plan", format!("this is a bug: {e}")))?;
        let mut kernels = Vec::with_capacity(program.kernels.len());
        for k in &program.kernels {
            kernels.push(match k {
                Kernel::Region(r) => Compiled::Region(region::compile(&program, r, self.isa)?),
                Kernel::Multi(list) => {
                    Compiled::Multi(list.iter().map(|r| region::compile(&program, r, self.isa)).collect::<Result<_>>()?)
                }
                Kernel::Library(l) => Compiled::Library(
                    Routine::compile(&program, l, self.isa)?,
                    l.epilogue.as_ref().map(|r| region::compile(&program, r, self.isa)).transpose()?,
                ),
            });
        }
        let share = self.threads() > 1 && kernels.iter().any(|k| k.work() > PARALLEL_NS);
        let state = |v: &perilune_plan::ir::ValueId| matches!(program.values[v.0 as usize].storage, Storage::Input(_));
        let whole = program.kernels.iter().position(|k| k.writes().iter().any(state)).unwrap_or(usize::MAX);
        Ok(Box::new(CpuProgram { shared: self.shared.clone(), program, kernels, share, whole }))
    }
}

enum Compiled {
    Region(Region),
    Multi(Vec<Region>),
    /// With its epilogue, which runs once the whole result is there: it is a map, so that changes no bits.
    Library(Routine, Option<Region>),
}

impl Compiled {
    fn work(&self) -> f64 {
        match self {
            Compiled::Region(r) => r.work(),
            Compiled::Multi(list) => list.iter().map(Region::work).sum(),
            Compiled::Library(l, e) => l.work() + e.as_ref().map_or(0.0, Region::work),
        }
    }
}

struct CpuProgram {
    shared: Rc<Machine>,
    program: Arc<Program>,
    kernels: Vec<Compiled>,
    /// Whether some kernel is worth more than one thread.
    share: bool,
    /// The first kernel that writes a State: up to there a run may be given up.
    whole: usize,
}

impl CpuProgram {
    /// Where each value lies in this run.
    fn places(&self, inputs: &[Buffer], outputs: &[Buffer], arena: &Block) -> Result<Vec<SendPtr<u8>>> {
        let p = &self.program;
        let given = |list: &[Buffer], k: usize, nbytes: usize| -> Result<*mut u8> {
            match list.get(k) {
                Some(b) if b.nbytes() >= nbytes => Ok(cpu_buffer(b)?.ptr()),
                _ => Err(Error::system(
                    "cpu",
                    format!("this is a bug: buffer {k} is missing or smaller than {nbytes} bytes"),
                )),
            }
        };
        let mut places = Vec::with_capacity(p.values.len());
        for v in &p.values {
            places.push(SendPtr(match v.storage {
                Storage::Input(k) => given(inputs, k as usize, v.nbytes())?,
                Storage::Output(k) => given(outputs, k as usize, v.nbytes())?,
                // SAFETY: `check` holds arena values within `arena_bytes`, and the arena has at least those.
                Storage::Arena(at) => unsafe { arena.ptr().add(at) },
            }));
        }
        Ok(places)
    }
}

impl Executable for CpuProgram {
    fn run(
        &self,
        inputs: &[Buffer],
        slots: &[u64],
        outputs: &[Buffer],
        mut times: Option<&mut [f64]>,
    ) -> std::result::Result<(), Failure> {
        let origin = self.program.kernels.first().map_or(perilune_plan::ir::Origin::NONE, |k| k.origin());
        let fail = |error| Failure { origin, error };
        if slots.len() < self.program.slots.len() {
            return Err(fail(Error::system("cpu", "this is a bug: a run-time number is missing")));
        }
        let mut arena = self.shared.arena.borrow_mut();
        self.shared.free.enlarge(&mut arena, self.program.arena_bytes).map_err(fail)?;
        let values = self.places(inputs, outputs, &arena).map_err(fail)?;
        let context = Context { values: &values, slots, pool: &self.shared.pool };
        let (kernels, plan, whole) = (&self.kernels[..], &self.program.kernels[..], self.whole);
        let run = |r: &Region, at: usize| r.run(&context).map_err(|error| Failure { origin: plan[at].origin(), error });
        let mut all = || {
            for (at, k) in kernels.iter().enumerate() {
                if at <= whole {
                    let stop = |error| Failure { origin: plan[at].origin(), error };
                    perilune_core::interrupt::check().map_err(stop)?;
                }
                let start = times.is_some().then(std::time::Instant::now);
                match k {
                    Compiled::Region(r) => run(r, at)?,
                    Compiled::Multi(list) => region::run_many(list, &context)
                        .map_err(|error| Failure { origin: plan[at].origin(), error })?,
                    Compiled::Library(l, e) => {
                        l.run(&context)?;
                        e.iter().try_for_each(|r| run(r, at))?
                    }
                }
                if let (Some(times), Some(start)) = (&mut times, start) {
                    times[at] += start.elapsed().as_secs_f64();
                }
            }
            Ok(())
        };
        if self.share {
            self.shared.pool.wake_all();
        }
        all()
    }
}
