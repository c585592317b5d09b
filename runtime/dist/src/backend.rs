//! Implements the `Backend` trait over the devices of a mesh.

use crate::buffer::MeshBuffer;
use crate::exchange::Exchange;
use crate::executable::MeshExecutable;
use crate::workers::Workers;
use perilune_core::error::{Error, Result};
use perilune_core::graph::Node;
use perilune_core::mesh::Axis;
use perilune_core::{DType, Layout, Mesh, Shape, host_memory};
use perilune_plan::ir::{Origin, Program};
use perilune_plan::{Backend, Buffer, BufferDesc, Executable, Memory, Probe, Snapshot};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;

/// The devices of a mesh as one device.
pub struct MeshBackend {
    shared: Arc<Shared>,
}

/// What the programs of a mesh share.
pub(crate) struct Shared {
    pub mesh: Mesh,
    /// By rank.
    pub backends: Vec<Arc<dyn Backend>>,
    pub exchange: Arc<Exchange>,
    pub workers: Workers,
    runs: AtomicU64,
}

impl Shared {
    /// The number of the next run; no other run has it.
    pub fn next_run(&self) -> u64 {
        self.runs.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Calls `f` for each device on its thread.
    fn on_all<T: Send + 'static>(
        self: &Arc<Self>,
        f: impl Fn(usize, &dyn Backend) -> T + Send + Sync + Clone + 'static,
    ) -> Result<Vec<T>> {
        let own = self.clone();
        self.workers.on_all(|_| (), move |rank| f(rank, &*own.backends[rank]))
    }

    fn first(&self) -> &dyn Backend {
        &*self.backends[0]
    }
}

impl MeshBackend {
    /// Joins devices of one kind into a mesh; `backends` are in the order of ranks.
    pub fn new(mesh: Mesh, backends: Vec<Arc<dyn Backend>>) -> Result<MeshBackend> {
        if backends.len() != mesh.devices() {
            let message = format!("mesh {mesh} has {} devices, not {}", mesh.devices(), backends.len());
            return Err(Error::argument("mesh", message));
        }
        if mesh.size(Axis::Pp) > 1 && backends.iter().any(|b| b.name() != "cpu") {
            let message = format!("pp={}: pipeline stages run on CPU devices only in this version", mesh.size(Axis::Pp));
            return Err(Error::argument("mesh", message).hint("use dp, shard or tp on GPUs, or --device cpu"));
        }
        let (workers, exchange) = (Workers::new(backends.len())?, Arc::new(Exchange::new(mesh)));
        let shared = Shared { mesh, backends, exchange, workers, runs: AtomicU64::new(0) };
        Ok(MeshBackend { shared: Arc::new(shared) })
    }

    fn buffer<'a>(&self, buffer: &'a Buffer) -> Result<&'a MeshBuffer> {
        MeshBuffer::of(buffer, &self.shared.mesh)
    }

    /// Copies each element once, from the first device that stores it.
    fn copy(&self, buffers: &[Buffer], room: Option<usize>) -> Result<Snapshot> {
        let Shared { mesh, backends, .. } = &*self.shared;
        let mut wanted: Vec<Vec<Buffer>> = vec![Vec::new(); backends.len()];
        for buffer in buffers {
            let own = self.buffer(buffer)?;
            for rank in own.holders() {
                wanted[rank].push(own.part(rank, &*backends[rank])?);
            }
        }
        let copy = |(backend, parts): (&Arc<dyn Backend>, &Vec<Buffer>)| backend.snapshot(parts, room);
        let copies = backends.iter().zip(&wanted).map(copy).collect::<Result<Vec<_>>>()?;
        let held: Vec<Arc<AtomicUsize>> = copies.iter().map(|c| c.held.clone()).collect();
        let all = Arc::new(AtomicUsize::new(held.iter().map(|h| h.load(Ordering::Acquire)).sum()));
        let waited = copies.iter().find_map(|c| c.waited.clone());
        let (mesh, buffers, left) = (*mesh, buffers.to_vec(), all.clone());
        let bytes = move || {
            let mut parts = Vec::with_capacity(copies.len());
            for copy in copies {
                parts.push((copy.bytes)()?.into_iter());
            }
            let missing = || Error::system("mesh", "this is a bug: a part is missing in a snapshot");
            let mut out = Vec::with_capacity(buffers.len());
            for buffer in &buffers {
                let next = &mut |rank: usize| parts[rank].next().ok_or_else(missing);
                out.push(MeshBuffer::of(buffer, &mesh)?.whole(next)?);
            }
            // Copies in the memory of a device are freed by now; those in host memory live until the caller drops them.
            left.store(held.iter().map(|h| h.load(Ordering::Acquire)).sum(), Ordering::Release);
            Ok(out)
        };
        Ok(Snapshot { held: all, waited, bytes: Box::new(bytes) })
    }

    /// Lets every device raise an error that an earlier run has caused, after one has: a bad index is reported on all of them, and is
    /// one error.
    fn raise_late_faults(&self) {
        for backend in &self.shared.backends {
            // Each raises the error that has been returned, or nothing.
            let word = BufferDesc::new(Shape::SCALAR, DType::I32);
            let _ = backend.upload(&word, &[0; 4]).and_then(|word| backend.download(&word));
        }
    }
}

