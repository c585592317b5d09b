//! Runs a program on the virtual devices of a mesh: a CPU device in a thread for each rank, which exchange data through memory.

use perilune_core::error::{Error, Result};
use perilune_core::mesh::{Axis, Coordinates};
use perilune_core::{Graph, HostTensor, Interrupt, Mesh};
use perilune_cpu::Cpu;
use perilune_plan::ir::{Program, Root};
use perilune_plan::request::{Division, InputBuffer};
use perilune_plan::{Backend, Buffer, BufferDesc, Options, Peers, Request, RunContext, Tracer, pipeline};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// What was sent in one exchange: the group, and how many exchanges it had before.
type Round = (Axis, Vec<usize>, u64);

/// The rounds that are under way, with what each device of the group has sent.
#[derive(Debug, Default)]
struct Exchanges {
    rounds: Mutex<HashMap<Round, Vec<Option<Arc<[u8]>>>>>,
    arrived: Condvar,
}

/// One device of a mesh.
#[derive(Debug)]
struct Device {
    mesh: Mesh,
    at: Coordinates,
    shared: Arc<Exchanges>,
    /// Exchanges so far along each axis.
    count: [AtomicU64; Axis::ALL.len()],
}

impl Peers for Device {
    fn coordinate(&self, axis: Axis) -> usize {
        self.at[axis as usize]
    }

    fn exchange(&self, axis: Axis, bytes: &[u8]) -> Result<Vec<Arc<[u8]>>> {
        let mut group = self.at;
        group[axis as usize] = 0;
        let round = (axis, group.to_vec(), self.count[axis as usize].fetch_add(1, Ordering::Relaxed));
        let mut rounds = self.shared.rounds.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let sent = rounds.entry(round.clone()).or_insert_with(|| vec![None; self.mesh.size(axis)]);
        sent[self.at[axis as usize]] = Some(bytes.into());
        self.shared.arrived.notify_all();
        loop {
            if let Some(all) = rounds[&round].iter().cloned().collect::<Option<Vec<_>>>() {
                return Ok(all);
            }
            let waited = self.shared.arrived.wait_timeout(rounds, Duration::from_secs(30));
            let (guard, timeout) = waited.unwrap_or_else(std::sync::PoisonError::into_inner);
            rounds = guard;
            if timeout.timed_out() {
                return Err(Error::system("mesh", format!("a device did not take part in exchange {round:?}")));
            }
        }
    }
}

/// The values of a step: its roots, and the States that it wrote.
#[derive(Clone, Debug, PartialEq)]
pub struct Values {
    pub roots: Vec<HostTensor>,
    pub states: Vec<HostTensor>,
}

/// The part of a tensor on the device at `at`.
fn part(whole: &HostTensor, division: &Division, buffer: InputBuffer, at: &Coordinates) -> HostTensor {
    let Some(placement) = division.inputs.get(&buffer) else { return whole.clone() };
    let local = placement.local(&division.mesh, at, &whole.shape).unwrap_or_else(|e| panic!("{e}"));
    let (size, strides) = (whole.dtype.size(), whole.shape.strides());
    let mut bytes = Vec::new();
    for k in 0..local.shape.numel() {
        let (mut rest, mut from) = (k, 0);
        for d in (0..local.shape.rank()).rev() {
            from += (local.start[d] + rest % local.shape.dims()[d]) * strides[d] as usize;
            rest /= local.shape.dims()[d];
        }
        bytes.extend(&whole.bytes[from * size..(from + 1) * size]);
    }
    HostTensor::new(whole.dtype, local.shape, bytes)
}

/// Runs a program as the device at `at`.
fn run_device(
    program: &Arc<Program>,
    tracer: &Tracer,
    division: &Division,
    values: &HashMap<InputBuffer, HostTensor>,
    device: &Device,
) -> Result<Values> {
    let cpu = Cpu::new(Some(1));
    let exec = cpu.compile(program.clone())?;
    let upload = |b: &InputBuffer| {
        let own = part(&values[b], division, *b, &device.at);
        cpu.upload(&BufferDesc::new(own.shape, own.dtype), &own.bytes)
    };
    let inputs: Vec<Buffer> = tracer.trace.inputs.iter().map(upload).collect::<Result<_>>()?;
    let outputs: Vec<Buffer> = program.outputs.iter().map(|desc| cpu.alloc(desc)).collect::<Result<_>>()?;
    let numbers = program.numbers(&tracer.trace.slots, &device.at);
    let interrupt = Interrupt::default();
    let context = RunContext { peers: Some(device), ..RunContext::new(&interrupt) };
    exec.run(&inputs, &numbers, &outputs, context).map_err(|f| f.error)?;
    let read = |b: &Buffer| Ok(HostTensor::new(b.desc().dtype, b.desc().shape, cpu.download(b)?));
    let root = |r: &Root| match r {
        Root::Output(k) => read(&outputs[*k as usize]),
        Root::Input(k) => read(&inputs[*k as usize]),
    };
    let states = tracer.trace.state_write_inputs.iter().map(|k| read(&inputs[*k as usize])).collect::<Result<_>>()?;
    Ok(Values { roots: program.results.iter().map(root).collect::<Result<_>>()?, states })
}

/// Plans a request for a mesh and runs it; all devices must end with the same values. Returns them and the program.
pub fn run(
    g: &Graph,
    request: &Request,
    values: &HashMap<InputBuffer, HostTensor>,
    division: &Division,
) -> std::result::Result<(Values, Arc<Program>), String> {
    let request = Request { division: Some(Arc::new(division.clone())), ..request.clone() };
    let mut tracer = Tracer::default();
    tracer.run(g, &request, |_| None);
    let null = perilune_plan::Null;
    let program = pipeline::plan(g, &tracer, &request, Options::default(), &null).map_err(|e| e.to_string())?;
    perilune_plan::check::check(&program)?;
    let program = Arc::new(program);
    let (shared, mesh) = (Arc::<Exchanges>::default(), division.mesh);
    let (program_, tracer_) = (&program, &tracer);
    let all: Vec<Result<Values>> = std::thread::scope(|scope| {
        let device = |rank| {
            let shared = shared.clone();
            scope.spawn(move || {
                let device = Device { mesh, at: mesh.coordinates(rank), shared, count: Default::default() };
                run_device(program_, tracer_, division, values, &device)
            })
        };
        let threads: Vec<_> = (0..mesh.devices()).map(device).collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|_| panic!("a device panicked"))).collect()
    });
    let mut all = all.into_iter().collect::<Result<Vec<_>>>().map_err(|e| e.to_string())?;
    if all.iter().any(|v| *v != all[0]) {
        return Err(format!("the devices of {mesh} end with different values"));
    }
    Ok((all.swap_remove(0), program))
}
