//! Implements the `Backend` trait over the devices of a mesh.
//!
//! A process drives some of the devices, or all. In a job of several processes each one records the same steps and makes the same
//! calls of its backend in the same order; a call that needs what another process has (a part of a divided tensor) exchanges it
//! over the links, in all processes.

use crate::buffer::MeshBuffer;
use crate::exchange::Exchange;
use crate::executable::MeshExecutable;
use crate::links::Links;
use crate::workers::Workers;
use perilune_core::error::{Error, Kind, Result};
use perilune_core::graph::Node;
use perilune_core::mesh::Axis;
use perilune_core::{DType, Layout, Mesh, Shape, host_memory};
use perilune_plan::ir::{Origin, Program};
use perilune_plan::{Backend, Buffer, BufferDesc, Executable, Fingerprint, Memory, Probe, Snapshot};
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
    /// The ranks of the devices that this process drives, ascending, and their backends.
    pub ranks: Vec<usize>,
    pub backends: Vec<Arc<dyn Backend>>,
    pub exchange: Arc<Exchange>,
    pub workers: Workers,
    /// The other processes that drive devices of the mesh.
    pub processes: Option<Processes>,
    runs: AtomicU64,
}

/// The processes of a mesh whose devices several of them drive.
pub(crate) struct Processes {
    links: Arc<Links>,
    /// The ranks of the devices of each process.
    ranks: Vec<Vec<usize>>,
}

impl Shared {
    /// The number of the next run; no other run has it.
    pub fn next_run(&self) -> u64 {
        self.runs.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Calls `f` for each device of this process on its thread, with its place among them.
    fn on_all<T: Send + 'static>(
        self: &Arc<Self>,
        f: impl Fn(usize, &dyn Backend) -> T + Send + Sync + Clone + 'static,
    ) -> Result<Vec<T>> {
        let own = self.clone();
        self.workers.on_all(|_| (), move |k| f(k, &*own.backends[k]))
    }

    /// How many devices of this process have a part of such a tensor.
    fn holding(&self, desc: &BufferDesc) -> usize {
        let has = |rank: &&usize| desc.placement.is_held(&self.mesh.coordinates(**rank));
        if self.mesh.size(Axis::Pp) > 1 { self.ranks.iter().filter(has).count() } else { self.ranks.len() }
    }

    fn first(&self) -> &dyn Backend {
        &*self.backends[0]
    }

    /// The backend of a device that this process drives.
    fn backend(&self, rank: usize) -> Result<&Arc<dyn Backend>> {
        let found = self.ranks.binary_search(&rank).ok().map(|k| &self.backends[k]);
        found.ok_or_else(|| Error::system("mesh", format!("this is a bug: another process drives device {rank}")))
    }

    /// The devices of this process that have a whole tensor together; `None` if some process lacks a part, and all of them have to
    /// exchange theirs.
    fn own_holders(&self, buffer: &MeshBuffer) -> Option<Vec<usize>> {
        let own = buffer.holders(&self.ranks)?;
        let others = self.processes.as_ref().is_none_or(|p| p.ranks.iter().all(|r| buffer.holders(r).is_some()));
        others.then_some(own)
    }
}

/// Bytes that a process sends at once where process 0 gathers a tensor.
const GATHERED_AT_ONCE: usize = 64 << 20;

impl Processes {
    /// Downloads this process's share of a tensor that no process has whole: those of its parts of which it has the first copy.
    fn share(&self, shared: &Shared, buffer: &MeshBuffer) -> Result<(Vec<usize>, Vec<u8>)> {
        let all: Vec<usize> = (0..shared.mesh.devices()).collect();
        let missing = || Error::system("mesh", "this is a bug: no device has a part of a tensor");
        let holders = buffer.holders(&all).ok_or_else(missing)?;
        let mut own = Vec::new();
        for rank in holders.iter().filter(|rank| shared.ranks.contains(rank)) {
            let backend = shared.backend(*rank)?;
            own.extend(backend.download(&buffer.part(*rank, &**backend)?)?);
        }
        Ok((holders, own))
    }

    /// Joins the shares of all processes to the tensor.
    fn join(&self, buffer: &MeshBuffer, holders: &[usize], shares: &[Arc<[u8]>]) -> Result<Vec<u8>> {
        let size = buffer.local_bytes()?;
        let mut taken = vec![0; shares.len()];
        buffer.whole(holders, &mut |rank| {
            let wrong = || Error::system("mesh", "this is a bug: the share of a process is too short");
            let process = self.ranks.iter().position(|ranks| ranks.contains(&rank)).ok_or_else(wrong)?;
            let from = taken[process];
            taken[process] += size;
            let part = shares.get(process).and_then(|share| share.get(from..from + size));
            Ok(part.ok_or_else(wrong)?.to_vec())
        })
    }

