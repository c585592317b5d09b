//! Runs a compiled program: fills in addresses, queues its steps or replays them as CUDA graphs, and times kernels. Each part of the steps
//! (`parts.rs`) is a graph of its own.

use super::errors::{DeviceErrors, FAULT_WORDS};
use super::mesh::{Mesh, Timing};
use super::parts::{Kind, Part, divided};
use super::replay::{Captured, Operand};
use super::{Compiled, CudaExecutable, Graphs, Step};
use crate::backend::{DeviceContext, address, made, made_by, state_written};
use crate::blas::Addresses;
use crate::dnn;
use crate::driver::{Address, Event, Point, Replay, TensorMap};
use crate::launch::{Arg, Word};
use perilune_core::error::{Error, Result};
use perilune_core::mesh::Axis;
use perilune_plan::ir::{Origin, Program, Storage, ValueId};
use perilune_plan::{Buffer, Executable, Failure, RunContext};
use std::collections::BTreeSet;
use std::ffi::c_void;
use std::ops::Range;
use std::sync::{Arc, PoisonError};

/// Number of runs that launch each kernel separately and synchronize if an index may be bad.
const CAREFUL_RUNS: u64 = 2;

/// The least steps that are worth a graph between two collectives.
const LEAST_CAPTURED: usize = 3;

/// Returns the addresses of the operands: inputs, then outputs.
fn addresses(operands: &[Operand], inputs: &[Buffer], outputs: &[Buffer]) -> Result<Vec<Address>> {
    if inputs.len() + outputs.len() != operands.len() {
        let (given, expected) = (inputs.len() + outputs.len(), operands.len());
        return Err(Error::system("cuda", format!("this is a bug: {given} buffers for {expected} operands")));
    }
    inputs.iter().chain(outputs).zip(operands).map(|(buffer, operand)| address(buffer, operand.nbytes)).collect()
}

/// Returns the address of each value of a program whose operands are at `operands`.
fn places(program: &Program, arena: Address, operands: &[Address]) -> Vec<Address> {
    let place = |v: &perilune_plan::ir::Value| match v.storage {
        Storage::Input(k) => operands[k as usize],
        Storage::Output(k) => operands[program.inputs.len() + k as usize],
        Storage::Arena(at) => arena + at as u64,
    };
    program.values.iter().map(place).collect()
}

/// What the steps of a run use beside their operands.
struct Run<'a> {
    context: &'a DeviceContext,
    mesh: Option<&'a Mesh<'a>>,
}

/// The address of what a collective or transfer moves.
fn place(run: &Run, places: &[Address], arg: &Arg) -> Address {
    match arg {
        Arg::Value(v, offset) => places[v.0 as usize].wrapping_add_signed(*offset),
        Arg::Scratch(n) => run.context.scratch.base + *n as u64,
        _ => 0,
    }
}

/// The operands of a run.
struct Operands<'a> {
    inputs: &'a [Buffer],
    slots: &'a [u64],
    outputs: &'a [Buffer],
}

impl Compiled {
    /// Updates the tables that differ from those of the last run.
    fn tables(&mut self, context: &DeviceContext, places: &[Address]) -> Result<()> {
        let launches = self.steps.iter_mut().map(|s| &mut s.1);
        let tables = launches.filter_map(|s| if let Step::Launch { tables, .. } = s { Some(tables) } else { None });
        for t in tables.flatten() {
            let words: Vec<u64> = t
                .words
                .iter()
                .map(|w| match w {
                    Word::Number(n) => *n,
                    Word::Value(v, offset) => places[v.0 as usize].wrapping_add_signed(*offset),
                })
                .collect();
            if t.last != words {
                let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
                context.device.upload(t.buffer.address, &bytes)?;
                t.last = words;
            }
        }
        Ok(())
    }

