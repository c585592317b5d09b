//! A program on a GPU: its steps, and how a run queues them.
//!
//! The first runs go launch by launch; once a program runs again over the same addresses, what it queues is captured and
//! replayed as one graph. Numbers that change from run to run lie in a block of device memory that is filled before.
//!
//! A bad index does not stop a kernel: it is reported to a cell in host memory and harmless otherwise. The first runs of
//! a program wait for the device and raise it at once; later ones raise it when the host next waits, or at the next run.

use crate::autotune::{Search, Trial};
use crate::backend::{DeviceContext, address, written};
use crate::blas::{self, Addresses, Epilogue, Gemm, Product};
use crate::dnn::{self, Plan};
use crate::driver::{Address, Entry, Event, Module, Pinned, Replay, TensorMap};
use crate::launch::{Arg, Function, Launch, Props, Word, Work};
use crate::library::fp8;
use crate::memory::CudaBuffer;
use crate::{attention, conv, emit, library, nvrtc};
use perilune_core::error::{Error, Result};
use perilune_core::graph::Node;
use perilune_core::ops::attention::{ATTENTION, ATTENTION_BACKWARD};
use perilune_core::ops::elementwise::MapFn;
use perilune_core::ops::grouped::{GROUPED_MATMUL, GROUPED_SUMS, bad_end};
use perilune_core::ops::index::{INDEX_SELECT, OF_EMBEDDING};
use perilune_core::ops::loss::{OF_CLASSES, cure_of_class};
use perilune_core::ops::matmul::{LINEAR, MATMUL};
use perilune_core::{DType, Layout};
use perilune_plan::ir::{Code, Kernel, Library, Operand, Origin, Program, Region, Source, Storage, ValueId};
use perilune_plan::{Buffer, Executable, Failure};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ffi::c_void;
use std::rc::Rc;
use std::sync::Arc;

/// Runs that go launch by launch, and wait where an index may be bad.
const CAREFUL_RUNS: u64 = 2;
/// Captured graphs of a program, for as many sets of addresses.
const GRAPHS: usize = 64;
/// Products of fewer operations are not timed, even where timing is asked for.
const WORTH_TIMING: f64 = 1e8;
/// Words of a `Fault` (kernels/device/fault.cuh).
const FAULT_WORDS: usize = 3;

/// Whether a fused op has a kernel of its own here.
pub fn has_kernel(node: &Node, props: &Props) -> bool {
    // In f64 a sum is not rounded before its bias is added, whoever adds it.
    (node.op == &LINEAR && node.dtype != DType::F64)
        || attention::has_kernel(node)
        || library::pool::has_kernel(node)
        || fp8::has_kernel(node, props.arch)
}

/// The launches of a library call, without its epilogue.
pub(crate) fn routine(program: &Program, l: &Library, props: &Props) -> Result<Work> {
    let work = match l.op.name {
        name if name == ATTENTION.name => attention::forward(program, l, props)?,
        name if name == ATTENTION_BACKWARD.name => attention::backward(program, l, props)?,
        _ => return library::routine(program, l, props),
    };
    // These state their own arithmetic.
    let contract = |f: &Function| Function { label: f.label.clone(), text: format!("{}{}", nvrtc::CONTRACT, f.text) };
    let launches = work.launches.into_iter();
    let launches = launches.map(|l| Launch { function: Arc::new(contract(&l.function)), ..l }).collect();
    Ok(Work { launches, ..work })
}

