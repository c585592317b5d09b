//! Estimates the device memory of a recipe without the device: a backend that plans for a target, counts buffers and arenas, and
//! computes nothing. Every value that it downloads is zero.

use crate::backend::{Backend, Buffer, DeviceBuffer, Executable, Failure, Memory, RunContext};
use crate::buffer_desc::BufferDesc;
use crate::check::check;
use crate::ir::Program;
use perilune_core::error::{Error, Result};
use perilune_core::graph::Node;
use perilune_core::{Layout, Mesh};
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A device of `bytes` of memory that runs the kernels of `target`, which is asked only how it plans.
///
/// With a mesh it stands for each of its devices, which have equal parts of everything: what it counts is the memory of one.
pub struct Estimate {
    target: Arc<dyn Backend>,
    bytes: usize,
    mesh: Mesh,
    counts: Arc<Counts>,
}

/// Bytes in buffers, and their maximum with the arena of the program that ran.
#[derive(Debug, Default)]
struct Counts {
    allocated: AtomicUsize,
    peak: AtomicUsize,
}

#[derive(Debug)]
struct Counted {
    desc: BufferDesc,
    /// On one device.
    nbytes: usize,
    counts: Arc<Counts>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.counts.allocated.fetch_sub(self.nbytes, Ordering::Relaxed);
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
        Estimate { target, bytes, mesh: Mesh::ONE, counts: Arc::default() }
    }

    /// The same for a device of a mesh.
    #[must_use]
    pub fn of_mesh(self, mesh: Mesh) -> Estimate {
        Estimate { mesh, ..self }
    }
}

struct Counting {
    arena: usize,
    counts: Arc<Counts>,
}

impl Executable for Counting {
    fn run(&self, _: &[Buffer], _: &[u64], _: &[Buffer], _: RunContext<'_>) -> std::result::Result<(), Failure> {
        let now = self.counts.allocated.load(Ordering::Relaxed).saturating_add(self.arena);
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

    fn defers_index_faults(&self) -> bool {
        self.target.defers_index_faults()
    }

    fn mesh(&self) -> Mesh {
        self.mesh
    }

    fn alloc(&self, desc: &BufferDesc) -> Result<Buffer> {
        let nbytes = desc.local(&self.mesh)?.nbytes();
        self.counts.allocated.fetch_add(nbytes, Ordering::Relaxed);
        Ok(Arc::new(Counted { desc: *desc, nbytes, counts: self.counts.clone() }))
    }

    fn upload(&self, desc: &BufferDesc, _: &[u8]) -> Result<Buffer> {
        self.alloc(desc)
    }

    fn download(&self, buffer: &Buffer) -> Result<Vec<u8>> {
        Ok(vec![0; buffer.nbytes()])
    }

    fn memory(&self) -> Memory {
        let allocated = self.counts.allocated.load(Ordering::Relaxed);
        let peak = self.counts.peak.load(Ordering::Relaxed).max(allocated);
        Memory { allocated, reserved: peak, peak, limit: Some(self.bytes) }
    }

    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>> {
        check(&program).map_err(|e| Error::system("plan", format!("this is a bug: {e}")))?;
        Ok(Box::new(Counting { arena: program.arena_bytes, counts: self.counts.clone() }))
    }
}