    /// The elements of a tensor that no process has whole, in all processes.
    fn whole(&self, shared: &Shared, buffer: &MeshBuffer) -> Result<Vec<u8>> {
        let (holders, own) = self.share(shared, buffer)?;
        let shares = self.links.all_gather("the parts of a tensor", &own)?;
        self.join(buffer, &holders, &shares)
    }

    /// The elements of a tensor that no process has whole, in process 0; `None` in the others.
    fn gather(&self, shared: &Shared, buffer: &MeshBuffer) -> Result<Option<Vec<u8>>> {
        let (holders, own) = self.share(shared, buffer)?;
        let of = |ranks: &Vec<usize>| ranks.iter().filter(|rank| holders.contains(rank)).count();
        let most = self.ranks.iter().map(of).max().unwrap_or(0) * buffer.local_bytes()?;
        let mut shares = vec![Vec::new(); self.ranks.len()];
        for round in 0..most.div_ceil(GATHERED_AT_ONCE) {
            let from = (round * GATHERED_AT_ONCE).min(own.len());
            let to = (from + GATHERED_AT_ONCE).min(own.len());
            if let Some(pieces) = self.links.gather("the parts of a State", &own[from..to])? {
                shares.iter_mut().zip(&pieces).for_each(|(share, piece)| share.extend_from_slice(piece));
            }
        }
        if self.links.rank() > 0 {
            return Ok(None);
        }
        let shares: Vec<Arc<[u8]>> = shares.into_iter().map(Arc::from).collect();
        self.join(buffer, &holders, &shares).map(Some)
    }
}

impl MeshBackend {
    /// Joins devices of one kind into a mesh; `backends` are in the order of ranks.
    pub fn new(mesh: Mesh, backends: Vec<Arc<dyn Backend>>) -> Result<MeshBackend> {
        let ranks: Vec<usize> = (0..mesh.devices()).collect();
        MeshBackend::assemble(mesh, ranks, backends, Arc::new(Exchange::new(mesh)), None)
    }

    /// Joins devices of all processes of a job into a mesh. `open` opens a device that this process drives, by its rank. All
    /// processes join the same meshes in the same order.
    pub fn among(
        mesh: Mesh,
        links: &Arc<Links>,
        open: impl FnMut(usize) -> Result<Arc<dyn Backend>>,
    ) -> Result<MeshBackend> {
        let owners = links.spread(&mesh)?;
        let of = |process: usize| (0..owners.len()).filter(|rank| owners[*rank] == process).collect::<Vec<_>>();
        let ranks: Vec<Vec<usize>> = (0..links.processes()).map(of).collect();
        let own = ranks[links.rank()].clone();
        let backends = own.iter().copied().map(open).collect::<Result<_>>()?;
        let exchange = links.exchange(mesh, &owners)?;
        let processes = (links.processes() > 1).then(|| Processes { links: links.clone(), ranks });
        MeshBackend::assemble(mesh, own, backends, exchange, processes)
    }

    fn assemble(
        mesh: Mesh,
        ranks: Vec<usize>,
        backends: Vec<Arc<dyn Backend>>,
        exchange: Arc<Exchange>,
        processes: Option<Processes>,
    ) -> Result<MeshBackend> {
        if backends.len() != ranks.len() {
            let message = format!("mesh {mesh} has {} devices, not {}", ranks.len(), backends.len());
            return Err(Error::argument("mesh", message));
        }
        let workers = Workers::new(backends.len())?;
        let watched = backends.clone();
        exchange.set_watch(Box::new(move |why| watched.iter().for_each(|backend| backend.cut_off(Some(why)))));
        let shared = Shared { mesh, ranks, backends, exchange, workers, processes, runs: AtomicU64::new(0) };
        Ok(MeshBackend { shared: Arc::new(shared) })
    }

