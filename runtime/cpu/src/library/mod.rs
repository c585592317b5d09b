//! Compiles and runs library ops: dispatch by op name, operands, element types.
//!
//! Operands are [`Input`]s: memory with a layout; a constant is one element with strides of 0. Routines that only move
//! elements are generic over the element size. Indices are checked before anything is written.

mod affine;
mod collective;
mod index;
mod movement;
mod scan;
mod sort;

pub use index::dense;

use crate::fingerprint::Words;
use crate::gemm;
use crate::loops::Isa;
use crate::memory::Pod;
use crate::region::Context;
use half::{bf16, f16};
use perilune_core::error::{Error, Result};
use perilune_core::ops::{self, Count, Op, Work, grouped, matmul, source};
use perilune_core::{DType, Layout, MAX_RANK, Shape, host_tensor};
use perilune_plan::ir::{Library, Operand, Origin, Program, ValueId};
use perilune_plan::{Failure, Ticket};

/// A library call, ready to run.
pub struct Routine {
    op: &'static Op,
    name: &'static str,
    run: fn(&Call) -> Result<()>,
    attrs: Vec<i64>,
    inputs: Vec<InputSlot>,
    outputs: Vec<(u32, Shape, DType)>,
    /// The layout of output 0 in its value.
    out_layout: Box<Layout>,
    origin: Origin,
    work: f64,
    isa: Isa,
}

struct InputSlot {
    /// The stored value, or a constant in the first bytes of a word.
    value: std::result::Result<u32, u64>,
    /// Number of elements of the value.
    len: usize,
    layout: Layout,
    dtype: DType,
}

/// An operand during a run.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    bytes: &'a [u8],
    pub layout: Layout,
    pub dtype: DType,
}

/// A library call during a run.
pub struct Call<'a> {
    routine: &'a Routine,
    context: &'a Context<'a>,
}

type Run = fn(&Call) -> Result<()>;

/// Every library op with its routine and its cost, relative to the cost of moving its elements and computing its
/// products.
static ROUTINES: &[(&Op, Run, f64)] = &[
    (&matmul::MATMUL, gemm::run, 1.0),
    (&matmul::LINEAR, gemm::linear, 1.0),
    (&grouped::GROUPED_MATMUL, gemm::grouped::rows, 1.0),
    (&grouped::GROUPED_SUMS, gemm::grouped::sums, 1.0),
    (&ops::index::GATHER, index::gather, 1.0),
    (&ops::index::SCATTER, index::scatter, 1.0),
    (&ops::index::SCATTER_ADD, index::scatter_add, 1.0),
    (&ops::index::INDEX_SELECT, index::index_select, 1.0),
    (&ops::index::INDEX_ADD, index::index_add, 1.0),
    (&ops::loss::CLASS_IDS, index::class_ids, 1.0),
    (&ops::reduce::ARGREDUCE, sort::argreduce, 1.0),
    (&ops::sort::ARGSORT, sort::argsort, 20.0),
    (&ops::slicing::STRIDED_PAD, movement::strided_pad, 1.0),
    (&ops::slicing::COL2IM, movement::col2im, 1.0),
    (&ops::affine::AFFINE_SAMPLE, affine::affine_sample, 8.0),
    (&ops::join::CAT, movement::cat, 1.0),
    (&ops::collective::ALL_REDUCE, collective::run, 4.0),
    (&ops::collective::ALL_GATHER, collective::run, 4.0),
    (&ops::collective::REDUCE_SCATTER, collective::run, 4.0),
    (&ops::collective::ALL_TO_ALL, collective::run, 4.0),
    (&ops::collective::COLLECTIVE_PERMUTE, collective::run, 4.0),
    (&ops::collective::SEND, collective::send_transfer, 4.0),
    (&ops::collective::RECV, collective::receive_transfer, 4.0),
    (&ops::scan::CUMSUM, scan::cumsum, 1.0),
    (&ops::scan::CUMPROD, scan::cumprod, 1.0),
];

