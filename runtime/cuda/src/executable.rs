//! Compiles a program for a GPU: lowers each kernel to launches, cuBLASLt products or cuDNN convolutions, and loads them.
//!
//! The first runs are launched one by one. Later ones are captured and replayed as one CUDA graph (`replay.rs`). Before
//! each run, the run-time numbers (slots) are uploaded to a block of device memory. The devices of a mesh meet between graphs: behind one
//! they start the collectives whose pieces it computes (`mesh/mod.rs`).
//!
//! An index out of range does not stop a kernel. The kernel reports it to a cell in host memory, sets the device's `halt`
//! word and continues with a valid index. Kernels that write States return at once while the word is set, so a bad index
//! reaches no State, in this step or in those queued behind it (plan's `index_checks` puts State writes behind the checks).
//! The first runs of a program synchronize and raise the error at once; later ones raise it at the next host wait or run.

mod channel;
mod errors;
mod mesh;
mod parts;
mod products;
mod replay;
mod run;
mod transfer;

use errors::{DeviceErrors, Report};
pub(crate) use errors::{Fault, Faults};
pub(crate) use mesh::{Communicators, Connection};
pub(crate) use products::{epilogue, product};
pub use replay::STAGED_BYTES;

use crate::backend::{DeviceContext, SharedDevice};
use crate::blas::{self, Epilogue, Gemm, Product};
use crate::dnn::Plan;
use crate::driver::{Allocation, Entry, Module, Point};
use crate::guard::report::Subject;
use crate::guard::watchdog::History;
use crate::launch::{Arg, Function, Launch, Props, Word, Work};
use crate::library::collective::{self, Collective};
use crate::library::fp8;
use crate::library::transfer::{self as transfers, Transfer};
use crate::{attention, conv, emit, library, nvrtc};
use perilune_core::DType;
use perilune_core::error::{Error, Result};
use perilune_core::graph::Node;
use perilune_core::op::IndexFault;
use perilune_core::ops::matmul::LINEAR;
use perilune_plan::ir::{Kernel, Origin, Program, Storage, ValueId};
use replay::{Graphs, Operand};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex};

/// Whether this backend has a kernel for a fused op.
pub fn has_kernel(node: &Node, props: &Props) -> bool {
    // In f64, a sum is not rounded before its bias is added, whether a kernel or a map adds it.
    (node.op == &LINEAR && node.dtype != DType::F64)
        || attention::has_kernel(node)
        || library::pool::has_kernel(node)
        || fp8::has_kernel(node, props.arch)
}