impl Backend for MeshBackend {
    fn name(&self) -> &str {
        self.shared.first().name()
    }

    fn describe(&self) -> String {
        let Shared { mesh, backends, .. } = &*self.shared;
        format!("mesh {mesh} of {} x {}", backends.len(), backends[0].describe())
    }

    fn has_kernel(&self, node: &Node) -> bool {
        self.shared.first().has_kernel(node)
    }

    fn can_store_layout(&self, node: &Node, output: usize, layout: &Layout) -> bool {
        self.shared.first().can_store_layout(node, output, layout)
    }

    fn row_bytes(&self) -> Option<usize> {
        self.shared.first().row_bytes()
    }

    fn fills_rows(&self) -> bool {
        self.shared.first().fills_rows()
    }

    fn defers_index_faults(&self) -> bool {
        self.shared.first().defers_index_faults()
    }

    fn take_fault_origin(&self) -> Option<(Arc<Program>, Origin)> {
        self.shared.backends.iter().filter_map(|b| b.take_fault_origin()).next()
    }

    fn mesh(&self) -> Mesh {
        self.shared.mesh
    }

    fn alloc(&self, desc: &BufferDesc) -> Result<Buffer> {
        Ok(Arc::new(MeshBuffer::new(desc, self.shared.mesh, None)))
    }

    fn upload(&self, desc: &BufferDesc, bytes: &[u8]) -> Result<Buffer> {
        if bytes.len() != desc.nbytes() {
            let message = format!("this is a bug: {} bytes for a tensor of {}", bytes.len(), desc.nbytes());
            return Err(Error::system("mesh", message));
        }
        host_memory::check("mesh", bytes.len())?;
        Ok(Arc::new(MeshBuffer::new(desc, self.shared.mesh, Some(bytes.into()))))
    }

    fn download(&self, buffer: &Buffer) -> Result<Vec<u8>> {
        let buffer = self.buffer(buffer)?;
        let backends = &self.shared.backends;
        let bytes = buffer.whole(&mut |rank| backends[rank].download(&buffer.part(rank, &*backends[rank])?));
        bytes.inspect_err(|_| self.raise_late_faults())
    }

    fn snapshot(&self, buffers: &[Buffer], room: Option<usize>) -> Result<Snapshot> {
        self.copy(buffers, room).inspect_err(|_| self.raise_late_faults())
    }

    /// The memory of the device that uses the most.
    fn memory(&self) -> Memory {
        let all = self.shared.backends.iter().map(|b| b.memory());
        all.max_by_key(|m| (m.peak, m.allocated)).unwrap_or_default()
    }

    fn source(&self, program: &Program, k: usize) -> Option<Result<String>> {
        self.shared.first().source(program, k)
    }

    /// The peak of all devices together.
    fn peak_flops(&self, precision: &str) -> Option<f64> {
        Some(self.shared.first().peak_flops(precision)? * self.shared.backends.len() as f64)
    }

    fn probe(&self) -> Option<Probe> {
        self.shared.first().probe()
    }

    fn take_notices(&self) -> Vec<String> {
        let mut all: Vec<String> = self.shared.backends.iter().flat_map(|b| b.take_notices()).collect();
        all.dedup();
        all
    }

    /// The devices are of one kind: code for one is code for all.
    fn prepare(&self, programs: &[Program]) -> Result<Option<JoinHandle<()>>> {
        self.shared.first().prepare(programs)
    }

    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>> {
        if !program.stages.is_empty() {
            let stages = program.stages.clone();
            let mesh = self.shared.mesh;
            let compile = move |rank: usize, b: &dyn Backend| {
                b.compile(stages[mesh.coordinates(rank)[Axis::Pp as usize]].program.clone())
            };
            let devices = self.shared.on_all(compile)?.into_iter().collect::<Result<Vec<_>>>()?.into();
            return Ok(Box::new(MeshExecutable { shared: self.shared.clone(), program, devices }));
        }
        // The first device generates machine code, which the others find in the cache.
        let first = self.shared.first().compile(program.clone())?;
        let same = program.clone();
        let compile = move |rank: usize, b: &dyn Backend| (rank > 0).then(|| b.compile(same.clone())).transpose();
        let others = self.shared.on_all(compile)?.into_iter().collect::<Result<Vec<_>>>()?;
        let devices = std::iter::once(first).chain(others.into_iter().flatten()).collect::<Vec<_>>().into();
        Ok(Box::new(MeshExecutable { shared: self.shared.clone(), program, devices }))
    }
}
