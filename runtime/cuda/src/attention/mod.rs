//! Attention as kernels that never hold the T x S scores: `kernels/attention/`, for bf16, f16 and f32 from sm_80.
//!
//! Forward is one launch. Backward is three: the rows' `delta` (which kernels of warpgroups compute themselves), then dq, then dk
//! and dv; each adds up in a fixed order, so a gradient has the same bits in every run. Operands are read through their strides
//! where rows are contiguous and 16-byte aligned (views of a fused projection are), and copied to the workspace first where
//! they are not. Masks, head sizes that are no multiple of 8 (in f32 of 4) and f64 are left to the decomposition.
//! Numbers of documents take one small launch more in each direction, after which tiles that see nothing of each other are
//! skipped (`segment_ids.cuh`).
//!
//! For 16 bits there are two kinds of kernels: of warps, for every GPU since sm_80 ([`MMA_TILES`]), and of warpgroups with the
//! copy engine for sm_90a ([`WARPGROUP_TILES`]), where the operands can be told to it as tensor maps. For f32 there is one, of warps
//! ([`TF32`]): it makes a product of f32 of three TF32 products, or takes one where the products may be TF32. Which tile a kernel
//! works with depends on its head size and the GPU; `kernels/lab/attention_lab.py`, which reads the tables from these files,
//! measures them.

use crate::launch::{Arg, Function, Launch, Props, Work};
use perilune_core::error::{Error, Result};
use perilune_core::graph::Node;
use perilune_core::ops::attention::{ATTENTION, ATTENTION_BACKWARD};
use perilune_core::ops::real;
use perilune_core::{DType, Layout, MAX_RANK, Shape};
use perilune_plan::ir::{Library, Operand, Program, ValueId};
use std::sync::Arc;

mod mask;
mod mma;
mod tf32;
mod warpgroup;

pub use mask::Mask;
pub use mma::{MMA_TILES, MmaTile, SIZES, When, function};
pub use tf32::{TF32, Tf32};
pub use warpgroup::{WARPGROUP_TILES, WarpgroupTile};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pass {
    Forward,
    BackwardQ,
    BackwardKv,
}

/// Whether attention, or its backward, has a kernel for this node.
pub fn has_kernel(node: &Node) -> bool {
    let inputs = match node.op {
        op if op == &ATTENTION => 3,
        op if op == &ATTENTION_BACKWARD => 6,
        _ => return false,
    };
    let [_, scale, _, d, e, documents] = node.attrs[..] else { return false };
    let least = match node.dtype {
        DType::BF16 | DType::F16 => 8,
        DType::F32 => 4,
        _ => return false,
    };
    let fits = |n: i64| (least..=256).contains(&n) && n % least == 0;
    let scale = real(scale);
    // More inputs: there is a mask. The kernels take the largest score before they scale.
    node.inputs.len() == inputs + usize::from(documents != 0)
        && fits(d)
        && fits(e)
        && (scale as f32).is_normal()
        && scale > 0.0
}

/// Whether the kernels can write an output through `layout`: rows as they can read them.
pub fn can_store_layout(node: &Node, output: usize, layout: &Layout) -> bool {
    let outputs = match node.op {
        op if op == &ATTENTION => 1,
        op if op == &ATTENTION_BACKWARD => 3,
        _ => 0,
    };
    output < outputs && Strides::of(layout, node.dtype).is_some()
}

/// The rows' delta. (Kernels of warpgroups make it themselves.)
fn delta_function(size: u32, dtype: DType) -> Function {
    let (t, lanes) = (element(dtype), lanes(size));
    let text = format!(
        "#include \"attention/preprocess.cuh\"\n\
         extern \"C\" __global__ void __launch_bounds__(256) KERNEL(const {t}* grad, const {t}* out, f32* delta, const attention::Problem p) {{\n    \
         attention::row_delta<{t}, {lanes}>(grad, out, delta, p);\n}}\n"
    );
    Function { label: format!("attention_delta_{t}"), text }
}