enum Step {
    /// A collective of one or several tensors, each with the entries of its functions.
    Collective(Vec<(Collective, Vec<Entry>)>),
    /// One end of a transfer between pipeline stages.
    Transfer(Transfer),
    Conv {
        plan: Arc<Plan>,
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
        /// The last launches of a recipe's kernel whose code is guarded.
        history: Option<Arc<History>>,
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
    buffer: Allocation,
    last: Vec<u64>,
}

/// A program with its device. A run takes the device's lock, and then its own.
pub(crate) struct CudaExecutable {
    compiled: Mutex<Compiled>,
    program: Arc<Program>,
    shared: Arc<SharedDevice>,
}

/// The launches of a program, and what its runs leave for later ones.
struct Compiled {
    steps: Vec<(usize, Step)>,
    /// The first step that writes a State, or their number: there the devices of a mesh agree that none has failed.
    agreement: usize,
    /// Steps that are collectives, and before which step each is waited for.
    waits: Vec<(usize, usize)>,
    graphs: Graphs,
    /// By step, where the pieces of a collective are complete; of a program that has run on a mesh. Graphs record them.
    points: BTreeMap<usize, Point>,
    /// Whether the last run was on a mesh, and as a pipeline stage, and what such a run queues.
    is_meshed: bool,
    has_stages: bool,
    parts: Vec<parts::Part>,
    /// Inputs, then outputs.
    operands: Vec<Operand>,
    slots: Allocation,
    cells: Option<Arc<DeviceErrors>>,
    scratch: usize,
    runs: u64,
    /// Inputs that the program writes, which are States.
    writes: Vec<usize>,
}

/// What a kernel is lowered to: launches, products, collectives and transfers.
enum Lowered {
    Work(Work),
    Collective(Vec<Collective>),
    Transfer(Transfer),
    Conv(Box<conv::Call>),
    Gemm(Box<Step>),
}

/// The functions that a program launches.
pub(crate) fn functions(context: &mut DeviceContext, program: &Program) -> Result<Vec<Arc<Function>>> {
    Ok(launched(&parts(context, program)?))
}

fn launched(parts: &[(usize, Lowered)]) -> Vec<Arc<Function>> {
    let functions = |(_, part): &(usize, Lowered)| match part {
        Lowered::Work(w) => w.launches.iter().map(|l| l.function.clone()).collect(),
        Lowered::Collective(all) => all.iter().flat_map(|c| c.functions.clone()).collect(),
        Lowered::Transfer(_) | Lowered::Conv(_) | Lowered::Gemm(_) => Vec::new(),
    };
    parts.iter().flat_map(functions).collect()
}

/// What each kernel takes, with its number, in order.
fn parts(context: &mut DeviceContext, program: &Program) -> Result<Vec<(usize, Lowered)>> {
    let props = &context.device.clone().props;
    let mut parts: Vec<(usize, Lowered)> = Vec::new();
    for (k, kernel) in program.kernels.iter().enumerate() {
        match kernel {
            Kernel::Region(r) => {
                parts.push((k, Lowered::Work(emit::regions(program, std::slice::from_ref(r), props)?)))
            }
            Kernel::Multi(list) => parts.push((k, Lowered::Work(emit::regions(program, list, props)?))),
            Kernel::Library(l) if conv::is(l.op) => {
                let conv::Parts { before, calls, after } = conv::parts(l)?;
                parts.push((k, Lowered::Work(before)));
                parts.extend(calls.into_iter().map(|c| (k, Lowered::Conv(Box::new(c)))));
                parts.push((k, Lowered::Work(after)));
            }
            Kernel::Library(l) if fp8::is(l.op) => {
                let (before, operands) = fp8::parts(program, l)?;
                parts.push((k, Lowered::Work(before)));
                let how = Epilogue { bias: operands.bias.is_some(), ..Epilogue::default() };
                let gemm = context.blas.gemm(&operands.problem, false, how, blas::ALIGNMENT, None)?;
                let operands = Box::new(operands);
                parts.push((k, Lowered::Gemm(Box::new(Step::Fp8 { gemm, operands }))));
            }
            Kernel::Library(l) if collective::is(l.op) => {
                let (before, all) = collective::parts(program, l, props)?;
                parts.push((k, Lowered::Work(before)));
                parts.push((k, Lowered::Collective(all)));
                if let Some(r) = &l.epilogue {
                    parts.push((k, Lowered::Work(emit::regions(program, std::slice::from_ref(r), props)?)));
                }
            }
            Kernel::Library(l) if transfers::is(l.op) => {
                let (before, transfer) = transfers::parts(program, l)?;
                parts.push((k, Lowered::Work(before)));
                parts.push((k, Lowered::Transfer(transfer)));
                if let Some(r) = &l.epilogue {
                    parts.push((k, Lowered::Work(emit::regions(program, std::slice::from_ref(r), props)?)));
                }
            }
            Kernel::Library(l) => {
                let (gemm, rest) = match product(program, l) {
                    Some(p) if l.op == &LINEAR => (products::linear(context, program, l, p), l.epilogue.as_ref()),
                    Some(p) => {
                        let (gemm, taken) = products::gemm(context, program, l, p)?;
                        (Some(gemm), if taken { None } else { l.epilogue.as_ref() })
                    }
                    None => (None, l.epilogue.as_ref()),
                };
                match gemm {
                    Some(g) => parts.push((k, Lowered::Gemm(Box::new(g)))),
                    None => parts.push((k, Lowered::Work(library::routine(program, l, props)?))),
                }
                if let Some(r) = rest {
                    parts.push((k, Lowered::Work(emit::regions(program, std::slice::from_ref(r), props)?)));
                }
            }
        }
    }
    Ok(parts)
}

impl CudaExecutable {
    pub fn new(shared: &Arc<SharedDevice>, program: Arc<Program>) -> Result<CudaExecutable> {
        let compiled = Compiled::new(&mut *shared.lock()?, &program)?;
        Ok(CudaExecutable { compiled: Mutex::new(compiled), program, shared: shared.clone() })
    }
}

impl Compiled {
    fn new(context: &mut DeviceContext, program: &Arc<Program>) -> Result<Compiled> {
        let parts = parts(context, program)?;
        let entries = entries(context, &launched(&parts))?;
        let entry = |function: &Function| {
            let found = entries.get(&nvrtc::name(function)).cloned();
            found.ok_or_else(|| Error::system("cuda", "this is a bug: no entry"))
        };
        let mut steps = Vec::new();
        let mut scratch = 0;
        let mut plans: HashMap<conv::Problem, Arc<Plan>> = HashMap::new();
        let mut faults: Vec<(Origin, Report)> = Vec::new();
        for (k, part) in parts {
            match part {
                Lowered::Gemm(step) => steps.push((k, *step)),
                Lowered::Transfer(transfer) => steps.push((k, Step::Transfer(transfer))),
                Lowered::Collective(all) => {
                    let with_entries = |c: Collective| {
                        let entries = c.functions.iter().map(|f| entry(f)).collect::<Result<_>>()?;
                        Ok((c, entries))
                    };
                    steps.push((k, Step::Collective(all.into_iter().map(with_entries).collect::<Result<_>>()?)));
                }
                Lowered::Conv(call) => {
                    let Some(dnn) = context.dnn() else { return Err(Error::system("cuda", "this is a bug: no cuDNN")) };
                    let plan = match plans.get(&call.problem) {
                        Some(plan) => Arc::clone(plan),
                        None => {
                            let plan = Arc::new(dnn.plan(&call.problem)?);
                            plans.insert(call.problem, plan.clone());
                            plan
                        }
                    };
                    scratch = scratch.max(call.scratch + plan.workspace);
                    steps.push((k, Step::Conv { plan, call: *call }));
                }
                Lowered::Work(work) => {
                    scratch = scratch.max(work.scratch_bytes);
                    for launch in work.launches {
                        if launch.grid.contains(&0) {
                            continue;
                        }
                        let entry = entry(&launch.function)?;
                        // Together with the kernel's static shared memory, more than 48 KiB needs an explicit limit.
                        if launch.shared_bytes > 32 << 10 {
                            entry.allow_shared(launch.shared_bytes)?;
                        }
                        let mut tables = Vec::new();
                        for arg in &launch.args {
                            if let Arg::Table(words) = arg {
                                let buffer = context.heap.alloc(words.len() * 8)?;
                                tables.push(Table { words: words.clone(), buffer, last: Vec::new() });
                            }
                        }
                        let mut history = None;
                        if let Some(subject) = launch.subject() {
                            let subject = Subject { time: context.watchdog.time(), ..Subject::clone(subject) };
                            let launches = history.insert(Arc::new(History::default()));
                            let report = Report::Kernel(Arc::new(subject), launches.clone());
                            faults.push((program.kernels[k].origin(), report));
                        } else if launch.args.contains(&Arg::Fault) {
                            let kernel = &program.kernels[k];
                            let fault = match kernel {
                                Kernel::Library(l) => {
                                    l.op.index_fault.map_or(IndexFault::elements(l.op.name), |fault| fault(&l.attrs))
                                }
                                _ => IndexFault::elements("kernel"),
                            };
                            faults.push((kernel.origin(), Report::Index(fault)));
                        }
                        let fault = faults.len().saturating_sub(1);
                        steps.push((k, Step::Launch { launch, entry, tables, fault, history }));
                    }
                }
            }
        }
        let cells = if faults.is_empty() {
            None
        } else {
            let cells = Arc::new(DeviceErrors::new(&context.device, context.halt.address, faults, program)?);
            context.faults.cells.push(Arc::downgrade(&cells));
            Some(cells)
        };
        let slots = context.heap.alloc(program.slots.len() * 8)?;
        let input = |v: ValueId| match program.values[v.0 as usize].storage {
            Storage::Input(k) => Some(k as usize),
            _ => None,
        };
        let writes: BTreeSet<usize> = program.kernels.iter().flat_map(Kernel::writes).filter_map(input).collect();
        let operands = operands(program, &writes);
        let writes = writes.into_iter().collect();
        let writes_state = |k: usize| program.kernels[k].writes().into_iter().any(|v| input(v).is_some());
        let agreement = steps.iter().position(|(k, _)| writes_state(*k)).unwrap_or(steps.len());
        if steps.iter().skip(agreement).any(|(_, step)| matches!(step, Step::Transfer(_))) {
            // The devices of other stages would wait for it where all agree.
            return Err(Error::system("cuda", "this is a bug: a transfer behind a State write"));
        }
        let waits = waits(program, &steps);
        let (graphs, parts) = (Graphs::default(), Vec::new());
        let mut out = Compiled {
            writes,
            agreement,
            waits,
            steps,
            graphs,
            points: BTreeMap::new(),
            is_meshed: false,
            has_stages: false,
            parts,
            operands,
            slots,
            cells,
            scratch,
            runs: 0,
        };
        out.divide(false, false);
        Ok(out)
    }
}

/// The steps that are collectives, and before which step each is waited for: its place in the program, or at once if other steps may
/// use the memory of its pieces.
fn waits(program: &Program, steps: &[(usize, Step)]) -> Vec<(usize, usize)> {
    let collective = |(i, (k, step)): (usize, &(usize, Step))| {
        let Step::Collective(all) = step else { return None };
        let flight = program.in_flight.iter().find(|f| f.start == *k);
        let wait = flight.filter(|_| !all.iter().any(|(c, _)| c.is_staged())).map_or(*k + 1, |f| f.wait);
        let before = steps.iter().position(|(k, _)| *k >= wait).unwrap_or(steps.len());
        Some((i, before.max(i + 1)))
    };
    steps.iter().enumerate().filter_map(collective).collect()
}

/// Returns the operands of a program, which writes the inputs `states`. The bytes of each are those of its largest value.
fn operands(program: &Program, states: &BTreeSet<usize>) -> Vec<Operand> {
    let input = |k| Operand { nbytes: 0, is_state: states.contains(&k), is_output: false };
    // The description of an output is that of the whole tensor, of which a device may have a part.
    let output = Operand { nbytes: 0, is_state: false, is_output: true };
    let mut operands: Vec<Operand> = (0..program.inputs.len()).map(input).collect();
    operands.extend(program.outputs.iter().map(|_| output));
    for v in &program.values {
        let k = match v.storage {
            Storage::Input(k) => k as usize,
            Storage::Output(k) => program.inputs.len() + k as usize,
            Storage::Arena(_) => continue,
        };
        operands[k].nbytes = operands[k].nbytes.max(v.nbytes());
    }
    operands
}

/// Compiles functions and looks them up in their modules by name.
fn entries(context: &mut DeviceContext, functions: &[Arc<crate::launch::Function>]) -> Result<HashMap<String, Entry>> {
    let cubins = context.compiler.compile(functions)?;
    let mut out = HashMap::new();
    for (f, cubin) in functions.iter().zip(cubins) {
        let name = nvrtc::name(f);
        if out.contains_key(&name) {
            continue;
        }
        let module = match context.modules.get(&cubin.hash) {
            Some(m) => m.clone(),
            None => {
                let m = Module::load(&context.device, &cubin.bytes)?;
                context.modules.insert(cubin.hash, m.clone());
                m
            }
        };
        out.insert(name.clone(), module.entry(&name)?);
    }
    Ok(out)
}