    /// Queues one step.
    fn queue(&self, run: &Run, i: usize, places: &[Address]) -> Result<()> {
        let context = run.context;
        let at = |v: &ValueId| places[v.0 as usize];
        let place = |a: &Arg| match a {
            Arg::Value(v, offset) => at(v).wrapping_add_signed(*offset),
            Arg::Scratch(n) => context.scratch.base + *n as u64,
            _ => 0,
        };
        match &self.steps[i].1 {
            Step::Collective(_) => self.point(i)?.record(),
            Step::Transfer(_) => Err(Error::system("cuda", "this is a bug: a transfer among other steps")),
            Step::Conv { plan, call } => {
                let Some(dnn) = context.opened_dnn() else { return Ok(()) };
                let scratch = context.scratch.base;
                let (x, w, y) = (place(&call.x), place(&call.w), place(&call.y));
                dnn.run(plan, dnn::Addresses { x, w, y, scratch: scratch + call.scratch as u64 })
            }
            Step::Fp8 { gemm, operands: o } => {
                let [a, b, out] = [&o.a, &o.b, &o.out].map(place);
                let bias = o.bias.as_ref().map_or(0, place);
                let scales = [place(&o.scales[0]), place(&o.scales[1])];
                context.blas.run(gemm, Addresses { a, b, out, bias, residual: 0, scales })
            }
            Step::Gemm { gemm, product, a, b, out, bias, residual, size } => {
                for (oa, ob, oc) in &product.offsets {
                    let shift = |base: Address, n: isize| base.wrapping_add_signed((n * *size as isize) as i64);
                    let addresses = Addresses {
                        a: shift(at(a), *oa),
                        b: shift(at(b), *ob),
                        out: shift(at(out), *oc as isize),
                        bias: bias.map_or(0, |(v, n)| shift(at(&v), n)),
                        residual: residual.map_or(0, |v| shift(at(&v), *oc as isize)),
                        scales: [0; 2],
                    };
                    context.blas.run(gemm, addresses)?;
                }
                Ok(())
            }
            Step::Launch { launch, entry, tables, fault, history } => {
                let mut tables = tables.iter();
                let mut words: Vec<u64> = launch
                    .args
                    .iter()
                    .map(|a| match a {
                        Arg::Value(..) | Arg::Scratch(_) => place(a),
                        Arg::Slots => self.slots.address,
                        Arg::Fault => {
                            self.cells.as_ref().map_or(0, |c| c.memory.address) + (fault * FAULT_WORDS * 8) as u64
                        }
                        Arg::Halt => context.halt.address,
                        Arg::Stop => context.watchdog.stop_address(),
                        Arg::I32(x) => *x as u32 as u64,
                        Arg::I64(x) => *x as u64,
                        Arg::F32(x) => u64::from(x.to_bits()),
                        Arg::F64(x) => x.to_bits(),
                        Arg::Bytes(_) | Arg::Map(..) | Arg::Number(_) => 0,
                        Arg::Table(_) => tables.next().map_or(0, |t| t.buffer.address),
                    })
                    .collect();
                let mut maps = Vec::new();
                for arg in &launch.args {
                    if let Arg::Map(of, boxes) = arg {
                        maps.push(TensorMap::new(place(of), boxes)?);
                    }
                }
                let guarded = history.as_deref().zip(launch.subject());
                let number = guarded.map_or(0, |(history, subject)| {
                    let number = context.watchdog.number(history, &words[..subject.buffers.len()]);
                    if let Some(word) = words.last_mut() {
                        *word = u64::from(number) << 32;
                    }
                    number
                });
                let mut maps = maps.iter();
                let mut args: Vec<*mut c_void> = Vec::with_capacity(words.len());
                for (word, arg) in words.iter_mut().zip(&launch.args) {
                    args.push(match arg {
                        Arg::Bytes(b) => b.as_ptr().cast_mut().cast(),
                        Arg::Map(..) => maps.next().map_or(std::ptr::null_mut(), TensorMap::pointer),
                        _ => std::ptr::from_mut(word).cast(),
                    });
                }
                let mut queue =
                    || entry.launch(&context.device, launch.grid, launch.block, launch.shared_bytes, &mut args);
                match guarded {
                    Some((_, subject)) => context.watchdog.launch(number, subject, &mut queue),
                    None => queue(),
                }
            }
        }
    }