/// Where the kernels of a program report bad indices.
pub(crate) struct DeviceErrors {
    memory: Pinned,
    kernels: Vec<(Origin, &'static str, What)>,
}

/// What an index counts.
#[derive(Clone, Copy)]
enum What {
    Elements,
    /// Classes, and the id that is ignored.
    Classes(i64),
    /// Rows: where groups of them end.
    Ends,
}

impl DeviceErrors {
    /// The first report, which is forgotten.
    pub fn take(&self) -> Option<(Origin, Error)> {
        for (k, (origin, op, what)) in self.kernels.iter().enumerate() {
            let at = k * FAULT_WORDS;
            if self.memory.read(at) as u32 != 0 {
                let (value, size) = (self.memory.read(at + 1) as i64, self.memory.read(at + 2) as i64);
                self.memory.write(at, 0);
                let (message, cure) = match what {
                    What::Ends => return Some((*origin, bad_end(None, value, size))),
                    What::Classes(ignored) => (
                        format!("a target is class {value}, but there are {size} classes"),
                        cure_of_class(size, *ignored),
                    ),
                    What::Elements => (
                        format!("index {value} is out of range for a dim of size {size}"),
                        match size {
                            0 => "there is nothing to index".to_string(),
                            n => format!("indices count from 0: here 0 to {}", n - 1),
                        },
                    ),
                };
                return Some((*origin, Error::argument(op, message).hint(cure)));
            }
        }
        None
    }
}

enum Step {
    Conv {
        plan: Rc<Plan>,
        call: conv::Call,
    },
    Fp8 {
        gemm: Gemm,
        operands: Box<fp8::Operands>,
    },
    Launch {
        launch: Launch,
        entry: Entry,
        /// One for each `Arg::Table`, in order.
        tables: Vec<Table>,
        fault: usize,
    },
    Gemm {
        gemm: Gemm,
        product: Product,
        a: ValueId,
        b: ValueId,
        out: ValueId,
        bias: Option<(ValueId, isize)>,
        residual: Option<ValueId>,
        size: usize,
    },
}

/// A table of addresses and numbers in device memory.
struct Table {
    words: Arc<[Word]>,
    buffer: CudaBuffer,
    last: RefCell<Vec<u64>>,
}

pub(crate) struct CudaExecutable {
    steps: Vec<(usize, Step)>,
    replays: RefCell<VecDeque<(Vec<Address>, Option<Replay>)>>,
    slots: CudaBuffer,
    cells: Option<Rc<DeviceErrors>>,
    scratch: usize,
    runs: Cell<u64>,
    /// Inputs that the program writes: States.
    writes: Vec<usize>,
    program: Arc<Program>,
    shared: Rc<DeviceContext>,
}

/// What a kernel takes: launches, and products.
enum Part {
    Work(Work),
    Conv(Box<conv::Call>),
    Gemm(Box<Step>),
}

/// The functions that a program launches.
pub(crate) fn functions(shared: &Rc<DeviceContext>, program: &Program) -> Result<Vec<Arc<Function>>> {
    Ok(launched(&CudaExecutable::parts(shared, program)?))
}

fn launched(parts: &[(usize, Part)]) -> Vec<Arc<Function>> {
    let launches = parts.iter().flat_map(|(_, p)| if let Part::Work(w) = p { &w.launches[..] } else { &[] });
    launches.map(|l| l.function.clone()).collect()
}

impl CudaExecutable {
    /// What each kernel takes, with its number, in order.
    fn parts(shared: &Rc<DeviceContext>, program: &Program) -> Result<Vec<(usize, Part)>> {
        let props = &shared.device.props;
        let mut parts: Vec<(usize, Part)> = Vec::new();
        for (k, kernel) in program.kernels.iter().enumerate() {
            match kernel {
                Kernel::Region(r) => {
                    parts.push((k, Part::Work(emit::regions(program, std::slice::from_ref(r), props)?)))
                }
                Kernel::Multi(list) => parts.push((k, Part::Work(emit::regions(program, list, props)?))),
                Kernel::Library(l) if conv::is(l.op) => {
                    let conv::Parts { before, call, after } = conv::parts(l)?;
                    parts.push((k, Part::Work(before)));
                    parts.extend(call.map(|c| (k, Part::Conv(Box::new(c)))));
                    parts.push((k, Part::Work(after)));
                }
                Kernel::Library(l) if fp8::is(l.op) => {
                    let (before, operands) = fp8::parts(program, l)?;
                    parts.push((k, Part::Work(before)));
                    let how = Epilogue { bias: operands.bias.is_some(), ..Epilogue::default() };
                    let gemm = shared.blas.gemm(&operands.problem, false, how, blas::ALIGNMENT, None)?;
                    let operands = Box::new(operands);
                    parts.push((k, Part::Gemm(Box::new(Step::Fp8 { gemm, operands }))));
                }
                Kernel::Library(l) => {
                    let (gemm, rest) = match product(program, l) {
                        Some(p) if l.op == &LINEAR => {
                            (CudaExecutable::linear(shared, program, l, p), l.epilogue.as_ref())
                        }
                        Some(p) => {
                            let (gemm, taken) = CudaExecutable::gemm(shared, program, l, p)?;
                            (Some(gemm), if taken { None } else { l.epilogue.as_ref() })
                        }
                        None => (None, l.epilogue.as_ref()),
                    };
                    match gemm {
                        Some(g) => parts.push((k, Part::Gemm(Box::new(g)))),
                        None => parts.push((k, Part::Work(routine(program, l, props)?))),
                    }
                    if let Some(r) = rest {
                        parts.push((k, Part::Work(emit::regions(program, std::slice::from_ref(r), props)?)));
                    }
                }
            }
        }
        Ok(parts)
    }

