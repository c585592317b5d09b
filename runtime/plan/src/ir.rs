//! Defines the program of a plan: kernels over values, ready for a backend to compile.
//!
//! The program is device-neutral and complete: running it needs no graph, no Lua line and no pointer. There are three
//! kinds of kernel:
//!
//! - a [`Region`]: fused elementwise work and reductions over one iteration space, as straight-line SSA;
//! - a [`Library`] call: a routine that the backend registers under an op's name (matmul, sort, scatter …), with an
//!   optional epilogue: a map over its result, which a backend may apply before it stores the result. A collective may
//!   move several tensors in one call: it has an input, an output and the attributes of the op for each;
//! - `Multi`: one body over many leaves in one launch (an optimizer's update of every parameter, a norm of every
//!   gradient).
//!
//! # The iteration space of a region
//!
//! `batch x rows x cols` elements in row-major order, `n = batch * rows * cols`. Every instruction yields a value at one
//! [`Level`]: `Full` (one per element), `Row` (one per row, `batch * rows` of them) or `Col` (one per column and batch,
//! `batch * cols`; only results of `ReduceCol`, which nothing in the same region may use). A pure map has
//! `batch = rows = 1`.
//!
//! # Numbers do not depend on fusion
//!
//! Every instruction's result is rounded to its dtype as if it had been stored: bf16 and f16 instructions compute in f32
//! and round. Nothing is contracted across instructions. The order of additions in a reduction is a function of the
//! space's shape alone. On the CPU (a GPU has an order of its own, in `cuda::schedule::reduction_order`):
//!
//! - `ReduceRow` over `cols` elements: the row is cut into chunks of [`ROW_CHUNK`]. Within a chunk, element `i` goes to
//!   lane `i % LANES` in order of `i`, starting from the identity; then lanes fold as a halving tree (lane `k` with lane
//!   `k + LANES/2`, and so on). Chunks combine in order: f32 sums and products in f64, all else in their own dtype.
//! - `ReduceCol` over `rows`: rows are split into chunks of [`COL_CHUNK`]; within a chunk they combine in order from
//!   the identity; chunks combine in order: f32 sums and products in f64.
//! - 16-bit floats accumulate as f32 does and round once at the end. Max and min propagate NaN.

use crate::buffer_desc::BufferDesc;
use crate::route::Route;
use perilune_core::mesh::{Axis, Coordinates, Start};
use perilune_core::ops::elementwise::MapFn;
use perilune_core::ops::{Op, ReduceFn};
use perilune_core::{DType, Layout, Shape};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::sync::Arc;

/// Lanes of a row reduction.
pub const LANES: usize = 16;
/// Elements a row reduction accumulates in its lanes before folding them.
pub const ROW_CHUNK: usize = 8192;
/// Rows that a column reduction accumulates before it starts a new partial.
pub const COL_CHUNK: usize = 64;
/// Where a [`Source::Block`] may begin, in bytes: a pack of elements is never read across.
pub const BLOCK_ALIGN: usize = 64;

/// The recorded node that a value or kernel comes from: its position in the trace plus 1, or 0 if there is none.
///
/// This is not a recipe line, because a cached program outlives the lines it was first planned for. A message looks up
/// the position in the current trace.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct Origin(pub u32);

impl Origin {
    pub const NONE: Origin = Origin(0);

    /// The position in `Trace::order`.
    pub fn position(self) -> Option<usize> {
        self.0.checked_sub(1).map(|p| p as usize)
    }
}

/// A stored tensor of a program: an index into `Program::values`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ValueId(pub u32);

impl ValueId {
    /// An output that is not needed.
    pub const NONE: ValueId = ValueId(u32::MAX);
}

/// A register of a region: the index of the instruction that writes it.
pub type Reg = u32;

/// Where a value is stored while the program runs. All values are contiguous.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Storage {
    /// The k-th input buffer. Read-only, unless a State write stores to it.
    Input(u32),
    /// The k-th output buffer: allocated for each run and returned.
    Output(u32),
    /// The arena, from this byte offset on.
    Arena(usize),
}

impl Storage {
    /// Marks a value that has no storage yet.
    pub(crate) const UNPLACED: Storage = Storage::Arena(usize::MAX);
}

#[derive(Clone, Debug)]
pub struct Value {
    pub shape: Shape,
    pub dtype: DType,
    pub storage: Storage,
    pub origin: Origin,
}

