//! Compiles a program for a GPU: lowers each kernel to launches, cuBLASLt products or cuDNN convolutions, and loads them.
//!
//! The first runs are launched one by one. Once a program runs again over the same addresses, its launches are captured
//! and replayed as one CUDA graph. Before each run, the run-time numbers (slots) are uploaded to a block of device
//! memory.
//!
//! An index out of range does not stop a kernel. The kernel reports it to a cell in host memory and continues with a
//! valid index. The first runs of a program synchronize and raise the error at once; later ones raise it at the next
//! host wait or the next run.

mod errors;
mod products;
mod run;

pub(crate) use errors::DeviceErrors;
pub(crate) use products::{epilogue, product};

use crate::backend::DeviceContext;
use crate::blas::{self, Epilogue, Gemm, Product};
use crate::dnn::Plan;
use crate::driver::{Address, CudaBuffer, Entry, Module, Pinned, Replay};
use crate::launch::{Arg, Function, Launch, Props, Word, Work};
use crate::library::fp8;
use crate::{attention, conv, emit, library, nvrtc};
use errors::FAULT_WORDS;
use perilune_core::DType;
use perilune_core::error::{Error, Result};
use perilune_core::graph::Node;
use perilune_core::op::IndexFault;
use perilune_core::ops::matmul::LINEAR;
use perilune_plan::ir::{Kernel, Origin, Program, Storage, ValueId};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

/// Whether this backend has a kernel for a fused op.
pub fn has_kernel(node: &Node, props: &Props) -> bool {
    // In f64, a sum is not rounded before its bias is added, whether a kernel or a map adds it.
    (node.op == &LINEAR && node.dtype != DType::F64)
        || attention::has_kernel(node)
        || library::pool::has_kernel(node)
        || fp8::has_kernel(node, props.arch)
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
    /// Inputs that the program writes, which are States.
    writes: Vec<usize>,
    program: Arc<Program>,
    shared: Rc<DeviceContext>,
}

/// What a kernel consists of: launches and products.
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
    /// The parts of each kernel, with its number, in order.
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
                        Some(p) if l.op == &LINEAR => (products::linear(shared, program, l, p), l.epilogue.as_ref()),
                        Some(p) => {
                            let (gemm, taken) = products::gemm(shared, program, l, p)?;
                            (Some(gemm), if taken { None } else { l.epilogue.as_ref() })
                        }
                        None => (None, l.epilogue.as_ref()),
                    };
                    match gemm {
                        Some(g) => parts.push((k, Part::Gemm(Box::new(g)))),
                        None => parts.push((k, Part::Work(library::routine(program, l, props)?))),
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
        let mut faults: Vec<(Origin, IndexFault)> = Vec::new();
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
                        // Together with the kernel's static shared memory, more than 48 KiB needs an explicit limit.
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
                            let fault = match kernel {
                                Kernel::Library(l) => {
                                    l.op.index_fault.map_or(IndexFault::elements(l.op.name), |fault| fault(&l.attrs))
                                }
                                _ => IndexFault::elements("kernel"),
                            };
                            faults.push((kernel.origin(), fault));
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
}

/// Compiles functions and looks them up in their modules by name.
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