/// Lanes that share a row of `size` elements, 8 each.
fn lanes(size: u32) -> u32 {
    (size / 8).next_power_of_two()
}

fn copy_function(dtype: DType) -> Function {
    let t = if dtype.size() == 2 { "u16" } else { "u32" };
    let text = format!(
        "#include \"attention/preprocess.cuh\"\n\
         extern \"C\" __global__ void __launch_bounds__(256) KERNEL(const {t}* x, {t}* y, const attention::View p) {{\n    \
         attention::copy(x, y, p);\n}}\n"
    );
    Function { label: "attention_copy".into(), text }
}

/// The bits of a number of the program, a float of 16 or 32 bits.
pub(crate) fn bits_of(bits: u64, dtype: DType) -> u32 {
    let x = f64::from_bits(bits);
    match dtype {
        DType::BF16 => half::bf16::from_f64(x).to_bits().into(),
        DType::F16 => half::f16::from_f64(x).to_bits().into(),
        _ => (x as f32).to_bits(),
    }
}

/// Copies elements of 16 or 32 bits that lie as `layout` from `from` on, or are all `fill` if that is null, to plain memory.
pub(crate) fn copy(dtype: DType, from: Arg, layout: &Layout, fill: u32, to: Arg) -> Launch {
    let shape = layout.shape;
    let (mut dims, mut strides) = ([1i64; MAX_RANK], [0i64; MAX_RANK]);
    let lead = MAX_RANK - shape.rank();
    for k in 0..shape.rank() {
        dims[lead + k] = shape.dims()[k] as i64;
        strides[lead + k] = layout.strides[k] as i64;
    }
    let numbers = dims.into_iter().chain(strides).chain([shape.numel() as i64, i64::from(fill)]);
    Launch {
        function: Arc::new(copy_function(dtype)),
        grid: [shape.numel().div_ceil(256) as u32, 1, 1],
        block: [256, 1, 1],
        shared_bytes: 0,
        args: vec![from, to, Arg::Bytes(numbers.flat_map(i64::to_le_bytes).collect())],
    }
}

fn element(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        _ => "f32",
    }
}

/// In elements, along (batch, head, row).
#[derive(Clone, Copy, Default, PartialEq, Debug)]
struct Strides([i64; 3]);

impl Strides {
    /// Of (..., heads, rows, width), contiguous.
    fn contiguous(heads: usize, rows: usize, width: usize) -> Strides {
        Strides([(heads * rows * width) as i64, (rows * width) as i64, width as i64])
    }

    /// Of a layout that the kernels can read; see `Strides` in `tile.cuh`.
    fn of(l: &Layout, dtype: DType) -> Option<Strides> {
        let n = l.shape.rank();
        if l.numel() == 0 {
            return Some(Strides::default());
        }
        let lead = n.saturating_sub(3);
        let batch = Layout { shape: Shape::of(&l.shape.dims()[..lead]), strides: l.strides, offset: 0 }.collapse();
        let at = |i: usize| if l.shape.dims()[i] == 1 { 0 } else { l.strides[i] as i64 };
        let batch = match batch.shape.rank() {
            0 => 0,
            1 => batch.strides[0] as i64,
            _ => return None,
        };
        let strides = [batch, if n > 2 { at(n - 3) } else { 0 }, at(n - 2)];
        let aligned = strides.iter().chain([&(l.offset as i64)]).all(|s| s % (16 / dtype.size() as i64) == 0);
        (l.strides[n - 1] == 1 && aligned && strides[2].abs() < 1 << 22).then_some(Strides(strides))
    }
}

/// What a launch runs.
#[derive(Clone, Copy)]
enum Kernel {
    MmaTile(MmaTile),
    Tf32(Tf32),
    /// With the head size that it is made for.
    WarpgroupTile(u32, WarpgroupTile),
}