impl Value {
    pub fn nbytes(&self) -> usize {
        self.shape.numel() * self.dtype.size()
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Level {
    Full,
    Row,
    Col,
}

/// The source of element `p` of a `Load`'s layout.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Source {
    /// Element `p` of a stored value.
    Value(ValueId),
    /// Element `p` of an input, plus the i64 number in a slot: what one device of a mesh has of a tensor that is whole on all. The
    /// number is a multiple of [`BLOCK_ALIGN`] bytes.
    Block { input: ValueId, start: u32 },
    /// The run-time number in a slot (i64 for integer and bool instructions, f64 for float ones, rounded to the dtype).
    Slot(u32),
    /// A constant of the program: f64 bits for float dtypes, i64 for others.
    Constant(u64),
    /// `p` itself, as i64; plus an i64 slot, if there is a `start`.
    Iota { start: Option<u32> },
    /// A uniform random f32 in [0, 1): `perilune_core::philox::uniform(seed, counter, p)`, seed and counter from i64
    /// slots. With a `start`, the i64 number in that slot is added to `p`.
    Uniform { seed: u32, counter: u32, start: Option<u32> },
}

impl Source {
    /// The stored value that it reads.
    pub fn value(&self) -> Option<ValueId> {
        match *self {
            Source::Value(v) | Source::Block { input: v, .. } => Some(v),
            Source::Slot(_) | Source::Constant(_) | Source::Iota { .. } | Source::Uniform { .. } => None,
        }
    }
}

#[derive(Clone, PartialEq, Debug)]
pub enum Code {
    /// Reads through `layout`, which has as many elements as the instruction's level and is collapsed.
    Load {
        source: Source,
        /// Shared by the loads of a program that read alike.
        layout: Arc<Layout>,
    },
    /// An elementwise function of registers of the same level.
    Map(MapFn, SmallVec<[Reg; 3]>),
    /// A change of dtype.
    Cast(Reg),
    /// Repeats a `Row` register for every element of its row.
    Broadcast(Reg),
    ReduceRow(ReduceFn, Reg),
    ReduceCol(ReduceFn, Reg),
}

#[derive(Clone, PartialEq, Debug)]
pub struct Instr {
    pub code: Code,
    pub dtype: DType,
    pub level: Level,
    pub origin: Origin,
}

/// Fused work over one iteration space.
#[derive(Clone, PartialEq, Debug)]
pub struct Region {
    pub batch: usize,
    pub rows: usize,
    pub cols: usize,
    /// SSA: an instruction reads only registers before it.
    pub body: Vec<Instr>,
    /// The registers that are stored, contiguous in the order of their level. A `Full` register may be stored to a
    /// value with longer rows, which are padded with zeros: see [`Region::pitch`].
    ///
    /// A store may overwrite a value that the region loads (in-place update) only if the store and every such load are
    /// `Full`, and each load reads the elements from where the store writes them ([`Region::loads_in_place`]). All
    /// loads of an element must then precede its store.
    pub stores: Vec<(Reg, ValueId)>,
    pub origin: Origin,
}

impl Region {
    pub fn numel(&self) -> usize {
        self.batch * self.rows * self.cols
    }

    pub fn count(&self, level: Level) -> usize {
        match level {
            Level::Full => self.numel(),
            Level::Row => self.batch * self.rows,
            Level::Col => self.batch * self.cols,
        }
    }

    /// The row stride of a stored value in elements, if that is longer than a row of the space: products need rows that
    /// begin at multiples of 16 bytes (see `passes::pad_gemm`).
    pub fn pitch(&self, value: &Value) -> Option<usize> {
        let pitch = value.shape.numel().checked_div(self.batch * self.rows)?;
        (pitch > self.cols).then_some(pitch)
    }

    /// Whether `layout` reads each element from where a `Full` store to `value` writes it.
    pub fn loads_in_place(&self, layout: &Layout, value: &Value) -> bool {
        let pitch = self.pitch(value).unwrap_or(self.cols);
        let mut stored = Layout::contiguous(Shape::of(&[self.batch * self.rows, self.cols]));
        stored.strides[0] = pitch as isize;
        layout.collapse() == stored.collapse()
    }
}

/// An input of a library call.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Operand {
    /// A stored value seen through a layout (strides may be 0 or negative).
    View(ValueId, Layout),
    /// A constant of the program, repeated for all elements (f64 bits for float dtypes, otherwise i64).
    Constant(u64, Shape, DType),
}

impl Operand {
    pub fn shape(&self) -> Shape {
        match self {
            Operand::View(_, l) => l.shape,
            Operand::Constant(_, s, _) => *s,
        }
    }
}

/// A call of the backend's routine for `op`.
#[derive(Clone, Debug)]
pub struct Library {
    pub op: &'static Op,
    pub attrs: SmallVec<[i64; 6]>,
    pub inputs: Vec<Operand>,
    /// Dtypes of the inputs.
    pub dtypes: Vec<DType>,
    /// Ordered as the op's outputs; all but the first may be [`ValueId::NONE`]. Several may be parts of one value.
    pub outputs: Vec<ValueId>,
    /// The layout of each output over its value: contiguous, unless [`crate::Backend::can_store_layout`] allows more.
    pub layouts: Vec<Layout>,
    /// A pure map over the elements of output 0, in their order, that runs after the call and reads `outputs[0]` by one
    /// `Full` identity load. Nothing outside the epilogue reads `outputs[0]`: a backend that applies the map before the
    /// store need not write it.
    pub epilogue: Option<Region>,
    /// Whether f32 products may round their operands to TF32.
    pub tf32: bool,
    pub origin: Origin,
}

#[derive(Clone, Debug)]
pub enum Kernel {
    Region(Region),
    Library(Library),
    /// Regions that differ in the values they access and, where [`crate::horizontal_fusion::same`] allows it, in their
    /// sizes. None reads or overwrites what another one writes.
    Multi(Vec<Region>),
}

