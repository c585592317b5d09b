//! Runs programs on virtual devices in threads, which exchange data through memory: on CPU devices, or several on each GPU.
#![allow(dead_code)]

use perilune_core::error::{Error, Result};
use perilune_core::graph::Graph;
use perilune_core::mesh::{Axis, Coordinates};
use perilune_core::{DType, HostTensor, Interrupt, Mesh, Placement, Shape};
use perilune_plan::ir::{Program, Root};
use perilune_plan::request::InputBuffer;
use perilune_plan::{
    Backend, Buffer, BufferDesc, Executable, Failure, Options, Peers, Request, RunContext, Ticket, Tracer,
};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// What was sent in one exchange: the group, and how many exchanges it had before.
type Round = (Option<Axis>, Vec<usize>, u64);

/// Sender, receiver, run of the sender and number of a message.
type Mail = (usize, usize, u64, u64);

#[derive(Debug, Default)]
struct State {
    /// What each device of a group has sent, and how many have read it.
    rounds: HashMap<Round, (Vec<Option<Arc<[u8]>>>, usize)>,
    /// Messages to one device that it has not received.
    mail: HashMap<Mail, Arc<[u8]>>,
    failed: bool,
}

/// The devices of a mesh.
#[derive(Debug)]
pub struct Exchanges {
    mesh: Mesh,
    state: Mutex<State>,
    arrived: Condvar,
    /// Longest delay before an exchange, in microseconds.
    delay: u64,
}

impl Exchanges {
    pub fn new(mesh: Mesh, delay: u64) -> Arc<Exchanges> {
        Arc::new(Exchanges { mesh, state: Mutex::default(), arrived: Condvar::new(), delay })
    }

    /// Ends the exchanges of all devices: one of them has failed.
    pub fn fail(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).failed = true;
        self.arrived.notify_all();
    }

    fn send(&self, round: Round, at: usize, size: usize, bytes: &[u8]) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = state.rounds.entry(round).or_insert_with(|| (vec![None; size], 0));
        entry.0[at] = Some(bytes.into());
        self.arrived.notify_all();
    }

    fn receive(&self, round: Round, size: usize) -> Result<Vec<Arc<[u8]>>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some((sent, readers)) = state.rounds.get_mut(&round)
                && let Some(all) = sent.iter().cloned().collect::<Option<Vec<_>>>()
            {
                *readers += 1;
                if *readers == size {
                    state.rounds.remove(&round);
                }
                return Ok(all);
            }
            if state.failed {
                return Err(Error::system("mesh", "another device has failed"));
            }
            let (guard, timeout) =
                self.arrived.wait_timeout(state, Duration::from_secs(60)).unwrap_or_else(PoisonError::into_inner);
            state = guard;
            if timeout.timed_out() {
                return Err(Error::system("mesh", format!("a device did not take part in exchange {round:?}")));
            }
        }
    }
}

/// One device of a mesh.
#[derive(Debug)]
pub struct Device {
    pub rank: usize,
    pub at: Coordinates,
    pub shared: Arc<Exchanges>,
    /// Exchanges so far along each axis, and barriers.
    count: [AtomicU64; Axis::ALL.len() + 1],
    /// Runs of pipeline stages so far, if the devices run such programs.
    pub runs: AtomicU64,
    pub has_stages: bool,
    /// Messages that it receives before it fails.
    pub receives_left: AtomicU64,
    seed: AtomicU64,
}

impl Device {
    pub fn new(shared: &Arc<Exchanges>, rank: usize) -> Device {
        let (at, seed) = (shared.mesh.coordinates(rank), AtomicU64::new(rank as u64 + 1));
        let has_stages = shared.mesh.size(Axis::Pp) > 1;
        Device {
            rank,
            at,
            shared: shared.clone(),
            count: Default::default(),
            runs: AtomicU64::new(0),
            receives_left: AtomicU64::new(u64::MAX),
            has_stages,
            seed,
        }
    }

    fn round(&self, ticket: Ticket) -> Round {
        let mut group = self.at;
        group[ticket.axis as usize] = 0;
        (Some(ticket.axis), group.to_vec(), ticket.number)
    }

    /// The rank of the device at a coordinate along an axis.
    fn rank_at(&self, axis: Axis, coordinate: usize) -> usize {
        let mut at = self.at;
        at[axis as usize] = coordinate;
        self.shared.mesh.rank(&at)
    }

    /// Delays some exchanges, by times that differ between devices.
    fn wait(&self) {
        let x = self.seed.load(Ordering::Relaxed).wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.seed.store(x, Ordering::Relaxed);
        if self.shared.delay > 0 && (x >> 60) < 4 {
            std::thread::sleep(Duration::from_micros((x >> 33) % self.shared.delay));
        }
    }
}