    fn buffer<'a>(&self, buffer: &'a Buffer) -> Result<&'a MeshBuffer> {
        MeshBuffer::of(buffer, &self.shared.mesh)
    }

    /// Copies each element once, from the first device that stores it. Of several processes only the first one gets the copies, and
    /// what it lacks is sent to it now.
    fn copy(&self, buffers: &[Buffer], room: Option<usize>) -> Result<Snapshot> {
        let shared = &*self.shared;
        let keeps = shared.processes.as_ref().is_none_or(|p| p.links.rank() == 0);
        let mut wanted: Vec<Vec<Buffer>> = vec![Vec::new(); shared.backends.len()];
        // For each buffer: the devices of this process that have it, or what all processes have sent.
        let mut sources = Vec::with_capacity(buffers.len());
        for buffer in buffers {
            let own = self.buffer(buffer)?;
            let holders = shared.own_holders(own);
            for rank in holders.iter().flatten().filter(|_| keeps) {
                let k = shared.ranks.binary_search(rank).unwrap_or_default();
                wanted[k].push(own.part(*rank, &*shared.backends[k])?);
            }
            sources.push(match (holders, &shared.processes) {
                (Some(holders), _) => Ok(holders),
                (None, Some(processes)) => Err(processes.gather(shared, own)?.unwrap_or_default()),
                (None, None) => return Err(Error::system("mesh", "this is a bug: no device has a part of a tensor")),
            });
        }
        if !keeps {
            let elsewhere = || Err(Error::system("mesh", "this is a bug: process 0 has the bytes of a snapshot"));
            return Ok(Snapshot { held: Arc::default(), waited: None, bytes: Box::new(elsewhere) });
        }
        let copy = |(backend, parts): (&Arc<dyn Backend>, &Vec<Buffer>)| backend.snapshot(parts, room);
        let copies = shared.backends.iter().zip(&wanted).map(copy).collect::<Result<Vec<_>>>()?;
        let held: Vec<Arc<AtomicUsize>> = copies.iter().map(|c| c.held.clone()).collect();
        let all = Arc::new(AtomicUsize::new(held.iter().map(|h| h.load(Ordering::Acquire)).sum()));
        let waited = copies.iter().find_map(|c| c.waited.clone());
        let (mesh, ranks, buffers, left) = (shared.mesh, shared.ranks.clone(), buffers.to_vec(), all.clone());
        let bytes = move || {
            let mut parts = Vec::with_capacity(copies.len());
            for copy in copies {
                parts.push((copy.bytes)()?.into_iter());
            }
            let missing = || Error::system("mesh", "this is a bug: a part is missing in a snapshot");
            let mut out = Vec::with_capacity(buffers.len());
            for (buffer, source) in buffers.iter().zip(sources) {
                let holders = match source {
                    Ok(holders) => holders,
                    Err(whole) => {
                        out.push(whole);
                        continue;
                    }
                };
                let next = &mut |rank: usize| {
                    let k = ranks.binary_search(&rank).map_err(|_| missing())?;
                    parts[k].next().ok_or_else(missing)
                };
                out.push(MeshBuffer::of(buffer, &mesh)?.whole(&holders, next)?);
            }
            // Copies in the memory of a device are freed by now; those in host memory live until the caller drops them.
            left.store(held.iter().map(|h| h.load(Ordering::Acquire)).sum(), Ordering::Release);
            Ok(out)
        };
        Ok(Snapshot { held: all, waited, bytes: Box::new(bytes) })
    }

    /// Compiles the program of each device of this process. Of those that run one program the first generates machine code, which the
    /// others find in the cache.
    fn compile_on_all(&self, program: &Arc<Program>) -> Result<Vec<Box<dyn Executable>>> {
        let (mesh, ranks) = (self.shared.mesh, &self.shared.ranks);
        let own = |rank: &usize| {
            let stage = program.stages.get(mesh.coordinates(*rank)[Axis::Pp as usize]);
            stage.map_or_else(|| program.clone(), |stage| stage.program.clone())
        };
        let programs: Arc<[Arc<Program>]> = ranks.iter().map(own).collect();
        let is_first = |k: usize| !programs[..k].iter().any(|other| Arc::ptr_eq(other, &programs[k]));
        let first: Arc<[bool]> = (0..programs.len()).map(is_first).collect();
        let mut all: Vec<Option<Box<dyn Executable>>> = programs.iter().map(|_| None).collect();
        for round in [true, false] {
            let (programs, first) = (programs.clone(), first.clone());
            let compile = move |k: usize, b: &dyn Backend| (first[k] == round).then(|| b.compile(programs[k].clone()));
            for (slot, made) in all.iter_mut().zip(self.shared.on_all(compile)?) {
                if let Some(made) = made {
                    *slot = Some(made?);
                }
            }
        }
        let missing = || Error::system("mesh", "this is a bug: a device has no program");
        all.into_iter().map(|made| made.ok_or_else(missing)).collect()
    }

    /// Lets every device raise an error that an earlier run has caused, after one has raised `error`: a bad index is reported on all of
    /// them, and is one error. Returns that of the device that has the index.
    fn raise_late_faults(&self, error: Error) -> Error {
        let mut cause = error;
        for backend in &self.shared.backends {
            // Each raises the error that has been returned, or nothing.
            let word = BufferDesc::new(Shape::SCALAR, DType::I32);
            let raised = backend.upload(&word, &[0; 4]).and_then(|word| backend.download(&word));
            if let Err(e) = raised
                && (cause.kind, e.kind) == (Kind::Elsewhere, Kind::Argument)
            {
                cause = e;
            }
        }
        cause
    }
}