    pub fn new(shared: &Rc<DeviceContext>, program: Arc<Program>) -> Result<CudaExecutable> {
        let parts = CudaExecutable::parts(shared, &program)?;
        let mut entries = entries(shared, &launched(&parts))?;
        let mut steps = Vec::new();
        let mut scratch = 0;
        let mut plans: HashMap<conv::Problem, Rc<Plan>> = HashMap::new();
        let mut faults: Vec<(Origin, &'static str, What)> = Vec::new();
        for (k, part) in parts {
            match part {
                Part::Gemm(step) => steps.push((k, *step)),
                Part::Conv(call) => {
                    let Some(dnn) = shared.dnn() else { return Err(Error::system("cuda", "this is a bug: no cuDNN")) };
                    let plan = match plans.get(&call.problem) {
                        Some(plan) => Rc::clone(plan),
                        None => {
                            let plan = Rc::new(dnn.plan(&call.problem)?);
                            plans.insert(call.problem, plan.clone());
                            plan
                        }
                    };
                    scratch = scratch.max(call.scratch + plan.workspace);
                    steps.push((k, Step::Conv { plan, call: *call }));
                }
                Part::Work(work) => {
                    scratch = scratch.max(work.scratch_bytes);
                    for launch in work.launches {
                        if launch.grid.contains(&0) {
                            continue;
                        }
                        let entry = entries.remove(&nvrtc::name(&launch.function));
                        let Some(entry) = entry else { return Err(Error::system("cuda", "this is a bug: no entry")) };
                        entries.insert(nvrtc::name(&launch.function), entry.clone());
                        // With what a kernel declares beside it, more than 48 KiB need leave.
                        if launch.shared_bytes > 32 << 10 {
                            entry.allow_shared(launch.shared_bytes)?;
                        }
                        let mut tables = Vec::new();
                        for arg in &launch.args {
                            if let Arg::Table(words) = arg {
                                let buffer = shared.heap.alloc(words.len() * 8)?;
                                tables.push(Table { words: words.clone(), buffer, last: RefCell::default() });
                            }
                        }
                        if launch.args.contains(&Arg::Fault) {
                            let kernel = &program.kernels[k];
                            let (op, what) = match kernel {
                                Kernel::Library(l) if l.op.name == "class_ids" => {
                                    (OF_CLASSES[l.attrs[1] as usize], What::Classes(l.attrs[2]))
                                }
                                Kernel::Library(l)
                                    if l.op == &INDEX_SELECT && l.attrs.get(1) == Some(&OF_EMBEDDING) =>
                                {
                                    ("embedding", What::Elements)
                                }
                                Kernel::Library(l) if l.op == &GROUPED_MATMUL || l.op == &GROUPED_SUMS => {
                                    (GROUPED_MATMUL.name, What::Ends)
                                }
                                Kernel::Library(l) => (l.op.name, What::Elements),
                                _ => ("kernel", What::Elements),
                            };
                            faults.push((kernel.origin(), op, what));
                        }
                        let fault = faults.len().saturating_sub(1);
                        steps.push((k, Step::Launch { launch, entry, tables, fault }));
                    }
                }
            }
        }
        let cells = if faults.is_empty() {
            None
        } else {
            let memory = Pinned::new(&shared.device, faults.len() * FAULT_WORDS * 8)?;
            let cells = Rc::new(DeviceErrors { memory, kernels: faults });
            shared.cells.borrow_mut().push(Rc::downgrade(&cells));
            Some(cells)
        };
        let slots = shared.heap.alloc(program.slots.len() * 8)?;
        let input = |v: ValueId| match program.values[v.0 as usize].storage {
            Storage::Input(k) => Some(k as usize),
            _ => None,
        };
        let writes: BTreeSet<usize> = program.kernels.iter().flat_map(Kernel::writes).filter_map(input).collect();
        Ok(CudaExecutable {
            writes: writes.into_iter().collect(),
            steps,
            replays: RefCell::default(),
            slots,
            cells,
            scratch,
            runs: Cell::new(0),
            program,
            shared: shared.clone(),
        })
    }

    /// The step of a product, and whether it does the epilogue too.
    fn gemm(shared: &Rc<DeviceContext>, program: &Program, l: &Library, product: Product) -> Result<(Step, bool)> {
        let (Operand::View(a, _), Operand::View(b, _)) = (&l.inputs[0], &l.inputs[1]) else {
            return Err(Error::system("cuda", "this is a bug: a product of constants"));
        };
        let fused = l.epilogue.as_ref().and_then(|r| epilogue(program, l, r, &product));
        let (how, bias, residual, out) = match fused {
            Some(f) => {
                let how = Epilogue { bias: f.bias.is_some(), residual: f.residual.is_some(), plain_sums: true };
                (how, f.bias, f.residual, f.out)
            }
            None => (Epilogue::default(), None, None, l.outputs[0]),
        };
        let size = l.dtypes[0].size();
        let p = &product.problem;
        let trial = CudaExecutable::trial(shared, program, [*a, *b, out], &product, l.dtypes[0]);
        let align = bias.map_or(256, |(_, n)| alignment(n, size));
        let gemm = match shared.blas.gemm(p, l.tf32, how, align, trial.as_ref()) {
            Err(_) if how != Epilogue::default() => {
                // Then the map runs by itself.
                let plain = shared.blas.gemm(p, l.tf32, Epilogue::default(), align, trial.as_ref())?;
                let (out, bias, residual) = (l.outputs[0], None, None);
                return Ok((Step::Gemm { gemm: plain, product, a: *a, b: *b, out, bias, residual, size }, false));
            }
            other => other?,
        };
        let step = Step::Gemm { gemm, product, a: *a, b: *b, out, bias, residual, size };
        Ok((step, how != Epilogue::default()))
    }

    /// The step of `linear`, if cuBLASLt has a product for it that adds the bias before it rounds.
    fn linear(shared: &Rc<DeviceContext>, program: &Program, l: &Library, product: Product) -> Option<Step> {
        let [Operand::View(a, _), Operand::View(b, _), Operand::View(v, layout)] = &l.inputs[..] else { return None };
        let (size, out) = (l.dtypes[0].size(), l.outputs[0]);
        let trial = CudaExecutable::trial(shared, program, [*a, *b, out], &product, l.dtypes[0]);
        let how = Epilogue { bias: true, ..Epilogue::default() };
        let align = alignment(layout.offset, size);
        let gemm = shared.blas.gemm(&product.problem, l.tf32, how, align, trial.as_ref()).ok()?;
        let bias = Some((*v, layout.offset));
        Some(Step::Gemm { gemm, product, a: *a, b: *b, out, bias, residual: None, size })
    }

    /// Memory of the arena that algorithms may be tried in, where that is asked for and worth it. The plan needs that much of
    /// it anyway, and what lies there is no longer needed by anyone, or not before this has run.
    fn trial(
        shared: &Rc<DeviceContext>,
        program: &Program,
        [a, b, out]: [ValueId; 3],
        product: &Product,
        dtype: DType,
    ) -> Option<Trial> {
        if shared.search == Search::Off || product.problem.flops() <= WORTH_TIMING {
            return None;
        }
        let nbytes = |v: ValueId| program.values[v.0 as usize].nbytes();
        let (reach, written) = ([nbytes(a), nbytes(b)], nbytes(out));
        // A, B, the result, and what a residual is read from.
        let [of_a, of_b, of_out] = [reach[0], reach[1], written].map(|n| n.next_multiple_of(512));
        let starts = [0, of_a, of_a + of_b, of_a + of_b + of_out];
        let needed = starts[3] + written;
        if needed > program.arena_bytes {
            return None;
        }
        shared.arena.borrow_mut().ensure(needed).ok()?;
        let base = shared.arena.borrow().base;
        let at = |k: usize, elements: isize| {
            (base + starts[k] as u64).wrapping_add_signed((elements * dtype.size() as isize) as i64)
        };
        let (oa, ob, _) = product.offsets[0];
        let addresses =
            Addresses { a: at(0, oa), b: at(1, ob), out: at(2, 0), bias: at(1, 0), residual: at(3, 0), scales: [0; 2] };
        Some(Trial { search: shared.search, dtype, base, nbytes: needed, at: addresses, written })
    }

    fn places(&self, inputs: &[Buffer], outputs: &[Buffer]) -> Result<Vec<Address>> {
        let arena = self.shared.arena.borrow().base;
        let given = |list: &[Buffer], k: usize, nbytes: usize| match list.get(k) {
            Some(b) => address(b, nbytes),
            None => Err(Error::system("cuda", format!("this is a bug: buffer {k} is missing"))),
        };
        let place = |v: &perilune_plan::ir::Value| match v.storage {
            Storage::Input(k) => given(inputs, k as usize, v.nbytes()),
            Storage::Output(k) => given(outputs, k as usize, v.nbytes()),
            Storage::Arena(at) => Ok(arena + at as u64),
        };
        self.program.values.iter().map(place).collect()
    }

    /// Fills the tables that differ from the last run's.
    fn tables(&self, places: &[Address]) -> Result<()> {
        let tables =
            self.steps.iter().filter_map(|s| if let Step::Launch { tables, .. } = &s.1 { Some(tables) } else { None });
        for t in tables.flatten() {
            let words: Vec<u64> = t
                .words
                .iter()
                .map(|w| match w {
                    Word::Number(n) => *n,
                    Word::Value(v, offset) => places[v.0 as usize].wrapping_add_signed(*offset),
                })
                .collect();
            if *t.last.borrow() != words {
                let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
                self.shared.device.upload(t.buffer.address, &bytes)?;
                *t.last.borrow_mut() = words;
            }
        }
        Ok(())
    }

    /// Queues one step.
    fn queue(&self, step: &Step, places: &[Address]) -> Result<()> {
        let at = |v: &ValueId| places[v.0 as usize];
        let place = |a: &Arg| match a {
            Arg::Value(v, offset) => at(v).wrapping_add_signed(*offset),
            Arg::Scratch(n) => self.shared.scratch.borrow().base + *n as u64,
            _ => 0,
        };
        match step {
            Step::Conv { plan, call } => {
                let Some(dnn) = self.shared.dnn() else { return Ok(()) };
                let scratch = self.shared.scratch.borrow().base;
                let (x, w, y) = (place(&call.x), place(&call.w), place(&call.y));
                dnn.run(plan, dnn::Addresses { x, w, y, scratch: scratch + call.scratch as u64 })
            }
            Step::Fp8 { gemm, operands: o } => {
                let [a, b, out] = [&o.a, &o.b, &o.out].map(place);
                let bias = o.bias.as_ref().map_or(0, place);
                let scales = [place(&o.scales[0]), place(&o.scales[1])];
                self.shared.blas.run(gemm, Addresses { a, b, out, bias, residual: 0, scales })
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
                    self.shared.blas.run(gemm, addresses)?;
                }
                Ok(())
            }
            Step::Launch { launch, entry, tables, fault } => {
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
                        Arg::I32(x) => *x as u32 as u64,
                        Arg::I64(x) => *x as u64,
                        Arg::F32(x) => u64::from(x.to_bits()),
                        Arg::F64(x) => x.to_bits(),
                        Arg::Bytes(_) | Arg::Map(..) => 0,
                        Arg::Table(_) => tables.next().map_or(0, |t| t.buffer.address),
                    })
                    .collect();
                let mut maps = Vec::new();
                for arg in &launch.args {
                    if let Arg::Map(of, boxes) = arg {
                        maps.push(TensorMap::new(place(of), boxes)?);
                    }
                }
                let mut maps = maps.iter();
                let mut args: Vec<*mut c_void> = Vec::with_capacity(words.len());
                for (word, arg) in words.iter_mut().zip(&launch.args) {
                    args.push(match arg {
                        Arg::Bytes(b) => b.as_ptr().cast_mut().cast(),
                        Arg::Map(..) => maps.next().map_or(std::ptr::null_mut(), TensorMap::pointer),
                        _ => std::ptr::from_mut(word).cast(),
                    });
                }
                entry.launch(&self.shared.device, launch.grid, launch.block, launch.shared_bytes, &mut args)
            }
        }
    }

    /// Queues all steps; the kernel at fault comes with an error.
    fn queue_all(&self, places: &[Address]) -> std::result::Result<(), (usize, Error)> {
        self.steps.iter().try_for_each(|(k, step)| self.queue(step, places).map_err(|e| (*k, e)))
    }

    fn run_steps(
        &self,
        inputs: &[Buffer],
        slots: &[u64],
        outputs: &[Buffer],
        times: Option<&mut [f64]>,
    ) -> std::result::Result<(), (usize, Error)> {
        let first = |e| (0, e);
        let shared = &self.shared;
        shared.arena.borrow_mut().ensure(self.program.arena_bytes).map_err(first)?;
        shared.scratch.borrow_mut().ensure(self.scratch).map_err(first)?;
        let places = self.places(inputs, outputs).map_err(first)?;
        let bytes: Vec<u8> = slots[..self.program.slots.len()].iter().flat_map(|w| w.to_le_bytes()).collect();
        shared.device.upload(self.slots.address, &bytes).map_err(first)?;
        self.tables(&places).map_err(first)?;
        if let Some(times) = times {
            return self.timed(&places, times);
        }
        if shared.replay && self.runs.get() >= CAREFUL_RUNS && self.steps.len() > 1 {
            let mut replays = self.replays.borrow_mut();
            let known = replays.iter().position(|r| r.0 == places);
            if let Some((places, replay)) = known.and_then(|at| replays.remove(at)) {
                // Seen before: worth a capture.
                let replay = match replay {
                    Some(r) => r,
                    None => {
                        Replay::capture(&shared.device, || self.queue_all(&places).map_err(|e| e.1)).map_err(first)?
                    }
                };
                let done = replay.launch().map_err(first);
                replays.push_front((places, Some(replay)));
                return done;
            }
            replays.push_front((places.clone(), None));
            replays.truncate(GRAPHS);
        }
        self.queue_all(&places)
    }

    fn timed(&self, places: &[Address], times: &mut [f64]) -> std::result::Result<(), (usize, Error)> {
        let device = &self.shared.device;
        let mut events = Vec::with_capacity(self.steps.len() + 1);
        events.push(Event::record(device).map_err(|e| (0, e))?);
        for (k, step) in &self.steps {
            let at = |e| (*k, e);
            self.queue(step, places).map_err(at)?;
            events.push(Event::record(device).map_err(at)?);
        }
        device.synchronize().map_err(|e| (0, e))?;
        for (i, (k, _)) in self.steps.iter().enumerate() {
            times[*k] += events[i + 1].since(&events[i]).map_err(|e| (*k, e))?;
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
        times: Option<&mut [f64]>,
    ) -> std::result::Result<(), Failure> {
        let origin = |k: usize| self.program.kernels.get(k).map_or(Origin::NONE, |k| k.origin());
        if slots.len() < self.program.slots.len() {
            let error = Error::system("cuda", "this is a bug: a run-time number is missing");
            return Err(Failure { origin: origin(0), error });
        }
        // Of an earlier run.
        let fault = |cells: &Rc<DeviceErrors>| match cells.take() {
            Some((origin, error)) => Err(Failure { origin, error }),
            None => Ok(()),
        };
        self.cells.as_ref().map_or(Ok(()), fault)?;
        let number = self.shared.beside.number();
        let states = self.writes.iter().filter_map(|k| inputs.get(*k));
        states.chain(outputs).for_each(|buffer| written(buffer, number));
        self.run_steps(inputs, slots, outputs, times).map_err(|(k, error)| Failure { origin: origin(k), error })?;
        self.shared.beside.mark().map_err(|error| Failure { origin: origin(0), error })?;
        self.runs.set(self.runs.get() + 1);
        if self.runs.get() <= CAREFUL_RUNS
            && let Some(cells) = &self.cells
        {
            self.shared.device.synchronize().map_err(|error| Failure { origin: origin(0), error })?;
            fault(cells)?;
        }
        Ok(())
    }
}