impl Peers for Device {
    fn coordinate(&self, axis: Axis) -> usize {
        self.at[axis as usize]
    }

    fn send(&self, axis: Axis, bytes: &[u8]) -> Result<Ticket> {
        self.wait();
        let ticket = Ticket { axis, number: self.count[axis as usize].fetch_add(1, Ordering::Relaxed) };
        let size = self.shared.mesh.size(axis);
        self.shared.send(self.round(ticket), self.at[axis as usize], size, bytes);
        Ok(ticket)
    }

    fn receive(&self, ticket: Ticket) -> Result<Vec<Arc<[u8]>>> {
        self.shared.receive(self.round(ticket), self.shared.mesh.size(ticket.axis))
    }

    fn has_stages(&self) -> bool {
        self.has_stages
    }

    fn send_to(&self, axis: Axis, to: usize, number: u64, bytes: &[u8]) -> Result<()> {
        self.wait();
        let mail = (self.rank, self.rank_at(axis, to), self.runs.load(Ordering::Relaxed), number);
        let mut state = self.shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(state.mail.insert(mail, bytes.into()).is_none(), "{mail:?} was sent twice");
        self.shared.arrived.notify_all();
        Ok(())
    }

    fn receive_from(&self, axis: Axis, from: usize, number: u64) -> Result<Arc<[u8]>> {
        self.wait();
        if self.receives_left.fetch_sub(1, Ordering::Relaxed) == 0 {
            self.shared.fail();
            return Err(Error::system("mesh", "this device has failed"));
        }
        let mail = (self.rank_at(axis, from), self.rank, self.runs.load(Ordering::Relaxed), number);
        let mut state = self.shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if state.failed {
                return Err(Error::system("mesh", "another device has failed"));
            }
            if let Some(message) = state.mail.remove(&mail) {
                return Ok(message);
            }
            let (guard, timeout) = self
                .shared
                .arrived
                .wait_timeout(state, Duration::from_secs(60))
                .unwrap_or_else(PoisonError::into_inner);
            state = guard;
            if timeout.timed_out() {
                return Err(Error::system("mesh", format!("message {mail:?} has not come")));
            }
        }
    }

    fn barrier(&self) -> Result<()> {
        let count = self.count[Axis::ALL.len()].fetch_add(1, Ordering::Relaxed);
        let (round, size) = ((None, Vec::new(), count), self.shared.mesh.devices());
        self.shared.send(round.clone(), self.rank, size, &[]);
        self.shared.receive(round, size).map(drop)
    }
}

/// A planned program, and what its inputs are.
pub struct Planned {
    pub program: Arc<Program>,
    pub inputs: Vec<InputBuffer>,
    pub slots: Vec<u64>,
}

impl Planned {
    pub fn new(g: &Graph, request: &Request, backend: &dyn Backend) -> Planned {
        let mut tracer = Tracer::default();
        tracer.run(g, request, |_| None);
        let program = perilune_plan::pipeline::plan(g, &tracer, request, Options::default(), backend).unwrap();
        perilune_plan::check::check(&program).unwrap();
        Planned { program: Arc::new(program), inputs: tracer.trace.inputs, slots: tracer.trace.slots }
    }

    /// The programs of the devices along `pp`, in order, of a step that is divided among the devices of a mesh.
    pub fn stages(
        g: &Graph,
        request: &Request,
        backend: &dyn Backend,
        mesh: &Mesh,
        placement: impl Fn(InputBuffer) -> Placement,
    ) -> Vec<Planned> {
        let mut tracer = Tracer::default();
        tracer.run(g, request, |_| None);
        tracer.divide(mesh, None, placement);
        let program = perilune_plan::pipeline::plan(g, &tracer, request, Options::default(), backend).unwrap();
        perilune_plan::check::check(&program).unwrap();
        let planned = |program: &Arc<Program>| Planned {
            program: program.clone(),
            inputs: tracer.trace.inputs.clone(),
            slots: tracer.trace.slots.clone(),
        };
        program.stages.iter().map(|stage| planned(&stage.program)).collect()
    }
}

/// The buffers of a device: those of leaves and States by their payloads.
pub struct Rank<'a> {
    pub backend: &'a dyn Backend,
    pub device: &'a Device,
    pub buffers: HashMap<u64, Buffer>,
}

/// A program that a device has compiled.
pub struct Loaded<'p> {
    planned: &'p Planned,
    exec: Box<dyn Executable>,
}