    /// The point where the pieces of the collective of a step are complete.
    fn point(&self, i: usize) -> Result<&Point> {
        self.points.get(&i).ok_or_else(|| Error::system("cuda", "this is a bug: a collective on a single device"))
    }

    /// Starts the collective of a step on its lane.
    fn start(&self, run: &Run, i: usize, places: &[Address]) -> Result<()> {
        let (Step::Collective(all), Some(mesh)) = (&self.steps[i].1, run.mesh) else {
            return Err(Error::system("cuda", "this is a bug: a collective on a single device"));
        };
        let place = |a: &Arg| place(run, places, a);
        let calls = all.iter().map(|(c, entries)| (c, &entries[..], [place(&c.input), place(&c.output)]));
        let is_beside = self.waits.iter().any(|(step, before)| *step == i && *before > i + 1);
        mesh.start(i, &calls.collect::<Vec<_>>(), self.point(i)?, is_beside)
    }

    /// Sends the value of a step to another pipeline stage, or receives it.
    fn transfer(&self, run: &Run, i: usize, places: &[Address]) -> Result<()> {
        let (Step::Transfer(t), Some(mesh)) = (&self.steps[i].1, run.mesh) else {
            return Err(Error::system("cuda", "this is a bug: a transfer on a single device"));
        };
        let at = place(run, places, &t.place);
        match (t.axis, t.nbytes) {
            (Axis::Pp, 0) => Ok(()),
            (Axis::Pp, nbytes) if t.is_send => mesh.send(&run.context.heap, t.other, t.number, at, nbytes),
            (Axis::Pp, nbytes) => mesh.receive(t.other, t.number, at, nbytes),
            (axis, _) => Err(Error::system("cuda", format!("this is a bug: a transfer along {}", axis.name()))),
        }
    }

    /// Makes later steps wait for the collective of a step.
    fn wait(&self, run: &Run, i: usize) -> Result<Option<Timing>> {
        match (&self.steps[i].1, run.mesh) {
            (Step::Collective(all), Some(mesh)) => match all.first() {
                Some((c, _)) => mesh.wait(i, c.axis),
                None => Ok(None),
            },
            _ => Ok(None),
        }
    }

    /// Divides the steps for runs on a mesh, as a pipeline stage, or on one device. Graphs that were captured end elsewhere and are dropped.
    pub(super) fn divide(&mut self, is_meshed: bool, has_stages: bool) {
        (self.is_meshed, self.has_stages) = (is_meshed, has_stages);
        let kinds: Vec<Kind> = self.steps.iter().map(|(_, step)| Kind::of(step)).collect();
        let agreement = (is_meshed && self.agrees()).then_some(self.agreement);
        self.graphs = Graphs::default();
        self.parts = divided(&kinds, &self.waits, agreement);
    }

    /// The coordinates of sender and receiver of the transfers of the device at a coordinate along `pp`.
    fn pairs(&self, own: usize) -> BTreeSet<(usize, usize)> {
        let pair = |(_, step): &(usize, Step)| match step {
            Step::Transfer(t) if t.nbytes == 0 => None,
            Step::Transfer(t) if t.is_send => Some((own, t.other)),
            Step::Transfer(t) => Some((t.other, own)),
            _ => None,
        };
        self.steps.iter().filter_map(pair).collect()
    }

