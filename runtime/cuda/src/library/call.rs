//! Builds the launches of a library call: its operands, workspace, kernel text and arguments.

use super::strided::Strided;
use crate::launch::{Arg, Function, Launch, Word, Work};
use half::{bf16, f16};
use perilune_core::error::{Error, Result};
use perilune_core::{DType, Layout, MAX_RANK, Shape, host_tensor};
use perilune_plan::ir::{Library, Operand, Program, Storage, ValueId};
use std::sync::Arc;

/// Threads per block of most kernels.
pub const BLOCK: usize = 256;

/// An operand: the address of element 0 and its layout.
#[derive(Clone)]
pub struct Input {
    pub pointer: Arg,
    pub layout: Layout,
    pub dtype: DType,
    /// The largest power of two up to 16 that divides the address.
    pub aligned: usize,
}

impl Input {
    pub fn shape(&self) -> Shape {
        self.layout.shape
    }

    pub fn strides(&self) -> &[isize] {
        self.layout.strides()
    }

    /// Strides with the axis set to 0.
    pub fn held(&self, axis: usize) -> Vec<isize> {
        let mut s = self.strides().to_vec();
        s[axis] = 0;
        s
    }
}

pub struct Call<'a> {
    program: &'a Program,
    pub library: &'a Library,
    pub inputs: Vec<Input>,
    work: Work,
}

impl<'a> Call<'a> {
    pub fn new(program: &'a Program, library: &'a Library) -> Result<Call<'a>> {
        let mut inputs = Vec::new();
        for o in &library.inputs {
            inputs.push(match o {
                Operand::View(v, layout) => {
                    let value = &program.values[v.0 as usize];
                    let bytes = layout.offset as i64 * value.dtype.size() as i64;
                    Input {
                        pointer: Arg::Value(*v, bytes),
                        layout: Layout { offset: 0, ..*layout },
                        dtype: value.dtype,
                        aligned: alignment(program, *v, bytes),
                    }
                }
                // A constant is one table element, repeated by strides of 0.
                Operand::Constant(bits, shape, dtype) => Input {
                    pointer: Arg::Table(Arc::new([Word::Number(stored(*dtype, *bits)), Word::Number(0)])),
                    layout: Layout { shape: *shape, strides: [0; MAX_RANK], offset: 0 },
                    dtype: *dtype,
                    aligned: 8,
                },
            });
        }
        if library.outputs.is_empty() || inputs.is_empty() {
            return Err(Error::system("cuda", format!("this is a bug: {} without operands", library.op.name)));
        }
        Ok(Call { program, library, inputs, work: Work::default() })
    }

    pub fn finish(self) -> Work {
        self.work
    }

    pub fn name(&self) -> &'static str {
        self.library.op.name
    }

    pub fn attr(&self, i: usize) -> i64 {
        self.library.attrs.get(i).copied().unwrap_or(0)
    }

    pub fn axis(&self) -> usize {
        self.attr(0) as usize
    }

    pub fn input(&self, k: usize) -> Result<Input> {
        let missing = || Error::system("cuda", format!("this is a bug: {} has no input {k}", self.name()));
        self.inputs.get(k).cloned().ok_or_else(missing)
    }

    fn out(&self) -> ValueId {
        self.library.outputs[0]
    }

    pub fn out_shape(&self) -> Shape {
        self.program.values[self.out().0 as usize].shape
    }

    pub fn out_dtype(&self) -> DType {
        self.program.values[self.out().0 as usize].dtype
    }

    pub fn out_aligned(&self) -> usize {
        alignment(self.program, self.out(), 0)
    }

    /// The output, from a byte offset on.
    pub fn output(&self, bytes: usize) -> Arg {
        Arg::Value(self.out(), bytes as i64)
    }

    /// An error that no recipe can cause.
    pub fn bug(&self, what: &str) -> Error {
        Error::system("cuda", format!("this is a bug: {} without {what}", self.name()))
    }

    /// Allocates workspace of that many bytes, aligned for any type.
    pub fn scratch(&mut self, bytes: usize) -> usize {
        let at = self.work.scratch_bytes;
        self.work.scratch_bytes = at + bytes.next_multiple_of(256);
        at
    }

    /// Launches `blocks` blocks of a function that includes `header`; `body` calls its template with `params`.
    pub fn launch(
        &mut self,
        label: &str,
        header: &str,
        params: &[(&str, Arg)],
        body: &str,
        blocks: usize,
        block: usize,
    ) -> Result<()> {
        // By default, ptxas spills a few registers rather than exceed a round number.
        self.launch_resident(label, header, params, body, [blocks, block], "1")
    }

    /// Like `launch`, for a kernel that needs occupancy to hide latency: `resident` blocks of it (a number or a
    /// constant of the header) must fit on a multiprocessor.
    pub fn launch_resident(
        &mut self,
        label: &str,
        header: &str,
        params: &[(&str, Arg)],
        body: &str,
        [blocks, block]: [usize; 2],
        resident: &str,
    ) -> Result<()> {
        self.launch_shared(label, header, params, body, [blocks, block, 0], resident)
    }

    /// Like `launch_resident`, with `shared_bytes` of dynamic shared memory.
    pub fn launch_shared(
        &mut self,
        label: &str,
        header: &str,
        params: &[(&str, Arg)],
        body: &str,
        [blocks, block, shared_bytes]: [usize; 3],
        resident: &str,
    ) -> Result<()> {
        if blocks == 0 {
            return Ok(());
        }
        let Some(grid) = u32::try_from(blocks).ok().filter(|b| *b <= i32::MAX as u32) else {
            return Err(Error::system(self.name(), "the operands are too large for one launch"));
        };
        let list: Vec<&str> = params.iter().map(|p| p.0).collect();
        let text = format!(
            "#include \"{header}\"\nextern \"C\" __global__ void __launch_bounds__({block}, {resident}) KERNEL({}) {{\n    {body}\n}}\n",
            list.join(", ")
        );
        self.work.launches.push(Launch {
            function: Arc::new(Function { label: label.to_string(), text }),
            grid: [grid, 1, 1],
            block: [block as u32, 1, 1],
            shared_bytes: shared_bytes as u32,
            args: params.iter().map(|p| p.1.clone()).collect(),
        });
        Ok(())
    }

    /// Like `launch`, with one thread for each of `n` elements.
    pub fn each(&mut self, label: &str, header: &str, params: &[(&str, Arg)], body: &str, n: usize) -> Result<()> {
        self.launch(label, header, params, body, n.div_ceil(BLOCK), BLOCK)
    }
}