/// Whether the CPU computes a library op.
pub fn has_routine(op: &Op) -> bool {
    ROUTINES.iter().any(|routine| routine.0 == op)
}

/// The ops that check indices when they run: which operand holds them, and the check alone.
static INDEX_CHECKS: &[(&Op, usize, Run)] = &[
    (&grouped::GROUPED_MATMUL, 2, gemm::grouped::check),
    (&grouped::GROUPED_SUMS, 2, gemm::grouped::check),
    (&ops::index::GATHER, 1, index::check),
    (&ops::index::SCATTER, 1, index::check),
    (&ops::index::SCATTER_ADD, 1, index::check),
    (&ops::index::INDEX_SELECT, 1, index::check),
    (&ops::index::INDEX_ADD, 1, index::check),
    (&ops::loss::CLASS_IDS, 0, index::check_class_ids),
];

impl Routine {
    pub fn compile(program: &Program, l: &Library, isa: Isa) -> Result<Routine> {
        let outputs: Vec<_> = l
            .outputs
            .iter()
            .filter(|v| **v != ValueId::NONE)
            .map(|v| (v.0, program.values[v.0 as usize].shape, program.values[v.0 as usize].dtype))
            .collect();
        let mut inputs = Vec::new();
        for (k, o) in l.inputs.iter().enumerate() {
            inputs.push(match o {
                Operand::View(v, layout) => {
                    let value = &program.values[v.0 as usize];
                    InputSlot { value: Ok(v.0), len: value.shape.numel(), layout: *layout, dtype: value.dtype }
                }
                Operand::Constant(bits, shape, dtype) => {
                    let layout = Layout { shape: *shape, strides: [0; MAX_RANK], offset: 0 };
                    InputSlot { value: Err(u64::from_ne_bytes(constant(*dtype, *bits))), len: 1, layout, dtype: *dtype }
                }
            });
            debug_assert!(
                l.dtypes.get(k).is_none_or(|d| *d == inputs[k].dtype),
                "this is a bug: {} input {k}",
                l.op.name
            );
        }
        let moved =
            inputs.iter().map(|i| i.layout.numel()).sum::<usize>() + outputs.iter().map(|o| o.1.numel()).sum::<usize>();
        // The Lua API records the `cpu` function instead; only graphs recorded by other means get here.
        if l.op == &source::KERNEL {
            let name = source::body_of(l.op, &l.attrs).map_or_else(String::new, |b| b.name.clone());
            let error = Error::argument(&name, "its CUDA source runs on a GPU, not on the CPU");
            return Err(error.hint("give it `cpu`, a function of tensors that computes the same"));
        }
        let Some(&(_, run, cost)) = ROUTINES.iter().find(|r| r.0 == l.op) else {
            return Err(Error::system("cpu", format!("this is a bug: the CPU has no routine for {}", l.op.name)));
        };
        let shapes: Vec<Shape> = inputs.iter().map(|i| i.layout.shape).collect();
        let out = outputs.first().map_or(Shape::SCALAR, |o| o.1);
        let flops =
            l.op.flops
                .map_or(0, |flops| flops(&Work { inputs: &shapes, out, attrs: &l.attrs, count: Count::Executed }));
        let work = (moved as f64 * 0.5 + flops as f64 * 0.01) * cost;
        let out_layout = Box::new(l.layouts[0]);
        Ok(Routine {
            op: l.op,
            name: l.op.name,
            run,
            attrs: l.attrs.to_vec(),
            inputs,
            outputs,
            out_layout,
            origin: l.origin,
            work,
            isa,
        })
    }

    /// Estimated time on one thread, in nanoseconds.
    pub fn work(&self) -> f64 {
        self.work
    }