impl Region {
    /// The values it loads.
    pub fn reads(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.body.iter().filter_map(|i| match i.code {
            Code::Load { source, .. } => source.value(),
            _ => None,
        })
    }

    /// The values it stores.
    pub fn writes(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.stores.iter().map(|s| s.1)
    }
}

impl Kernel {
    /// The regions of the kernel: itself, its epilogue, or all regions of a `Multi`.
    pub fn regions(&self) -> &[Region] {
        match self {
            Kernel::Region(r) => std::slice::from_ref(r),
            Kernel::Library(l) => l.epilogue.as_slice(),
            Kernel::Multi(list) => list,
        }
    }

    /// The values it reads, apart from those it computes itself.
    pub fn reads(&self) -> Vec<ValueId> {
        let mut out: Vec<ValueId> = Vec::new();
        let mut own: &[ValueId] = &[];
        if let Kernel::Library(l) = self {
            out.extend(l.inputs.iter().filter_map(|o| match o {
                Operand::View(v, _) => Some(*v),
                Operand::Constant(..) => None,
            }));
            own = &l.outputs;
        }
        out.extend(self.regions().iter().flat_map(Region::reads).filter(|v| !own.contains(v)));
        out
    }

    /// The values it writes.
    pub fn writes(&self) -> Vec<ValueId> {
        let mut out = if let Kernel::Library(l) = self { l.outputs.clone() } else { Vec::new() };
        out.retain(|v| *v != ValueId::NONE);
        out.dedup();
        out.extend(self.regions().iter().flat_map(Region::writes));
        out
    }

    pub fn into_region(self) -> Option<Region> {
        if let Kernel::Region(r) = self { Some(r) } else { None }
    }

    pub fn origin(&self) -> Origin {
        match self {
            Kernel::Region(r) => r.origin,
            Kernel::Library(l) => l.origin,
            Kernel::Multi(list) => list.first().map_or(Origin::NONE, |r| r.origin),
        }
    }
}

/// The buffer that holds one result of a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Root {
    /// A fresh output buffer.
    Output(u32),
    /// The k-th input itself, unchanged.
    Input(u32),
}

/// A collective that runs beside the kernels behind it: on a lane of its axis, while the others run in their order.
///
/// It starts in its place among the kernels and is in flight until `wait`. In between no kernel writes its operands or its results,
/// reads its results, or uses their memory for another value ([`crate::check`] verifies it). The collectives along an axis run in
/// the order of their starts. A device may also complete it where it starts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InFlight {
    /// The kernel.
    pub start: usize,
    /// The kernel before which its results are waited for; the number of kernels for the end of the program.
    pub wait: usize,
}

/// A planned step, not yet compiled for a device.
#[derive(Clone, Debug)]
pub struct Program {
    pub values: Vec<Value>,
    pub kernels: Vec<Kernel>,
    /// The collectives that run beside other kernels, in the order of their starts.
    pub in_flight: Vec<InFlight>,
    /// Shape and dtype of each input buffer.
    pub inputs: Vec<(Shape, DType)>,
    /// What each output buffer stores.
    pub outputs: Vec<BufferDesc>,
    /// Dtype of each run-time number: those of the recording, then the i64 numbers of `starts`.
    pub slots: Vec<DType>,
    /// Where the device's parts of tensors begin. A program for one device has none; one for a mesh is the same for all its devices.
    pub starts: Vec<Start>,
    /// Where each root is stored, in the order of the request.
    pub results: Vec<Root>,
    pub arena_bytes: usize,
    /// The largest sum of live arena bytes at any kernel: a lower bound for every allocator.
    pub live_bytes: usize,
    /// How attention gets its keys, forward and backward, in recording order.
    pub exchanges: Vec<AttentionExchange>,
    /// How the devices of a process exchange tensors.
    pub route: Route,
    /// The programs of the devices along `pp`, whose kernels this one lists, one device after the other. Empty if all devices run this
    /// program.
    pub stages: Vec<Stage>,
}

/// How an attention node whose queries are split along an axis gets the keys of other devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AttentionExchange {
    pub axis: Axis,
    /// In words, for messages: "zig-zag ring".
    pub form: &'static str,
    pub origin: Origin,
}

/// The program of the pipeline stages of a device. Its inputs and run-time numbers are those of the whole.
#[derive(Clone, Debug)]
pub struct Stage {
    pub program: Arc<Program>,
    /// For each input, whether the device reads or writes it.
    pub uses: Vec<bool>,
    /// For each output of the device, its number among the outputs of the whole.
    pub outputs: Vec<u32>,
}

impl Program {
    /// Returns the run-time numbers on the device at `at`: the recorded ones, and where its parts begin.
    pub fn numbers<'a>(&self, recorded: &'a [u64], at: &Coordinates) -> Cow<'a, [u64]> {
        if self.starts.is_empty() {
            return Cow::Borrowed(recorded);
        }
        recorded.iter().copied().chain(self.starts.iter().map(|start| start.at(at))).collect()
    }
}