/// The parameter of a structure passed by value.
pub fn by_value(space: &Strided, narrow: bool, name: &str) -> String {
    format!("const __grid_constant__ {} {name}", space.device_type(narrow))
}

/// The largest power of two up to 16 that divides the address of byte `bytes` of a value; buffers start at multiples of
/// 256.
fn alignment(program: &Program, v: ValueId, bytes: i64) -> usize {
    let start = match program.values[v.0 as usize].storage {
        Storage::Arena(at) => at as i64,
        _ => 0,
    };
    1 << (start + bytes).trailing_zeros().min(4)
}

/// Encodes a constant of a program in the storage format of its dtype, in the low bytes of a word.
pub fn stored(dtype: DType, bits: u64) -> u64 {
    let float = f64::from_bits(bits);
    match dtype {
        DType::F64 | DType::I64 => bits,
        DType::F32 => (float as f32).to_bits() as u64,
        DType::BF16 => bf16::to_bits(host_tensor::to_bf16(float)) as u64,
        DType::F16 => f16::to_bits(host_tensor::to_f16(float)) as u64,
        DType::I32 => bits as u32 as u64,
        DType::U8 => bits as u8 as u64,
        DType::Bool => u64::from(bits != 0),
    }
}

/// The device type of elements that are used in arithmetic.
pub fn typed(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "f64",
        DType::F32 => "f32",
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        DType::I64 => "i64",
        DType::I32 => "i32",
        DType::U8 | DType::Bool => "u8",
    }
}

/// The device type of elements that are only moved.
pub fn sized(bytes: usize) -> &'static str {
    match bytes {
        16 => "uint4",
        8 => "u64",
        4 => "u32",
        2 => "u16",
        _ => "u8",
    }
}

/// The device type of partial results, and its bytes.
pub fn sum_type(dtype: DType) -> (&'static str, usize) {
    match dtype {
        DType::F64 | DType::F32 | DType::BF16 | DType::F16 => ("f64", 8),
        DType::I64 => ("u64", 8),
        _ => ("u32", 4),
    }
}

/// Copies a list without its element at `axis`.
pub fn without<T: Copy>(list: &[T], axis: usize) -> Vec<T> {
    let mut out = list.to_vec();
    out.remove(axis);
    out
}