impl Rank<'_> {
    pub fn upload(&mut self, payload: u64, t: &HostTensor) {
        let buffer = self.backend.upload(&BufferDesc::new(t.shape, t.dtype), &t.bytes).unwrap();
        self.buffers.insert(payload, buffer);
    }

    pub fn read(&self, buffer: &Buffer) -> Result<HostTensor> {
        Ok(HostTensor::new(buffer.desc().dtype, buffer.desc().shape, self.backend.download(buffer)?))
    }

    /// Reads a leaf or State.
    pub fn value(&self, payload: u64) -> HostTensor {
        self.read(&self.buffers[&payload]).unwrap()
    }

    pub fn load<'p>(&self, planned: &'p Planned) -> Loaded<'p> {
        Loaded { planned, exec: self.backend.compile(planned.program.clone()).unwrap_or_else(|e| panic!("{e}")) }
    }

    /// Runs a program and returns its roots.
    pub fn run(&self, loaded: &Loaded) -> std::result::Result<Vec<Buffer>, Failure> {
        self.run_timed(loaded, None)
    }

    /// Runs a program; returns the seconds of its kernels, and those of collectives beside others.
    pub fn times(&self, loaded: &Loaded) -> [Vec<f64>; 2] {
        let zeros = vec![0.0; loaded.planned.program.kernels.len()];
        let mut out = [zeros.clone(), zeros];
        self.run_timed(loaded, Some(&mut out)).unwrap_or_else(|f| panic!("{}", f.error));
        out
    }

    fn run_timed(
        &self,
        loaded: &Loaded,
        times: Option<&mut [Vec<f64>; 2]>,
    ) -> std::result::Result<Vec<Buffer>, Failure> {
        let p = &loaded.planned.program;
        let payload = |b: &InputBuffer| match b {
            InputBuffer::Leaf(k) | InputBuffer::State(k) => self.buffers[k].clone(),
        };
        let inputs: Vec<Buffer> = loaded.planned.inputs.iter().map(payload).collect();
        let outputs: Vec<Buffer> = p.outputs.iter().map(|desc| self.backend.alloc(desc).unwrap()).collect();
        let interrupt = Interrupt::default();
        let (times, hidden) = match times {
            Some([times, hidden]) => (Some(&mut times[..]), Some(&mut hidden[..])),
            None => (None, None),
        };
        let context = RunContext { interrupt: &interrupt, times, hidden, peers: Some(self.device) };
        let numbers = p.numbers(&loaded.planned.slots, &self.device.at);
        self.device.runs.fetch_add(1, Ordering::Relaxed);
        loaded.exec.run(&inputs, &numbers, &outputs, context)?;
        let root = |r: &Root| match r {
            Root::Output(k) => outputs[*k as usize].clone(),
            Root::Input(k) => inputs[*k as usize].clone(),
        };
        Ok(p.results.iter().map(root).collect())
    }
}

impl Rank<'_> {
    /// Runs a program of one input and one output that has no mesh.
    pub fn run_alone(&self, loaded: &Loaded, payload: u64) {
        let outputs: Vec<Buffer> =
            loaded.planned.program.outputs.iter().map(|desc| self.backend.alloc(desc).unwrap()).collect();
        let interrupt = Interrupt::default();
        let inputs = [self.buffers[&payload].clone()];
        loaded
            .exec
            .run(&inputs, &loaded.planned.slots, &outputs, RunContext::new(&interrupt))
            .unwrap_or_else(|f| panic!("{}", f.error));
    }

    /// Waits for all work of the device.
    pub fn synchronize(&self) {
        // Larger than what is copied on a second stream.
        let desc = BufferDesc::new(Shape::of(&[1 << 17]), DType::U8);
        self.backend.download(&self.backend.alloc(&desc).unwrap()).unwrap();
    }
}

/// Runs `work` on each device of a mesh, in a thread with a backend of its own.
pub fn each<T: Send>(
    mesh: Mesh,
    delay: u64,
    backend: impl Fn(usize) -> Box<dyn Backend> + Sync,
    work: impl Fn(Rank) -> T + Sync,
) -> Vec<T> {
    let shared = Exchanges::new(mesh, delay);
    std::thread::scope(|scope| {
        let device = |rank| {
            let (shared, backend, work) = (shared.clone(), &backend, &work);
            scope.spawn(move || {
                /// Lets no other device wait for one that has panicked.
                struct Guard(Arc<Exchanges>);
                impl Drop for Guard {
                    fn drop(&mut self) {
                        if std::thread::panicking() {
                            self.0.fail();
                        }
                    }
                }
                let _guard = Guard(shared.clone());
                let (backend, device) = (backend(rank), Device::new(&shared, rank));
                work(Rank { backend: &*backend, device: &device, buffers: HashMap::new() })
            })
        };
        let threads: Vec<_> = (0..mesh.devices()).map(device).collect();
        let joined: Vec<_> = threads.into_iter().map(|t| t.join()).collect();
        joined.into_iter().map(|r| r.unwrap_or_else(|e| std::panic::resume_unwind(e))).collect()
    })
}
