//! Estimates the device memory of a recipe without the device: a backend that plans for a target, counts buffers and arenas, and
//! computes nothing. Every value that it downloads is zero.

use crate::backend::{Backend, Buffer, DeviceBuffer, Executable, Failure, Memory, RunContext};
use crate::buffer_desc::BufferDesc;
use crate::check::check;
use crate::ir::Program;
use crate::message_slots::MessageSlots;
use perilune_core::error::{Error, Result};
use perilune_core::graph::Node;
use perilune_core::mesh::Axis;
use perilune_core::{Layout, Mesh};
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A device of `bytes` of memory that runs the kernels of `target`, which is asked only how it plans.
///
/// With a mesh it stands for each of its devices: what it counts is the memory of one. Those with the same pipeline stages have equal
/// parts of everything; along `pp` the one with the most counts.
pub struct Estimate {
    target: Arc<dyn Backend>,
    bytes: usize,
    mesh: Mesh,
    counts: Arc<Counts>,
}

/// Bytes in buffers, and their maximum with the arena of the program that ran.
#[derive(Debug)]
struct Counts {
    /// By coordinate along `pp`.
    allocated: Box<[AtomicUsize]>,
    peak: AtomicUsize,
}

impl Counts {
    fn of(mesh: &Mesh) -> Arc<Counts> {
        let allocated = (0..mesh.size(Axis::Pp)).map(|_| AtomicUsize::new(0)).collect();
        Arc::new(Counts { allocated, peak: AtomicUsize::new(0) })
    }

    /// Bytes of the device along `pp` with the most. `more`: what each has beside its buffers.
    fn most(&self, more: impl Fn(usize) -> usize) -> usize {
        let device = |(k, own): (usize, &AtomicUsize)| own.load(Ordering::Relaxed).saturating_add(more(k));
        self.allocated.iter().enumerate().map(device).max().unwrap_or(0)
    }
}

#[derive(Debug)]
struct Counted {
    desc: BufferDesc,
    /// By coordinate along `pp`.
    nbytes: Box<[usize]>,
    counts: Arc<Counts>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        for (all, own) in self.counts.allocated.iter().zip(&self.nbytes) {
            all.fetch_sub(*own, Ordering::Relaxed);
        }
    }
}

impl DeviceBuffer for Counted {
    fn desc(&self) -> &BufferDesc {
        &self.desc
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Estimate {
    pub fn new(target: Arc<dyn Backend>, bytes: usize) -> Estimate {
        Estimate { target, bytes, mesh: Mesh::ONE, counts: Counts::of(&Mesh::ONE) }
    }

    /// The same for a device of a mesh.
    #[must_use]
    pub fn of_mesh(self, mesh: Mesh) -> Estimate {
        Estimate { mesh, counts: Counts::of(&mesh), ..self }
    }
}

struct Counting {
    /// With the slots of messages, by coordinate along `pp`, or of all devices.
    arenas: Vec<usize>,
    counts: Arc<Counts>,
}

impl Executable for Counting {
    fn run(&self, _: &[Buffer], _: &[u64], _: &[Buffer], _: RunContext<'_>) -> std::result::Result<(), Failure> {
        let arena = |device: usize| self.arenas.get(device).or(self.arenas.last()).copied().unwrap_or(0);
        let now = self.counts.most(arena);
        self.counts.peak.fetch_max(now, Ordering::Relaxed);
        Ok(())
    }
}

impl Backend for Estimate {
    fn name(&self) -> &str {
        self.target.name()
    }

    fn describe(&self) -> String {
        match self.mesh.devices() {
            1 => format!("{}, planned and not run", self.target.describe()),
            n => format!("mesh {} of {n} x {}, planned and not run", self.mesh, self.target.describe()),
        }
    }

    fn has_kernel(&self, node: &Node) -> bool {
        self.target.has_kernel(node)
    }

    fn can_store_layout(&self, node: &Node, output: usize, layout: &Layout) -> bool {
        self.target.can_store_layout(node, output, layout)
    }

    fn row_bytes(&self) -> Option<usize> {
        self.target.row_bytes()
    }

    fn fills_rows(&self) -> bool {
        self.target.fills_rows()
    }

    fn has_host_memory_route(&self) -> bool {
        self.target.has_host_memory_route()
    }

    fn defers_index_faults(&self) -> bool {
        self.target.defers_index_faults()
    }

    fn message_slots(&self) -> Option<MessageSlots> {
        self.target.message_slots()
    }

    fn mesh(&self) -> Mesh {
        self.mesh
    }

    fn alloc(&self, desc: &BufferDesc) -> Result<Buffer> {
        desc.local(&self.mesh)?;
        let devices = 0..self.mesh.size(Axis::Pp);
        let nbytes: Box<[usize]> = devices.map(|device| desc.bytes_along_pp(&self.mesh, device)).collect();
        for (all, own) in self.counts.allocated.iter().zip(&nbytes) {
            all.fetch_add(*own, Ordering::Relaxed);
        }
        Ok(Arc::new(Counted { desc: *desc, nbytes, counts: self.counts.clone() }))
    }

    fn upload(&self, desc: &BufferDesc, _: &[u8]) -> Result<Buffer> {
        self.alloc(desc)
    }

    fn download(&self, buffer: &Buffer) -> Result<Vec<u8>> {
        Ok(vec![0; buffer.nbytes()])
    }

    fn memory(&self) -> Memory {
        let allocated = self.counts.most(|_| 0);
        let peak = self.counts.peak.load(Ordering::Relaxed).max(allocated);
        Memory { allocated, reserved: peak, peak, limit: Some(self.bytes) }
    }

    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>> {
        check(&program).map_err(|e| Error::system("plan", format!("this is a bug: {e}")))?;
        let slots = self.target.message_slots().map_or_else(Vec::new, |slots| slots.held(&program));
        let slots = slots.into_iter().chain(std::iter::repeat(0));
        let arenas = match &program.stages[..] {
            [] => vec![program.arena_bytes],
            stages => stages.iter().zip(slots).map(|(stage, slots)| stage.program.arena_bytes + slots).collect(),
        };
        Ok(Box::new(Counting { arenas, counts: self.counts.clone() }))
    }
}