/// Compiles functions and finds them in their modules, by name.
fn entries(shared: &Rc<DeviceContext>, functions: &[Arc<crate::launch::Function>]) -> Result<HashMap<String, Entry>> {
    let cubins = shared.compiler.borrow_mut().compile(functions)?;
    let mut modules = shared.modules.borrow_mut();
    let mut out = HashMap::new();
    for (f, cubin) in functions.iter().zip(cubins) {
        let name = nvrtc::name(f);
        if out.contains_key(&name) {
            continue;
        }
        let module = match modules.get(&cubin.hash) {
            Some(m) => m.clone(),
            None => {
                let m = Module::load(&shared.device, &cubin.bytes)?;
                modules.insert(cubin.hash, m.clone());
                m
            }
        };
        out.insert(name.clone(), module.entry(&name)?);
    }
    Ok(out)
}

/// The product a library call is, if cuBLASLt can do it and it is worth it.
pub(crate) fn product(program: &Program, l: &Library) -> Option<Product> {
    let (Some(Operand::View(_, a)), Some(Operand::View(_, b))) = (l.inputs.first(), l.inputs.get(1)) else {
        return None;
    };
    let dtype = program.values[l.outputs[0].0 as usize].dtype;
    let (sa, sb) = (a.shape, if l.op == &LINEAR { b.permute(&[1, 0]).shape } else { b.shape });
    if let ([batch @ .., m, k], [.., n]) = (sa.dims(), sb.dims())
        && library::is_small(dtype, batch.iter().product(), *m, *n, *k)
    {
        return None;
    }
    if l.op == &MATMUL {
        return blas::product(a, b, dtype);
    }
    // The bias as cuBLASLt reads it.
    let Some(Operand::View(_, bias)) = l.inputs.get(2).filter(|_| l.op == &LINEAR) else { return None };
    let dense = bias.strides() == [1] || bias.numel() == 1;
    if dense { blas::product(a, &b.permute(&[1, 0]), dtype) } else { None }
}