    /// The operand that holds indices, if the op checks any: a value, or `None` for a constant.
    pub fn index_operand(&self) -> Option<Option<u32>> {
        let (_, operand, _) = INDEX_CHECKS.iter().find(|c| c.0.name == self.name)?;
        Some(self.inputs.get(*operand)?.value.ok())
    }

    /// Checks the indices of the call without running it.
    pub fn check_indices(&self, context: &Context) -> std::result::Result<(), Failure> {
        let Some((_, _, check)) = INDEX_CHECKS.iter().find(|c| c.0.name == self.name) else { return Ok(()) };
        check(&Call { routine: self, context }).map_err(|error| Failure { origin: self.origin, error })
    }

    /// An upper bound of the bytes that the call allocates besides its values.
    pub fn temporary_bytes(&self) -> usize {
        let Some(out) = self.outputs.first() else { return 0 };
        let numel = |slot: &InputSlot| slot.layout.numel();
        let bytes = |slot: &InputSlot| numel(slot).saturating_mul(slot.dtype.size());
        let products = [matmul::MATMUL.name, matmul::LINEAR.name];
        let elements = match (products.contains(&self.name), out.2.is_half()) {
            // 16-bit operands and their product are widened (`gemm`).
            (true, true) => self.inputs.iter().map(numel).fold(out.1.numel(), usize::saturating_add),
            (true, false) if !self.out_layout.is_dense() => out.1.numel(),
            // Sums of 16-bit floats are kept in f32 (`index::accumulate`).
            (false, true) if self.index_operand().is_some() => out.1.numel(),
            _ => 0,
        };
        let copied = match self.index_operand() {
            Some(_) => {
                self.inputs.iter().skip(1).filter(|s| !s.layout.is_dense()).map(bytes).fold(0, usize::saturating_add)
            }
            None => 0,
        };
        elements.saturating_mul(size_of::<f32>()).saturating_add(copied)
    }

    /// See `crate::fingerprint`. The routine itself is known by the op's name, which is not written.
    pub fn fingerprint(&self, w: &mut Words) {
        w.put(self.attrs.len());
        w.list.extend(self.attrs.iter().map(|a| *a as u64));
        w.put(self.inputs.len());
        for i in &self.inputs {
            match i.value {
                Ok(v) => {
                    w.put(0);
                    w.value(v);
                }
                Err(word) => w.list.extend([1, word]),
            }
            w.put(i.len);
            w.layout(&i.layout);
            w.dtype(i.dtype);
        }
        w.put(self.outputs.len());
        for (value, shape, dtype) in &self.outputs {
            w.value(*value);
            w.shape(shape);
            w.dtype(*dtype);
        }
        w.layout(&self.out_layout);
    }

    /// Whether it exchanges data with other devices.
    pub fn is_collective(&self) -> bool {
        ops::collective::is_collective(self.op)
    }

    /// Sends what a collective has of its operands, which may be overwritten from then on.
    pub fn send(&self, context: &Context) -> std::result::Result<Ticket, Failure> {
        collective::send(&Call { routine: self, context }).map_err(|error| Failure { origin: self.origin, error })
    }

    /// Computes the results of a collective from what all devices have sent.
    pub fn receive(&self, context: &Context, ticket: Ticket) -> std::result::Result<(), Failure> {
        let call = Call { routine: self, context };
        collective::receive(&call, ticket).map_err(|error| Failure { origin: self.origin, error })
    }

    pub fn run(&self, context: &Context) -> std::result::Result<(), Failure> {
        (self.run)(&Call { routine: self, context }).map_err(|error| Failure { origin: self.origin, error })
    }
}

