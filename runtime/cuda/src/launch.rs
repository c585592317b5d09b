//! Defines kernels and launches as plain data, which `emit`, `library` and `attention` build and `executable` runs.
//!
//! No device is needed, so plans can be compiled and checked on machines without a GPU. Addresses are symbolic (a
//! value, the slots, an offset in the workspace) and are resolved at launch.

use crate::guard::Guard;
use crate::guard::report::Subject;
use perilune_core::DType;
use perilune_core::env_flags::{self, Setting};
use perilune_plan::ir::ValueId;
use std::sync::Arc;

/// Properties of the GPU that kernels are compiled for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Props {
    /// Compute capability, as in (9, 0).
    pub arch: (u32, u32),
    /// Multiprocessors.
    pub sms: u32,
    /// Maximum shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// What the kernels of recipes are made to do.
    pub guard: Guard,
}

impl Props {
    /// An H200, the default target if there is no GPU.
    pub const H200: Props = Props { arch: (9, 0), sms: 132, shared_bytes: 227 << 10, guard: Guard::NONE };

    /// Whether devices of a mesh may exchange tensors through host memory: where NVLinks sleep, from sm_90 on, and nothing else is set.
    pub fn has_host_memory_route(&self) -> bool {
        self.arch >= (9, 0) && matches!(env_flags::COLLECTIVES.setting(), None | Some(Setting::Word("host")))
    }
}

/// A CUDA function.
///
/// `text` is CUDA C++ that defines `extern "C" __global__ void KERNEL(...)`, with the word `KERNEL` in place of the
/// name. It may include the headers of `kernels/` by their paths there (`#include "device/philox.cuh"`). Many functions
/// are compiled as one program, so the text must not define other names at file scope; helpers belong in headers. The
/// actual name is `label` and a hash of the text.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Function {
    /// The name in profiles: letters, digits and `_`.
    pub label: String,
    pub text: String,
}

/// One word of a table in device memory.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Word {
    Number(u64),
    /// The device address of a value, plus a byte offset.
    Value(ValueId, i64),
}

/// A tensor map for TMA (sm_90): boxes of a tensor of 16-bit floats, stored to shared memory with a 128-byte swizzle, 0
/// outside the tensor. Dims are ordered innermost first.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TmaDesc {
    pub dtype: DType,
    pub dims: [u64; 4],
    /// Strides in bytes of all dims but the first.
    pub strides: [u64; 3],
    pub shape: [u32; 4],
}

/// An argument of a launch.
#[derive(Clone, PartialEq, Debug)]
pub enum Arg {
    /// The device address of a value, plus a byte offset.
    Value(ValueId, i64),
    /// The run-time numbers, `const unsigned long long*`: slot k is an i64 or the bits of an f64.
    Slots,
    /// The program's workspace from this byte offset. Kernels of one plan step own it until the next step.
    Scratch(usize),
    /// Where a kernel reports a bad index: `Fault*` (see `kernels/device/fault.cuh`).
    Fault,
    /// `const u32*`: a word that is not 0 after a bad index. A kernel that writes a State returns at once then.
    Halt,
    /// `const u32*`: a word of host memory with the number of a launch that is to end.
    Stop,
    /// The number of a launch of this kernel of a recipe, in the upper half of an `unsigned long long`.
    Number(Arc<Subject>),
    I32(i32),
    I64(i64),
    F32(f32),
    F64(f64),
    /// A structure passed by value, laid out as in the kernel: aligned to 8 bytes, at most 4,000 bytes long.
    Bytes(Vec<u8>),
    /// `const unsigned long long*`: a table in device memory.
    Table(Arc<[Word]>),
    /// A tensor map of 128 bytes by value (`const __grid_constant__`) over the memory of a `Value` or `Scratch`.
    Map(Box<Arg>, TmaDesc),
}

#[derive(Clone, PartialEq, Debug)]
pub struct Launch {
    pub function: Arc<Function>,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Dynamic shared memory, in bytes.
    pub shared_bytes: u32,
    pub args: Vec<Arg>,
}

impl Launch {
    /// The recipe's kernel, if it is one whose code is guarded.
    pub fn subject(&self) -> Option<&Arc<Subject>> {
        self.args.iter().find_map(|arg| if let Arg::Number(subject) = arg { Some(subject) } else { None })
    }
}

/// The launches and the workspace of one kernel of a plan.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct Work {
    pub launches: Vec<Launch>,
    /// Bytes of workspace.
    pub scratch_bytes: usize,
}