    /// Prepares for a run on a mesh, as a pipeline stage, or on one device. A stage learns of bad indices in others, whatever its own
    /// program does.
    fn adapt(&mut self, context: &mut DeviceContext, program: &Arc<Program>, mesh: Option<&Mesh>) -> Result<()> {
        let has_stages = mesh.is_some_and(|mesh| mesh.peers.has_stages());
        if has_stages && self.cells.is_none() {
            let cells = Arc::new(DeviceErrors::new(&context.device, context.halt.address, Vec::new(), program)?);
            context.faults.cells.push(Arc::downgrade(&cells));
            self.cells = Some(cells);
        }
        if let Some(mesh) = mesh {
            for (i, (_, step)) in self.steps.iter().enumerate() {
                if matches!(step, Step::Collective(_)) && !self.points.contains_key(&i) {
                    self.points.insert(i, mesh.connection.endpoint.point()?);
                }
            }
        }
        if (self.is_meshed, self.has_stages) != (mesh.is_some(), has_stages) {
            self.divide(mesh.is_some(), has_stages);
        }
        Ok(())
    }

    /// Whether the devices of a mesh agree in a run that none has failed. Programs of pipeline stages differ, and all of them do.
    fn agrees(&self) -> bool {
        self.has_stages || self.cells.is_some() || !self.writes.is_empty()
    }

    /// Lets the devices of the mesh agree that none has failed. Returns an error on all of them otherwise.
    fn agree(&self, run: &Run) -> Result<()> {
        let Some(mesh) = run.mesh else { return Ok(()) };
        let cell = self.cells.as_deref().map(DeviceErrors::peer_cell);
        mesh.agree(run.context.faults.is_reported(), run.context.halt.address, cell)?;
        if self.has_stages || !self.writes.is_empty() { mesh.peers.barrier() } else { Ok(()) }
    }

    /// Queues some steps; an error comes with the kernel that caused it.
    fn queue_some(
        &self,
        run: &Run,
        steps: Range<usize>,
        places: &[Address],
    ) -> std::result::Result<(), (usize, Error)> {
        steps.into_iter().try_for_each(|i| self.queue(run, i, places).map_err(|e| (self.kernel(i), e)))
    }

    /// Queues all steps.
    fn queue_all(&self, run: &Run, places: &[Address]) -> std::result::Result<(), (usize, Error)> {
        self.parts.iter().try_for_each(|part| match part {
            Part::Steps(steps) => self.queue_some(run, steps.clone(), places),
            Part::Collective(i) => self.start(run, *i, places).map_err(|e| (self.kernel(*i), e)),
            Part::Wait(i) => self.wait(run, *i).map(drop).map_err(|e| (self.kernel(*i), e)),
            Part::Transfer(i) => self.transfer(run, *i, places).map_err(|e| (self.kernel(*i), e)),
            Part::Guarded(i) => self.queue_some(run, *i..*i + 1, places),
            Part::Agreement => self.agree(run).map_err(|e| (self.kernel(self.agreement), e)),
        })
    }

    /// The kernel of a step, or of the last one.
    fn kernel(&self, step: usize) -> usize {
        self.steps.get(step).or(self.steps.last()).map_or(0, |(k, _)| *k)
    }

    fn run_steps(
        &mut self,
        context: &mut DeviceContext,
        program: &Program,
        Operands { inputs, slots, outputs }: Operands,
        mesh: Option<&Mesh>,
        [times, hidden]: [Option<&mut [f64]>; 2],
    ) -> std::result::Result<(), (usize, Error)> {
        let first = |e| (0, e);
        if let Some(mesh) = mesh.filter(|_| self.has_stages) {
            mesh.begin_stages(&self.pairs(mesh.peers.coordinate(Axis::Pp))).map_err(first)?;
        }
        context.arena.ensure(program.arena_bytes).map_err(first)?;
        context.scratch.ensure(self.scratch).map_err(first)?;
        let context = &*context;
        let run = &Run { context, mesh };
        let at = addresses(&self.operands, inputs, outputs).map_err(first)?;
        let bytes: Vec<u8> = slots[..program.slots.len()].iter().flat_map(|w| w.to_le_bytes()).collect();
        context.device.upload(self.slots.address, &bytes).map_err(first)?;
        let own = places(program, context.arena.base, &at);
        if let Some(times) = times {
            self.tables(context, &own).map_err(first)?;
            return self.timed(run, &own, times, hidden);
        }
        if context.replay && self.steps.len() > 1 {
            self.graphs.observe(context, &self.operands, &at).map_err(first)?;
            let bound = places(program, context.arena.base, &self.graphs.bound(&at));
            if self.runs >= CAREFUL_RUNS && self.graphs.is_known(&bound) {
                self.tables(context, &bound).map_err(first)?;
                return self.replay(run, &at, &bound).map_err(first);
            }
            self.graphs.remember(bound);
        }
        self.tables(context, &own).map_err(first)?;
        self.queue_all(run, &own)
    }

