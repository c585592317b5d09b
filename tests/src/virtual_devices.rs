//! Runs a program on the virtual devices of a mesh: a CPU device in a thread for each rank, which exchange data through memory.

use perilune_core::error::Error;
use perilune_core::mesh::{Axis, Coordinates};
use perilune_core::{DType, Graph, HostTensor, Interrupt, Mesh, Placement, Shape};
use perilune_cpu::Cpu;
use perilune_plan::ir::{Code, Kernel, Program, Root, Source};
use perilune_plan::request::InputBuffer;
use perilune_plan::{
    Backend, Buffer, BufferDesc, KeyExchange, Options, Peers, Request, RunContext, Ticket, Tracer, pipeline,
};
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

impl Device {
    fn round(&self, ticket: Ticket) -> Round {
        let mut group = self.at;
        group[ticket.axis as usize] = 0;
        (ticket.axis, group.to_vec(), ticket.number)
    }
}

impl Peers for Device {
    fn coordinate(&self, axis: Axis) -> usize {
        self.at[axis as usize]
    }

    fn send(&self, axis: Axis, bytes: &[u8]) -> Result<Ticket, Error> {
        let ticket = Ticket { axis, number: self.count[axis as usize].fetch_add(1, Ordering::Relaxed) };
        let mut rounds = self.shared.rounds.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let sent = rounds.entry(self.round(ticket)).or_insert_with(|| vec![None; self.mesh.size(axis)]);
        sent[self.at[axis as usize]] = Some(bytes.into());
        self.shared.arrived.notify_all();
        Ok(ticket)
    }