/// What both passes start from.
struct Builder<'a> {
    program: &'a Program,
    l: &'a Library,
    props: &'a Props,
    work: Work,
    /// B, H, G, T, S, D, E.
    b: usize,
    h: usize,
    g: usize,
    t: usize,
    s: usize,
    d: usize,
    e: usize,
    /// The head size of the kernels.
    size: u32,
    mask: Mask,
    /// 0 for none.
    window: i32,
    /// Labels and bounds, where there are documents.
    documents: Vec<Arg>,
    scale: f32,
    dtype: DType,
    /// TF32 products for one of f32.
    products: u32,
}

/// The fields of `attention::Problem` that differ between tensors.
#[derive(Default)]
struct Tensors {
    q: Strides,
    k: Strides,
    v: Strides,
    out: Strides,
    grad: Strides,
    dq: Strides,
    dk: Strides,
    dv: Strides,
}

impl<'a> Builder<'a> {
    fn new(program: &'a Program, l: &'a Library, props: &'a Props) -> Result<Builder<'a>> {
        let [q, k, v] = [0, 1, 2].map(|i| l.inputs[i].shape());
        let n = q.rank();
        let heads = |s: Shape| if n > 2 { s.dims()[n - 3] } else { 1 };
        let (d, e) = (q.dims()[n - 1], v.dims()[n - 1]);
        let (t, s) = (q.dims()[n - 2], k.dims()[n - 2]);
        let size = SIZES.into_iter().find(|&c| c as usize >= d.max(e));
        let whole = 16 / l.dtypes[0].size();
        let Some(size) = size.filter(|_| d % whole == 0 && e % whole == 0 && l.attrs.len() == 6) else {
            return Err(bug(format!("no attention kernel for head sizes {d} and {e}")));
        };
        let lead = n.saturating_sub(3);
        let window = if l.attrs[2] > 0 && l.attrs[2] < t as i64 { l.attrs[2] as i32 } else { 0 };
        // One number for all positions is no choice.
        let documents = l.attrs[5] != 0 && matches!(l.inputs.last(), Some(Operand::View(..)));
        let mut b = Builder {
            program,
            l,
            props,
            work: Work::default(),
            b: q.dims()[..lead].iter().product(),
            h: heads(q),
            g: heads(k),
            t,
            s,
            d,
            e,
            size,
            mask: Mask { causal: l.attrs[0] != 0 || l.attrs[2] > 0, window: window > 0, documents },
            window,
            documents: Vec::new(),
            scale: real(l.attrs[1]) as f32,
            dtype: l.dtypes[0],
            products: if l.tf32 { 1 } else { 3 },
        };
        b.bounds()?;
        Ok(b)
    }

    /// Launches what makes labels and bounds of the documents' numbers.
    fn bounds(&mut self) -> Result<()> {
        let Some(&Operand::View(ids, layout)) = self.l.inputs.last().filter(|_| self.mask.documents) else {
            return Ok(());
        };
        let stretches = self.t.div_ceil(mask::BOUND_BLOCK);
        if self.b * self.padded() > i32::MAX as usize {
            let message = format!("{} rows of {} positions are more than documents can be told of", self.b, self.t);
            return Err(Error::system("scaled_dot_product_attention", message));
        }
        let labels = self.scratch(self.b * self.padded() * 4);
        let bounds = self.scratch(self.b * stretches * 16);
        self.documents = vec![labels.clone(), bounds.clone()];
        if self.b * stretches > 0 {
            let ids = Arg::Value(ids, layout.offset as i64 * 8);
            self.work.launches.push(mask::bounds([ids, labels, bounds], &layout, self.t, self.padded()));
        }
        Ok(())
    }

    /// Room in the workspace.
    fn scratch(&mut self, bytes: usize) -> Arg {
        let at = self.work.scratch_bytes;
        self.work.scratch_bytes = (at + bytes).next_multiple_of(256);
        Arg::Scratch(at)
    }

    /// Input `i` as the kernels read it, copied first if they cannot read it as it is.
    fn input(&mut self, i: usize) -> (Arg, Strides) {
        let operand = self.l.inputs[i];
        let (shape, bytes) = (operand.shape(), self.dtype.size());
        let (from, layout, fill) = match operand {
            Operand::View(v, layout) => {
                let from = Arg::Value(v, layout.offset as i64 * bytes as i64);
                if let Some(strides) = Strides::of(&layout, self.dtype) {
                    return (from, strides);
                }
                (from, layout, 0)
            }
            Operand::Constant(bits, ..) => (Arg::I64(0), Layout::contiguous(shape), bits_of(bits, self.dtype)),
        };
        let to = self.scratch(shape.numel() * bytes);
        self.work.launches.push(copy(self.dtype, from, &layout, fill, to.clone()));
        let n = shape.rank();
        let heads = if n > 2 { shape.dims()[n - 3] } else { 1 };
        (to, Strides::contiguous(heads, shape.dims()[n - 2], shape.dims()[n - 1]))
    }

    /// Input `i`, which is contiguous f32: the logarithms that the forward pass saved.
    fn saved(&mut self, i: usize) -> Result<Arg> {
        match self.l.inputs[i] {
            Operand::View(v, layout) if layout.is_dense() => Ok(Arg::Value(v, layout.offset as i64 * 4)),
            _ => Err(bug("attention: the saved row sums are no plain buffer".into())),
        }
    }

    /// Rows of `numbers` a head has: whole steps of any kernel, wherever the last begins.
    fn padded(&self) -> usize {
        self.t.next_multiple_of(128) + 128
    }

    /// `attention::Problem`.
    fn problem(&self, x: &Tensors, pairs: usize, section: usize) -> Arg {
        let mut bytes = Vec::with_capacity(240);
        for s in [x.q, x.k, x.v, x.out, x.grad, x.dq, x.dk, x.dv] {
            bytes.extend(s.0.into_iter().flat_map(i64::to_le_bytes));
        }
        let group = self.h / self.g.max(1);
        for n in [self.t, self.s, self.d, self.e, self.h, self.g, group.max(1)] {
            bytes.extend((n as i32).to_le_bytes());
        }
        for n in [self.window, pairs as i32, section as i32] {
            bytes.extend(n.to_le_bytes());
        }
        bytes.extend(self.scale.to_le_bytes());
        bytes.extend((self.padded() as i32).to_le_bytes());
        Arg::Bytes(bytes)
    }

    /// The kernel of warps, or for f32, for this problem.
    fn tile(&self, pass: Pass) -> Result<Kernel> {
        let tile = match self.dtype {
            DType::F32 => Tf32::of(pass, self.size, self.products, self.props).map(Kernel::Tf32),
            _ => MmaTile::of(pass, self.size, self.props, self.mask).map(Kernel::MmaTile),
        };
        tile.ok_or_else(|| bug(format!("no attention tile for head size {}", self.size)))
    }

    /// The kernel of warpgroups for this problem, if there is one that can read q, k, v and, going backward, grad; with
    /// the tensor maps that it takes for them.
    fn groups(&self, pass: Pass, x: &Tensors, inputs: &[Arg]) -> Option<(Kernel, Vec<Arg>)> {
        let (size, tile) =
            WarpgroupTile::of(pass, self.size, self.props, self.mask).filter(|_| self.dtype != DType::F32)?;
        let dims = [
            [self.b, self.h, self.t, self.d],
            [self.b, self.g, self.s, self.d],
            [self.b, self.g, self.s, self.e],
            [self.b, self.h, self.t, self.e],
        ];
        let maps =
            inputs.iter().zip([x.q, x.k, x.v, x.grad]).zip(dims).enumerate().map(|(i, ((arg, strides), dims))| {
                // A block keeps its rows, and takes those of the other side a step at a time.
                let kept = matches!(i, 1 | 2) == (pass == Pass::BackwardKv);
                let rows = if kept { tile.rows() } else { tile.bn };
                Some(Arg::Map(Box::new(arg.clone()), warpgroup::tma_desc(strides, dims, rows, self.dtype)?))
            });
        Some((Kernel::WarpgroupTile(size, tile), maps.collect::<Option<_>>()?))
    }

    fn launch(&mut self, pass: Pass, kernel: Kernel, x: &Tensors, mut args: Vec<Arg>) -> Result<()> {
        // Rows a block has, and elements that the blocks of one pair read over and over.
        let (pairs, rows, again) = match pass {
            Pass::BackwardKv => (self.b * self.g, self.s, self.t * (self.h / self.g.max(1))),
            _ => (self.b * self.h, self.t, self.s * self.g / self.h.max(1)),
        };
        let (block, size, shared_bytes, blocks, function) = match kernel {
            Kernel::MmaTile(t) => (
                t.rows(),
                32 * t.warps,
                t.shared_bytes(pass, self.size),
                t.split,
                function(pass, self.size, t, self.dtype, self.mask),
            ),
            Kernel::Tf32(t) => (
                t.rows(),
                32 * t.warps,
                t.shared_bytes(pass, self.size),
                1,
                t.function(pass, self.size, self.products, self.mask),
            ),
            Kernel::WarpgroupTile(size, t) => {
                (t.rows(), 128 * t.groups, t.shared_bytes(pass, size), 1, t.function(pass, size, self.dtype, self.mask))
            }
        };
        let tiles = rows.div_ceil(block as usize);
        if pairs * tiles == 0 {
            return Ok(());
        }
        if pairs * tiles > i32::MAX as usize || rows.max(self.t).max(self.s) > i32::MAX as usize / 2 {
            let message = format!("{pairs} heads of {rows} positions are more than one launch can take");
            return Err(Error::system("scaled_dot_product_attention", message));
        }
        let section = (SECTION_BYTES / (again * (self.d + self.e) * self.dtype.size()).max(1)).clamp(1, pairs);
        // Query heads of one key head stay together.
        let section = match pass {
            Pass::BackwardKv => section,
            _ => section.next_multiple_of(self.h / self.g.max(1)).min(pairs),
        };
        args.extend(self.documents.iter().cloned());
        args.push(self.problem(x, pairs, section));
        self.work.launches.push(Launch {
            function: Arc::new(function),
            grid: [(pairs * tiles) as u32, blocks, 1],
            block: [size, 1, 1],
            shared_bytes,
            args,
        });
        Ok(())
    }

    /// Output `i` and the strides it is written through, if the program has it.
    fn output(&self, i: usize) -> Result<Option<(Arg, Strides)>> {
        let Some(&v) = self.l.outputs.get(i).filter(|v| **v != ValueId::NONE) else { return Ok(None) };
        debug_assert!(self.program.values.len() > v.0 as usize, "this is a bug: an output that is no value");
        let layout = self.l.layouts[i];
        let strides =
            Strides::of(&layout, self.dtype).ok_or_else(|| bug("attention cannot write its output there".into()))?;
        Ok(Some((Arg::Value(v, layout.offset as i64 * self.dtype.size() as i64), strides)))
    }

    /// The same, or room for what nobody wants.
    fn output_or_scratch(&mut self, i: usize, [heads, rows, width]: [usize; 3]) -> Result<(Arg, Strides)> {
        let contiguous = Strides::contiguous(heads, rows, width);
        let found = self.output(i)?;
        Ok(found.unwrap_or_else(|| (self.scratch(self.b * heads * rows * width * self.dtype.size()), contiguous)))
    }
}

/// What heads that are worked on together read: well inside the L2 cache of an A100 (40 MB) or H100 (50 MB).
const SECTION_BYTES: usize = 16 << 20;

fn bug(message: String) -> Error {
    Error::system("cuda", format!("this is a bug: {message}"))
}

/// `out` and, if the program has it as a second output, the logarithms of the rows' sums.
pub fn forward(program: &Program, l: &Library, props: &Props) -> Result<Work> {
    let mut b = Builder::new(program, l, props)?;
    let ((q, sq), (k, sk), (v, sv)) = (b.input(0), b.input(1), b.input(2));
    let (to, out) = b.output(0)?.ok_or_else(|| bug("attention without an output".into()))?;
    let x = Tensors { q: sq, k: sk, v: sv, out, ..Tensors::default() };
    // Plain: it is no attention output by `writes`.
    let lse = match l.outputs.get(1) {
        Some(&v) if v != ValueId::NONE => Arg::Value(v, 0),
        _ => Arg::I64(0),
    };
    let read = vec![q, k, v];
    let (kernel, read) = match b.groups(Pass::Forward, &x, &read) {
        Some(found) => found,
        None => (b.tile(Pass::Forward)?, read),
    };
    b.launch(Pass::Forward, kernel, &x, [read, vec![to, lse]].concat())?;
    Ok(b.work)
}

/// dq and, if the program has them as further outputs, dk and dv.
pub fn backward(program: &Program, l: &Library, props: &Props) -> Result<Work> {
    let mut b = Builder::new(program, l, props)?;
    let ((q, sq), (k, sk), (v, sv)) = (b.input(0), b.input(1), b.input(2));
    let ((grad, sg), (out, so)) = (b.input(3), b.input(4));
    let lse = b.saved(5)?;
    let (dq, sdq) = b.output(0)?.ok_or_else(|| bug("attention's backward without an output".into()))?;
    let wanted = [1, 2].iter().any(|&i| l.outputs.get(i).is_some_and(|v| *v != ValueId::NONE));
    let both = match wanted {
        true => Some((b.output_or_scratch(1, [b.g, b.s, b.d])?, b.output_or_scratch(2, [b.g, b.s, b.e])?)),
        false => None,
    };
    let (sdk, sdv) = both.as_ref().map_or_else(Default::default, |(dk, dv)| (dk.1, dv.1));
    let x = Tensors { q: sq, k: sk, v: sv, out: so, grad: sg, dq: sdq, dk: sdk, dv: sdv };
    let read = [q, k, v, grad.clone()];
    let by_groups = b.groups(Pass::BackwardQ, &x, &read).zip(b.groups(Pass::BackwardKv, &x, &read));

    // Of each row: its delta, or for kernels of warpgroups its numbers.
    let pairs = b.b * b.h;
    let ((kernel_q, for_q), (kernel_kv, for_kv)) = match by_groups {
        Some(((kernel_q, q), (kernel_kv, kv))) => {
            let numbers = b.scratch(pairs * b.padded() * 8);
            ((kernel_q, [q, vec![grad, out, lse, numbers.clone()]].concat()), (kernel_kv, [kv, vec![numbers]].concat()))
        }
        None => {
            let delta = b.scratch(pairs * b.t * 4);
            let blocks = pairs * b.t.div_ceil(256 / lanes(b.size) as usize);
            if blocks > i32::MAX as usize {
                return Err(Error::system("scaled_dot_product_attention", "more rows than one launch can take"));
            }
            if blocks > 0 {
                b.work.launches.push(Launch {
                    function: Arc::new(delta_function(b.size, b.dtype)),
                    grid: [blocks as u32, 1, 1],
                    block: [256, 1, 1],
                    shared_bytes: 0,
                    args: vec![grad, out, delta.clone(), b.problem(&x, pairs, 1)],
                });
            }
            let read = [&read[..], &[lse, delta]].concat();
            ((b.tile(Pass::BackwardQ)?, read.clone()), (b.tile(Pass::BackwardKv)?, read))
        }
    };
    b.launch(Pass::BackwardQ, kernel_q, &x, [for_q, vec![dq]].concat())?;
    if let Some(((dk, _), (dv, _))) = both {
        b.launch(Pass::BackwardKv, kernel_kv, &x, [for_kv, vec![dk, dv]].concat())?;
    }
    Ok(b.work)
}