    /// Replays the graphs of places that occurred before, and captures them first if there are none.
    fn replay(&mut self, run: &Run, at: &[Address], bound: &[Address]) -> Result<()> {
        let mut graphs = std::mem::take(&mut self.graphs);
        let launch = |captured: &mut Captured| self.replay_parts(run, captured, bound);
        let done = graphs.replay(run.context, &self.operands, at, bound, launch);
        self.graphs = graphs;
        done
    }

    /// Launches the graph of each part, and captures those that are missing. On a mesh, collectives and short parts are queued.
    fn replay_parts(&self, run: &Run, captured: &mut Captured, bound: &[Address]) -> Result<()> {
        let queue = |steps: Range<usize>| self.queue_some(run, steps, bound).map_err(|e| e.1);
        let mut next = 0;
        for part in &self.parts {
            match part {
                Part::Steps(steps) if self.is_meshed && steps.len() < LEAST_CAPTURED => queue(steps.clone())?,
                Part::Steps(steps) => {
                    if next == captured.len() {
                        captured.push(Replay::capture(&run.context.device, || queue(steps.clone()))?);
                    }
                    captured[next].launch()?;
                    next += 1;
                }
                Part::Collective(i) => self.start(run, *i, bound)?,
                Part::Wait(i) => drop(self.wait(run, *i)?),
                Part::Transfer(i) => self.transfer(run, *i, bound)?,
                Part::Guarded(i) => queue(*i..*i + 1)?,
                Part::Agreement => self.agree(run)?,
            }
        }
        Ok(())
    }

    /// Runs with events around each step. A collective has the time for which other steps wait for it; the rest of its time, during
    /// which they run, is added to `hidden`.
    fn timed(
        &self,
        run: &Run,
        places: &[Address],
        times: &mut [f64],
        mut hidden: Option<&mut [f64]>,
    ) -> std::result::Result<(), (usize, Error)> {
        let device = &run.context.device;
        // The kernel of each interval between two events; none for what is not measured.
        let mut events = vec![Event::record(device).map_err(|e| (0, e))?];
        let mut ks: Vec<Option<usize>> = Vec::new();
        let mut lanes: Vec<(usize, Timing, usize)> = Vec::new();
        for part in &self.parts {
            let mut measured = |k: Option<usize>| -> std::result::Result<(), (usize, Error)> {
                events.push(Event::record(device).map_err(|e| (k.unwrap_or(0), e))?);
                ks.push(k);
                Ok(())
            };
            match part {
                Part::Steps(steps) => {
                    for i in steps.clone() {
                        let k = self.kernel(i);
                        self.queue(run, i, places).map_err(|e| (k, e))?;
                        let is_point = matches!(self.steps[i].1, Step::Collective(_));
                        measured((!is_point).then_some(k))?;
                    }
                }
                Part::Collective(i) => {
                    self.start(run, *i, places).map_err(|e| (self.kernel(*i), e))?;
                    measured(None)?;
                }
                Part::Wait(i) => {
                    let k = self.kernel(*i);
                    let timing = self.wait(run, *i).map_err(|e| (k, e))?;
                    measured(Some(k))?;
                    lanes.extend(timing.map(|timing| (k, timing, ks.len() - 1)));
                }
                Part::Transfer(i) => {
                    let k = self.kernel(*i);
                    self.transfer(run, *i, places).map_err(|e| (k, e))?;
                    measured(Some(k))?;
                }
                Part::Guarded(i) => {
                    self.queue_some(run, *i..*i + 1, places)?;
                    measured(Some(self.kernel(*i)))?;
                }
                Part::Agreement => {
                    self.agree(run).map_err(|e| (self.kernel(self.agreement), e))?;
                    measured(None)?;
                }
            }
        }
        device.synchronize().map_err(|e| (0, e))?;
        let seconds = |at: usize| events[at + 1].since(&events[at]);
        for (at, k) in ks.iter().enumerate() {
            if let Some(k) = k {
                times[*k] += seconds(at).map_err(|e| (*k, e))?;
            }
        }
        for (k, timing, at) in lanes {
            let own = timing.seconds().and_then(|own| Ok((own - seconds(at)?).max(0.0))).map_err(|e| (k, e))?;
            if let Some(hidden) = hidden.as_deref_mut() {
                hidden[k] += own;
            }
        }
        Ok(())
    }
}