/// Encodes a constant of the program in the storage format of its dtype.
fn constant(dtype: DType, bits: u64) -> [u8; 8] {
    let float = f64::from_bits(bits);
    let mut out = [0; 8];
    match dtype {
        DType::F64 | DType::I64 => out = bits.to_le_bytes(),
        DType::F32 => out[..4].copy_from_slice(&(float as f32).to_le_bytes()),
        DType::BF16 => out[..2].copy_from_slice(&host_tensor::to_bf16(float).to_le_bytes()),
        DType::F16 => out[..2].copy_from_slice(&host_tensor::to_f16(float).to_le_bytes()),
        DType::I32 => out[..4].copy_from_slice(&(bits as i32).to_le_bytes()),
        DType::U8 => out[0] = bits as u8,
        DType::Bool => out[0] = u8::from(bits != 0),
    }
    out
}

/// The element in the first bytes of a word.
fn first<T: Pod>(bytes: &[u8; 8]) -> T {
    // SAFETY: plain numbers have at most 8 bytes, and every bit pattern is valid.
    unsafe { bytes.as_ptr().cast::<T>().read_unaligned() }
}

impl<'a> Call<'a> {
    pub fn name(&self) -> &'static str {
        self.routine.name
    }

    pub fn attr(&self, i: usize) -> i64 {
        self.routine.attrs[i]
    }

    /// Returns an optional attribute.
    pub fn flag(&self, i: usize) -> Option<i64> {
        self.routine.attrs.get(i).copied()
    }

    pub fn axis(&self) -> usize {
        self.routine.attrs[0] as usize
    }

    /// The coordinate of this device along the axis of a collective.
    pub fn coordinate(&self) -> usize {
        let axis = ops::collective::axis(&self.routine.attrs);
        self.context.peers.map_or(0, |peers| peers.coordinate(axis))
    }

    pub fn isa(&self) -> Isa {
        self.routine.isa
    }

    pub fn pool(&self) -> &'a crate::worker_pool::WorkerPool {
        self.context.pool
    }

    pub fn num_inputs(&self) -> usize {
        self.routine.inputs.len()
    }

    /// Whether the call is large enough for more than one thread.
    pub fn parallel(&self) -> bool {
        self.routine.work > crate::region::PARALLEL_NS
    }

    pub fn input(&self, k: usize) -> Input<'a> {
        let slot = &self.routine.inputs[k];
        let bytes = match &slot.value {
            // SAFETY: the value has `len` elements there, by `plan::check`; the planner never lets a library op's
            // outputs share memory with its inputs, so nothing writes to them while the call runs.
            Ok(v) => unsafe {
                let ptr = self.context.values[*v as usize].0.cast_const();
                std::slice::from_raw_parts(ptr, slot.len * slot.dtype.size())
            },
            // SAFETY: a word has 8 bytes.
            Err(word) => unsafe { std::slice::from_raw_parts((&raw const *word).cast(), slot.dtype.size()) },
        };
        Input { bytes, layout: slot.layout, dtype: slot.dtype }
    }

    pub fn out_shape(&self) -> Shape {
        self.routine.outputs[0].1
    }

    /// The attributes of the `k`-th tensor of a collective.
    pub fn attrs_of(&self, k: usize) -> &'a [i64] {
        ops::collective::attrs_of(self.routine.op, &self.routine.attrs, k)
    }

    /// The shape of the `k`-th input; its elements may be overwritten by now.
    pub fn in_shape(&self, k: usize) -> Shape {
        self.routine.inputs[k].layout.shape
    }

    /// The layout of the output in its value: contiguous, unless `Backend::can_store_layout` allowed another.
    pub fn out_layout(&self) -> Layout {
        *self.routine.out_layout
    }

    pub fn out_dtype(&self) -> DType {
        self.routine.outputs[0].2
    }

    /// The output as elements of `T`, which must have the size of its dtype. Call it once: the slice is exclusive.
    pub fn output<T: Pod>(&self) -> &'a mut [T] {
        self.output_of(0).0
    }

    /// The `k`-th output as elements of `T`, and its shape; as [`Call::output`]. No slice of an input that it overwrites may be in use.
    pub fn output_of<T: Pod>(&self, k: usize) -> (&'a mut [T], Shape) {
        let (value, shape, dtype) = self.routine.outputs[k];
        assert_eq!(size_of::<T>(), dtype.size(), "this is a bug: {} writes {dtype} by another size", self.name());
        // SAFETY: the value has that many elements there, aligned for its dtype (`plan::check` and the allocators); `T`
        // is a plain number; no input shares the memory but that of an all-reduce, which is not read any more.
        let out =
            unsafe { std::slice::from_raw_parts_mut(self.context.values[value as usize].0.cast::<T>(), shape.numel()) };
        (out, shape)
    }
}