/// Bytes that element `n` of a buffer lies at a multiple of.
fn alignment(n: isize, size: usize) -> u32 {
    match n.unsigned_abs() * size {
        0 => 256,
        bytes => 1 << bytes.trailing_zeros().min(8),
    }
}

/// An epilogue that cuBLASLt does.
pub(crate) struct Fused {
    bias: Option<(ValueId, isize)>,
    residual: Option<ValueId>,
    out: ValueId,
}

/// `r` as a bias of the columns or a matrix added to the product, where the bits are those of the separate map: in f32
/// and f64, whose sums are kept in the result's own precision.
pub(crate) fn epilogue(program: &Program, l: &Library, r: &Region, product: &Product) -> Option<Fused> {
    let result = &program.values[l.outputs[0].0 as usize];
    let wide = matches!(result.dtype, DType::F32 | DType::F64);
    let ([store], [a, b, sum]) = (&r.stores[..], &r.body[..]) else { return None };
    if !wide || store.0 != 2 || product.offsets.len() != 1 || !matches!(sum.code, Code::Map(MapFn::Add, _)) {
        return None;
    }
    let load = |i: &perilune_plan::ir::Instr| match &i.code {
        Code::Load { source: Source::Value(v), layout } if i.dtype == result.dtype => Some((*v, *layout)),
        _ => None,
    };
    let ((v, x), (w, y)) = (load(a)?, load(b)?);
    let (other, layout): (ValueId, Layout) = if v == l.outputs[0] { (w, y) } else { (v, x) };
    let p = &product.problem;
    let n = r.cols;
    let whole = layout.is_contiguous() && layout.offset == 0 && layout.numel() == n;
    if whole && program.values[other.0 as usize].shape.numel() == n {
        return Some(Fused { bias: None, residual: Some(other), out: store.1 });
    }
    let dims = layout.shape.dims();
    let columns = dims.len() == 2 && layout.strides() == [0, 1] && dims[1] == p.n();
    columns.then_some(Fused { bias: Some((other, layout.offset)), residual: None, out: store.1 })
}