impl Executable for CudaExecutable {
    fn run(
        &self,
        inputs: &[Buffer],
        slots: &[u64],
        outputs: &[Buffer],
        context: RunContext<'_>,
    ) -> std::result::Result<(), Failure> {
        let RunContext { interrupt, times, hidden, peers } = context;
        let origin = |k: usize| self.program.kernels.get(k).map_or(Origin::NONE, |k| k.origin());
        if slots.len() < self.program.slots.len() {
            let error = Error::system("cuda", "this is a bug: a run-time number is missing");
            return Err(Failure { origin: origin(0), error });
        }
        let first = |error| Failure { origin: origin(0), error };
        let context = &mut *self.shared.lock().map_err(first)?;
        // Kernels are queued in less time than an interrupt takes to arrive; another thread's run may have held the device.
        interrupt.check().map_err(first)?;
        let compiled = &mut *self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        let connection = peers.map(|_| context.connection()).transpose().map_err(first)?;
        let is_timed = times.is_some();
        let mesh = connection.as_deref().zip(peers).map(|(connection, peers)| Mesh {
            connection,
            peers,
            is_timed,
            route: self.program.route,
        });
        if let Some(mesh) = &mesh {
            mesh.begin().map_err(first)?;
        }
        compiled.adapt(context, &self.program, mesh.as_ref()).map_err(first)?;
        // The devices of a mesh raise the error of an earlier run where they agree.
        if mesh.is_none() || !compiled.agrees() {
            context.check_faults(&self.program)?;
        }
        for buffer in inputs {
            context.faults.check(made_by(buffer)).map_err(first)?;
        }
        let number = context.beside.number();
        if let Some(cells) = &compiled.cells {
            context.faults.starts(cells, number);
        }
        compiled.writes.iter().filter_map(|k| inputs.get(*k)).for_each(|state| state_written(state, number));
        outputs.iter().for_each(|buffer| made(buffer, number));
        let operands = Operands { inputs, slots, outputs };
        if let Err((k, error)) = compiled.run_steps(context, &self.program, operands, mesh.as_ref(), [times, hidden]) {
            if let Some(mesh) = &mesh {
                mesh.fail();
                mesh.settle().map_err(first)?;
                // Other devices may read this one's memory, and have reported a bad index to it.
                context.device.synchronize().map_err(first)?;
                context.check_faults(&self.program)?;
            }
            return Err(Failure { origin: origin(k), error });
        }
        context.beside.mark().map_err(first)?;
        compiled.runs += 1;
        if compiled.runs <= CAREFUL_RUNS && compiled.cells.is_some() {
            context.device.synchronize().map_err(first)?;
            context.check_faults(&self.program)?;
            context.faults.finished(number);
        } else if mesh.is_some() {
            // A device whose results no one reads learns here that runs have finished, so that all invalidate about the same.
            let finished = context.beside.finished();
            if !context.faults.is_reported() {
                context.faults.finished(finished);
            }
        }
        Ok(())
    }
}