impl<'a> Input<'a> {
    pub fn shape(&self) -> Shape {
        self.layout.shape
    }

    /// All elements of the underlying value, in memory order; `T` must have the size of the dtype.
    pub fn elements<T: Pod>(&self) -> &'a [T] {
        assert_eq!(size_of::<T>(), self.dtype.size(), "this is a bug: {} read by another size", self.dtype);
        // SAFETY: `T` is a plain number of the dtype's size; values are aligned for their dtypes, constants are in the
        // first field of their slot.
        unsafe {
            let (before, all, _) = self.bytes.align_to::<T>();
            assert!(before.is_empty(), "this is a bug: a value is not aligned for its dtype");
            all
        }
    }
}

/// Calls `$f::<T>($($arg),*)` with the unsigned type of the dtype's size.
macro_rules! by_size {
    ($dtype:expr, $f:ident($($arg:expr),*)) => {
        match $dtype.size() {
            8 => $f::<u64>($($arg),*),
            4 => $f::<u32>($($arg),*),
            2 => $f::<u16>($($arg),*),
            _ => $f::<u8>($($arg),*),
        }
    };
}

/// Calls `$f::<T>($($arg),*)` with the dtype's own element type (`Element`).
macro_rules! by_type {
    ($dtype:expr, $f:ident($($arg:expr),*)) => {
        match $dtype {
            perilune_core::DType::F64 => $f::<f64>($($arg),*),
            perilune_core::DType::F32 => $f::<f32>($($arg),*),
            perilune_core::DType::BF16 => $f::<half::bf16>($($arg),*),
            perilune_core::DType::F16 => $f::<half::f16>($($arg),*),
            perilune_core::DType::I64 => $f::<i64>($($arg),*),
            perilune_core::DType::I32 => $f::<i32>($($arg),*),
            perilune_core::DType::U8 | perilune_core::DType::Bool => $f::<u8>($($arg),*),
        }
    };
}

pub(crate) use {by_size, by_type};

/// An element type and its accumulator type.
pub trait Element: Pod + PartialOrd {
    type Acc: crate::math::Number + Pod;
    fn to_acc(self) -> Self::Acc;
    fn from_acc(acc: Self::Acc) -> Self;
}

macro_rules! elements {
    ($($t:ty),*) => { $(
        impl Element for $t {
            type Acc = $t;
            #[inline(always)]
            fn to_acc(self) -> $t {
                self
            }
            #[inline(always)]
            fn from_acc(acc: $t) -> $t {
                acc
            }
        }
    )* };
}

elements!(f64, f32, i64, i32, u8);

macro_rules! half_elements {
    ($($t:ty),*) => { $(
        impl Element for $t {
            type Acc = f32;
            #[inline(always)]
            fn to_acc(self) -> f32 {
                self.to_f32()
            }
            #[inline(always)]
            fn from_acc(acc: f32) -> $t {
                <$t>::from_f32(acc)
            }
        }
    )* };
}

half_elements!(bf16, f16);

/// Splits a shape at an axis: sizes before it, of it and after it.
pub fn split_at_axis(shape: &Shape, axis: usize) -> (usize, usize, usize) {
    let d = shape.dims();
    (d[..axis].iter().product(), d[axis], d[axis + 1..].iter().product())
}