    fn receive(&self, ticket: Ticket) -> Result<Vec<Arc<[u8]>>, Error> {
        let round = self.round(ticket);
        let mut rounds = self.shared.rounds.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
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

/// What each device of a mesh has of the inputs of a step.
#[derive(Clone, Debug, Default)]
pub struct Spread {
    pub mesh: Mesh,
    /// Inputs that are not listed are replicated.
    pub placements: HashMap<InputBuffer, Placement>,
    /// Logical shards, if sums must not depend on the mesh.
    pub strict: Option<usize>,
    /// Whether whole weights are kept to the end of the step.
    pub keeps_weights: bool,
}

impl Spread {
    fn placement(&self, buffer: InputBuffer) -> Placement {
        self.placements.get(&buffer).copied().unwrap_or_default()
    }

    /// For each element in the memory of the device at `at`, its index in the tensor; `None` for padding.
    fn elements(&self, buffer: InputBuffer, at: &Coordinates, whole: &Shape) -> (Shape, Vec<Option<usize>>) {
        let placement = self.placement(buffer);
        let local = placement.local(&self.mesh, at, whole).unwrap_or_else(|e| panic!("{e}")).shape;
        let mut out = vec![None; local.numel()];
        for run in placement.runs(&self.mesh, at, whole).unwrap_or_else(|e| panic!("{e}")) {
            (0..run.len).for_each(|k| out[run.local + k] = Some(run.global + k));
        }
        (local, out)
    }

    /// The part of a tensor on the device at `at`. Padding is NaN, or a large number: no result may depend on it.
    fn part(&self, whole: &HostTensor, buffer: InputBuffer, at: &Coordinates) -> HostTensor {
        let (shape, elements) = self.elements(buffer, at, &whole.shape);
        let size = whole.dtype.size();
        let padding = match whole.dtype.is_float() {
            true => HostTensor::from_f64(whole.dtype, Shape::SCALAR, &[f64::NAN]),
            false => HostTensor::from_i64(Shape::SCALAR, &[1 << 40]).cast(whole.dtype),
        };
        let mut bytes = Vec::with_capacity(elements.len() * size);
        for from in elements {
            bytes.extend_from_slice(from.map_or(&padding.bytes[..], |k| &whole.bytes[k * size..(k + 1) * size]));
        }
        HostTensor::new(whole.dtype, shape, bytes)
    }

    /// Puts the parts of all devices together. Devices that hold the same element must agree.
    fn join(
        &self,
        parts: &[&HostTensor],
        buffer: InputBuffer,
        whole: Shape,
        dtype: DType,
    ) -> Result<HostTensor, String> {
        let size = dtype.size();
        let mut all: Vec<Option<&[u8]>> = vec![None; whole.numel()];
        for (rank, part) in parts.iter().enumerate() {
            let (_, elements) = self.elements(buffer, &self.mesh.coordinates(rank), &whole);
            for (k, bytes) in elements.iter().zip(part.bytes.chunks_exact(size)) {
                let Some(k) = *k else { continue };
                if *all[k].get_or_insert(bytes) != bytes {
                    return Err(format!("device {rank} has another element {k} of {buffer:?} than a device before"));
                }
            }
        }
        let bytes: Option<Vec<&[u8]>> = all.into_iter().collect();
        Ok(HostTensor::new(dtype, whole, bytes.ok_or("an element is on no device")?.concat()))
    }
}

/// No block that a device reads from a whole input ends beyond it. (Backends read without a check.)
fn assert_blocks_within_inputs(program: &Program, numbers: &[u64]) {
    for stage in &program.stages {
        assert_blocks_within_inputs(&stage.program, numbers);
    }
    let regions = program.kernels.iter().flat_map(Kernel::regions);
    for code in regions.flat_map(|r| &r.body).map(|i| &i.code) {
        if let Code::Load { source: Source::Block { input, start }, layout } = code
            && let Some((_, last)) = layout.extent()
        {
            let (last, numel) =
                (last as u64 + numbers[*start as usize], program.values[input.0 as usize].shape.numel());
            assert!(last < numel as u64, "a block of value {} ends with element {last} of {numel}", input.0);
        }
    }
}

/// Runs a program as the device at `at`.
fn run_device(
    program: &Arc<Program>,
    tracer: &Tracer,
    spread: &Spread,
    values: &HashMap<InputBuffer, HostTensor>,
    device: &Device,
    chaos: Option<u64>,
) -> Result<Values, Error> {
    let cpu = Cpu::new(Some(1));
    let cpu = match chaos {
        Some(seed) => cpu.chaotic(seed),
        None => cpu,
    };
    let exec = cpu.compile(program.clone())?;
    let upload = |b: &InputBuffer| {
        let own = spread.part(&values[b], *b, &device.at);
        cpu.upload(&BufferDesc::new(own.shape, own.dtype), &own.bytes)
    };
    let inputs: Vec<Buffer> = tracer.trace.inputs.iter().map(upload).collect::<Result<_, _>>()?;
    let outputs: Vec<Buffer> = program.outputs.iter().map(|desc| cpu.alloc(desc)).collect::<Result<_, _>>()?;
    let numbers = program.numbers(&tracer.trace.slots, &device.at);
    assert_blocks_within_inputs(program, &numbers);
    let interrupt = Interrupt::default();
    let context = RunContext { peers: Some(device), ..RunContext::new(&interrupt) };
    exec.run(&inputs, &numbers, &outputs, context).map_err(|f| f.error)?;
    let read = |b: &Buffer| -> Result<HostTensor, Error> {
        Ok(HostTensor::new(b.desc().dtype, b.desc().shape, cpu.download(b)?))
    };
    let root = |r: &Root| match r {
        Root::Output(k) => read(&outputs[*k as usize]),
        Root::Input(k) => read(&inputs[*k as usize]),
    };
    let states =
        tracer.trace.state_write_inputs.iter().map(|k| read(&inputs[*k as usize])).collect::<Result<_, _>>()?;
    Ok(Values { roots: program.results.iter().map(root).collect::<Result<_, _>>()?, states })
}

/// Plans a request for a mesh.
pub fn plan(g: &Graph, request: &Request, spread: &Spread) -> Result<(Arc<Program>, Tracer), String> {
    plan_as(g, request, spread, Options::default(), KeyExchange::Auto)
}

/// As [`plan`], with options of the planner.
pub fn plan_with(
    g: &Graph,
    request: &Request,
    spread: &Spread,
    options: Options,
) -> Result<(Arc<Program>, Tracer), String> {
    plan_as(g, request, spread, options, KeyExchange::Auto)
}

fn plan_as(
    g: &Graph,
    request: &Request,
    spread: &Spread,
    options: Options,
    keys: KeyExchange,
) -> Result<(Arc<Program>, Tracer), String> {
    plan_on(g, request, spread, options, keys, &perilune_plan::Null)
}

/// As [`plan`], with options, attention to split sequences as named, and the kernels of a device.
pub fn plan_on(
    g: &Graph,
    request: &Request,
    spread: &Spread,
    options: Options,
    keys: KeyExchange,
    device: &dyn Backend,
) -> Result<(Arc<Program>, Tracer), String> {
    let mut tracer = Tracer::default();
    (tracer.keys, tracer.keeps_weights) = (keys, spread.keeps_weights);
    tracer.run(g, request, |_| None);
    tracer.divide(&spread.mesh, spread.strict, |buffer| spread.placement(buffer));
    let program = pipeline::plan(g, &tracer, request, options, device).map_err(|e| e.to_string())?;
    perilune_plan::check::check(&program)?;
    Ok((Arc::new(program), tracer))
}

/// Plans a request for a mesh and runs it. All devices must end with the same roots, and with parts that make up the States. Returns
/// these and the program. The same program with collectives that complete where they start, and with collectives that are delayed at
/// random, must have the same bits.
pub fn run(
    g: &Graph,
    request: &Request,
    values: &HashMap<InputBuffer, HostTensor>,
    spread: &Spread,
) -> Result<(Values, Arc<Program>), String> {
    run_as(g, request, values, spread, Options::default(), KeyExchange::Auto)
}

/// As [`run`], with attention to split sequences as named.
pub fn run_with(
    g: &Graph,
    request: &Request,
    values: &HashMap<InputBuffer, HostTensor>,
    spread: &Spread,
    keys: KeyExchange,
) -> Result<(Values, Arc<Program>), String> {
    run_as(g, request, values, spread, Options::default(), keys)
}

/// As [`run`], with options of the planner.
pub fn run_planned(
    g: &Graph,
    request: &Request,
    values: &HashMap<InputBuffer, HostTensor>,
    spread: &Spread,
    options: Options,
) -> Result<(Values, Arc<Program>), String> {
    run_as(g, request, values, spread, options, KeyExchange::Auto)
}

fn run_as(
    g: &Graph,
    request: &Request,
    values: &HashMap<InputBuffer, HostTensor>,
    spread: &Spread,
    options: Options,
    keys: KeyExchange,
) -> Result<(Values, Arc<Program>), String> {
    let (program, tracer) = plan_as(g, request, spread, options, keys)?;
    let got = run_program(&program, &tracer, values, spread, None)?;
    if !program.in_flight.is_empty() {
        let synchronous = Program { in_flight: Vec::new(), ..(*program).clone() };
        let seed = program.kernels.len() as u64;
        for (what, program, chaos) in [("in order", &Arc::new(synchronous), None), ("with chaos", &program, Some(seed))]
        {
            if run_program(program, &tracer, values, spread, chaos)? != got {
                return Err(format!("collectives {what} give other bits"));
            }
        }
    }
    Ok((got, program))
}

/// Runs a program once, with collectives delayed at random if there is a seed.
fn run_program(
    program: &Arc<Program>,
    tracer: &Tracer,
    values: &HashMap<InputBuffer, HostTensor>,
    spread: &Spread,
    chaos: Option<u64>,
) -> Result<Values, String> {
    let (shared, mesh) = (Arc::<Exchanges>::default(), spread.mesh);
    let all: Vec<Result<Values, Error>> = std::thread::scope(|scope| {
        let device = |rank| {
            let shared = shared.clone();
            scope.spawn(move || {
                let device = Device { mesh, at: mesh.coordinates(rank), shared, count: Default::default() };
                let chaos = chaos.map(|seed| seed * 64 + rank as u64);
                run_device(program, tracer, spread, values, &device, chaos)
            })
        };
        let threads: Vec<_> = (0..mesh.devices()).map(device).collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|_| panic!("a device panicked"))).collect()
    });
    let mut all = all.into_iter().collect::<Result<Vec<_>, _>>().map_err(|e| e.to_string())?;
    if all.iter().any(|v| v.roots != all[0].roots) {
        return Err(format!("the devices of {mesh} end with different values"));
    }
    let join = |(i, k): (usize, &u32)| {
        let buffer = tracer.trace.inputs[*k as usize];
        let (parts, whole): (Vec<_>, _) = (all.iter().map(|v| &v.states[i]).collect(), &values[&buffer]);
        spread.join(&parts, buffer, whole.shape, whole.dtype)
    };
    let states = tracer.trace.state_write_inputs.iter().enumerate().map(join).collect::<Result<_, _>>()?;
    Ok(Values { roots: all.swap_remove(0).roots, states })
}