impl Backend for MeshBackend {
    fn name(&self) -> &str {
        self.shared.first().name()
    }

    fn describe(&self) -> String {
        let Shared { mesh, backends, processes, .. } = &*self.shared;
        let among = processes.as_ref().map(|p| format!(" in {} processes", p.ranks.len())).unwrap_or_default();
        format!("mesh {mesh} of {} x {}{among}", mesh.devices(), backends[0].describe())
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

    fn has_host_memory_route(&self) -> bool {
        self.processes() == 1 && self.shared.first().has_host_memory_route()
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

    fn processes(&self) -> usize {
        self.shared.processes.as_ref().map_or(1, |p| p.ranks.len())
    }

    fn set_place(&self, place: String) {
        if let Some(processes) = &self.shared.processes {
            processes.links.set_place(place);
        }
    }

    fn agree(&self, what: &str, digest: &[u8], describe: &mut dyn FnMut() -> String) -> Result<()> {
        self.shared.processes.as_ref().map_or(Ok(()), |p| p.links.agree(what, digest, describe))
    }

    fn realign(&self) -> Result<()> {
        let Some(processes) = &self.shared.processes else { return Ok(()) };
        // Runs are numbered alike in all processes.
        let runs = processes.links.vote("the number of runs", self.shared.runs.load(Ordering::Relaxed))?;
        self.shared.runs.store(runs, Ordering::Relaxed);
        Ok(())
    }

    fn alloc(&self, desc: &BufferDesc) -> Result<Buffer> {
        Ok(Arc::new(MeshBuffer::new(desc, self.shared.mesh, None, self.shared.holding(desc))))
    }

    fn upload(&self, desc: &BufferDesc, bytes: &[u8]) -> Result<Buffer> {
        if bytes.len() != desc.nbytes() {
            let message = format!("this is a bug: {} bytes for a tensor of {}", bytes.len(), desc.nbytes());
            return Err(Error::system("mesh", message));
        }
        host_memory::check("mesh", bytes.len())?;
        let holding = self.shared.holding(desc);
        let source = (holding > 0).then(|| bytes.into());
        Ok(Arc::new(MeshBuffer::new(desc, self.shared.mesh, source, holding)))
    }

    fn download(&self, buffer: &Buffer) -> Result<Vec<u8>> {
        let buffer = self.buffer(buffer)?;
        let shared = &*self.shared;
        let bytes = match (shared.own_holders(buffer), &shared.processes) {
            (None, Some(processes)) => processes.whole(shared, buffer),
            (holders, _) => buffer.whole(&holders.unwrap_or_default(), &mut |rank| {
                let backend = shared.backend(rank)?;
                backend.download(&buffer.part(rank, &**backend)?)
            }),
        };
        bytes.map_err(|e| self.raise_late_faults(e))
    }

    fn snapshot(&self, buffers: &[Buffer], room: Option<usize>) -> Result<Snapshot> {
        self.copy(buffers, room).map_err(|e| self.raise_late_faults(e))
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
        Some(self.shared.first().peak_flops(precision)? * self.shared.mesh.devices() as f64)
    }

    fn probe(&self) -> Option<Probe> {
        self.shared.first().probe()
    }

    fn take_notices(&self) -> Vec<String> {
        let mut all: Vec<String> = self.shared.backends.iter().flat_map(|b| b.take_notices()).collect();
        all.dedup();
        all
    }

    /// The devices are of one kind: code for one is code for all. With pipeline stages it is that of all stages.
    fn prepare(&self, programs: &[Program]) -> Result<Option<JoinHandle<()>>> {
        if programs.iter().all(|p| p.stages.is_empty()) {
            return self.shared.first().prepare(programs);
        }
        let own = |p: &Program| match &p.stages[..] {
            [] => vec![p.clone()],
            stages => stages.iter().map(|stage| (*stage.program).clone()).collect(),
        };
        self.shared.first().prepare(&programs.iter().flat_map(own).collect::<Vec<_>>())
    }

    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>> {
        let shared = &self.shared;
        let devices = self.compile_on_all(&program)?.into();
        let none = BufferDesc::new(Shape::of(&[0]), DType::U8);
        let backends = shared.backends.iter().filter(|_| !program.stages.is_empty());
        let unused = backends.map(|backend| backend.alloc(&none)).collect::<Result<_>>()?;
        let signature = if self.processes() > 1 { Fingerprint::of(&program).digest() } else { 0 };
        Ok(Box::new(MeshExecutable { shared: shared.clone(), program, devices, unused, signature }))
    }
}
