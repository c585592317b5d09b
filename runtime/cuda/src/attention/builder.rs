//! Builds the launches of one attention call: picks kernels, lays out the workspace and fills in kernel arguments.

use super::mask::Ids;
use super::preprocess::{bits_of, copy};
use super::strides::Strides;
use super::{Mask, MmaTile, Pass, SIZES, Tf32, WarpgroupTile, bug, function, mask, warpgroup};
use crate::launch::{Arg, Launch, Props, Work};
use perilune_core::error::{Error, Result};
use perilune_core::ops::attention_block::{self, ATTENTION_BLOCK, ATTENTION_BLOCK_BACKWARD};
use perilune_core::ops::real;
use perilune_core::{DType, Layout, Shape};
use perilune_plan::ir::{Library, Operand, Program, ValueId};
use std::sync::Arc;

/// The operands that are the documents of queries and of keys.
fn documents(l: &Library) -> Option<[usize; 2]> {
    if l.op == &ATTENTION_BLOCK || l.op == &ATTENTION_BLOCK_BACKWARD {
        return attention_block::documents(&l.attrs, l.inputs.len());
    }
    (l.attrs[5] != 0).then(|| [l.inputs.len() - 1; 2])
}

/// The kernel that a launch runs.
#[derive(Clone, Copy)]
pub(super) enum Kernel {
    MmaTile(MmaTile),
    Tf32(Tf32),
    /// A tile, with the head size that it is compiled for.
    WarpgroupTile(u32, WarpgroupTile),
}

/// The state that the forward and the backward pass share while they build launches.
pub(super) struct Builder<'a> {
    program: &'a Program,
    l: &'a Library,
    pub props: &'a Props,
    pub work: Work,
    /// B, H, G, T, S, D, E.
    pub b: usize,
    pub h: usize,
    pub g: usize,
    pub t: usize,
    pub s: usize,
    pub d: usize,
    pub e: usize,
    /// The head size that the kernels are compiled for.
    pub size: u32,
    mask: Mask,
    /// The window, or 0 for none.
    window: i32,
    /// The arguments for labels and bounds of documents, if there are any: rows are queries, or keys.
    segments: [Vec<Arg>; 2],
    /// The argument for the shift of a block.
    shift: Vec<Arg>,
    scale: f32,
    pub dtype: DType,
    /// The dtype of results: that of the operands, or f32 for a block.
    result: DType,
    /// Number of TF32 products per f32 product.
    products: u32,
}

/// The fields of `attention::Problem` that belong to tensors.
#[derive(Default)]
pub(super) struct Tensors {
    pub q: Strides,
    pub k: Strides,
    pub v: Strides,
    pub out: Strides,
    pub grad: Strides,
    pub dq: Strides,
    pub dk: Strides,
    pub dv: Strides,
}

impl<'a> Builder<'a> {
    pub fn new(program: &'a Program, l: &'a Library, props: &'a Props) -> Result<Builder<'a>> {
        let [q, k, v] = [0, 1, 2].map(|i| l.inputs[i].shape());
        let n = q.rank();
        let heads = |s: Shape| if n > 2 { s.dims()[n - 3] } else { 1 };
        let (d, e) = (q.dims()[n - 1], v.dims()[n - 1]);
        let (t, s) = (q.dims()[n - 2], k.dims()[n - 2]);
        let size = SIZES.into_iter().find(|&c| c as usize >= d.max(e));
        let whole = 16 / l.dtypes[0].size();
        let Some(size) = size.filter(|_| d % whole == 0 && e % whole == 0 && l.attrs.len() >= 6) else {
            return Err(bug(format!("no attention kernel for head sizes {d} and {e}")));
        };
        let lead = n.saturating_sub(3);
        let block = l.op == &ATTENTION_BLOCK || l.op == &ATTENTION_BLOCK_BACKWARD;
        let window = match l.attrs[2] {
            // Sums with a shift fit 32 bits (`KeyBlock::MOST`).
            w if block => w.clamp(0, 1 << 29) as i32,
            w if w > 0 && w < t as i64 => w as i32,
            _ => 0,
        };
        // A constant gives all positions the same document, so it masks nothing.
        let is_view = |k: &usize| matches!(l.inputs[*k], Operand::View(..));
        let documents = documents(l).filter(|both| both.iter().any(is_view)).is_some();
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
            mask: Mask { causal: l.attrs[0] != 0 || l.attrs[2] > 0, window: window > 0, documents, block },
            window,
            segments: Default::default(),
            shift: Vec::new(),
            scale: real(l.attrs[1]) as f32,
            dtype: l.dtypes[0],
            result: if block { DType::F32 } else { l.dtypes[0] },
            products: if l.tf32 { 1 } else { 3 },
        };
        b.bounds()?;
        b.shift();
        Ok(b)
    }

    /// Launches the computation of labels and bounds from the documents' ids.
    fn bounds(&mut self) -> Result<()> {
        let Some(both) = documents(self.l).filter(|_| self.mask.documents) else { return Ok(()) };
        let most = self.b * mask::label_pitch(self.t.max(self.s));
        if most > i32::MAX as usize {
            let message = format!("{} rows of {} positions: `documents` has fewer than 2^31", self.b, self.t);
            return Err(Error::system("scaled_dot_product_attention", message));
        }
        let [queries, keys] = both.map(|k| match self.l.inputs[k] {
            Operand::View(v, layout) => Ok(Ids { at: Arg::Value(v, layout.offset as i64 * 8), layout }),
            Operand::Constant(..) => Err(bug("attention: documents are known of one side".into())),
        });
        let (queries, keys) = (queries?, keys?);
        if !self.mask.block {
            // Rows are queries and keys.
            let [labels, bounds] = self.labels([&queries, &queries], true);
            self.segments = [vec![labels.clone(), bounds.clone()], vec![labels, bounds]];
            return Ok(());
        }
        let of_queries = self.labels([&queries, &keys], false);
        let of_keys = self.labels([&keys, &queries], true);
        let arguments = |[labels, bounds]: [Arg; 2], others: &Arg| vec![labels, others.clone(), bounds];
        let labels = [of_queries[0].clone(), of_keys[0].clone()];
        self.segments = [arguments(of_queries, &labels[1]), arguments(of_keys, &labels[0])];
        Ok(())
    }

    /// Launches the computation of labels of rows and bounds of columns. `keys`: rows are keys.
    fn labels(&mut self, [rows, columns]: [&Ids; 2], keys: bool) -> [Arg; 2] {
        let stretches = rows.positions().div_ceil(mask::BOUND_BLOCK);
        let labels = self.scratch(self.b * mask::label_pitch(rows.positions()) * 4);
        let bounds = self.scratch(self.b * stretches * 16);
        if self.b * stretches > 0 {
            self.work.launches.push(mask::bounds([rows, columns], keys, [labels.clone(), bounds.clone()]));
        }
        [labels, bounds]
    }

    /// Adds the argument for the shift of a block: null for 0.
    fn shift(&mut self) {
        if !self.mask.block {
            return;
        }
        let shift = if attention_block::is_shifted(&self.l.attrs) { self.l.inputs.last() } else { None };
        self.shift = vec![match shift {
            Some(&Operand::View(v, layout)) => Arg::Value(v, layout.offset as i64 * 8),
            Some(&Operand::Constant(bits, ..)) if bits != 0 => self.stored(bits),
            _ => Arg::I64(0),
        }];
    }

    /// Stores an i64 in workspace, as two words.
    fn stored(&mut self, bits: u64) -> Arg {
        let at = self.work.scratch_bytes;
        let room = self.scratch(8);
        let one = Layout::contiguous(Shape::of(&[1]));
        for (k, word) in [bits as u32, (bits >> 32) as u32].into_iter().enumerate() {
            let to = Arg::Scratch(at + 4 * k);
            self.work.launches.push(copy(DType::F32, Arg::I64(0), &one, word, to));
        }
        room
    }

    /// Allocates workspace.
    pub fn scratch(&mut self, bytes: usize) -> Arg {
        let at = self.work.scratch_bytes;
        self.work.scratch_bytes = (at + bytes).next_multiple_of(256);
        Arg::Scratch(at)
    }

    /// Returns input `i` as the kernels can read it; copies it first if necessary.
    pub fn input(&mut self, i: usize) -> (Arg, Strides) {
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

    /// Returns input `i`, which must be contiguous f32: the logarithms that the forward pass saved.
    pub fn saved(&mut self, i: usize) -> Result<Arg> {
        match self.l.inputs[i] {
            Operand::View(v, layout) if layout.is_dense() => Ok(Arg::Value(v, layout.offset as i64 * 4)),
            _ => Err(bug("attention: the saved row sums are not a contiguous buffer".into())),
        }
    }

    /// Returns input `i`, one f32 for each row, as a contiguous buffer; copies it first if necessary.
    pub fn numbers(&mut self, i: usize) -> Arg {
        let (from, layout, fill) = match self.l.inputs[i] {
            Operand::View(v, layout) => {
                let from = Arg::Value(v, layout.offset as i64 * 4);
                if layout.is_dense() {
                    return from;
                }
                (from, layout, 0)
            }
            Operand::Constant(bits, shape, _) => (Arg::I64(0), Layout::contiguous(shape), bits_of(bits, DType::F32)),
        };
        let to = self.scratch(layout.shape.numel() * 4);
        if layout.shape.numel() > 0 {
            self.work.launches.push(copy(DType::F32, from, &layout, fill, to.clone()));
        }
        to
    }

    /// Rows of `numbers` per head, rounded up so that every kernel can read whole steps, even beyond the last row.
    pub fn padded(&self) -> usize {
        mask::label_pitch(self.t)
    }

    /// Encodes `attention::Problem`.
    pub fn problem(&self, x: &Tensors, pairs: usize, section: usize) -> Arg {
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

    /// Selects the warp-level kernel for this problem: `mma`, or `tf32` for f32.
    pub fn tile(&self, pass: Pass) -> Result<Kernel> {
        let tile = match self.dtype {
            DType::F32 => Tf32::of(pass, self.size, self.products, self.props).map(Kernel::Tf32),
            _ => MmaTile::of(pass, self.size, self.props, self.mask).map(Kernel::MmaTile),
        };
        tile.ok_or_else(|| bug(format!("no attention tile for head size {}", self.size)))
    }

    /// Selects the warpgroup kernel for this problem, if one can read q, k, v and, in the backward pass, grad. Also
    /// returns the tensor maps for these operands.
    pub fn groups(&self, pass: Pass, x: &Tensors, inputs: &[Arg]) -> Option<(Kernel, Vec<Arg>)> {
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
                // A block keeps its own rows and reads those of the other side a step at a time.
                let kept = matches!(i, 1 | 2) == (pass == Pass::BackwardKv);
                let rows = if kept { tile.rows() } else { tile.bn };
                Some(Arg::Map(Box::new(arg.clone()), warpgroup::tma_desc(strides, dims, rows, self.dtype)?))
            });
        Some((Kernel::WarpgroupTile(size, tile), maps.collect::<Option<_>>()?))
    }

    pub fn launch(&mut self, pass: Pass, kernel: Kernel, x: &Tensors, mut args: Vec<Arg>) -> Result<()> {
        // Rows on the side that blocks are assigned to, and elements that the blocks of one pair read repeatedly.
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
            let message = format!("{pairs} heads of {rows} positions do not fit in one launch");
            return Err(Error::system("scaled_dot_product_attention", message));
        }
        let section = (SECTION_BYTES / (again * (self.d + self.e) * self.dtype.size()).max(1)).clamp(1, pairs);
        // Query heads that share a key head stay together.
        let section = match pass {
            Pass::BackwardKv => section,
            _ => section.next_multiple_of(self.h / self.g.max(1)).min(pairs),
        };
        let segments = &self.segments[usize::from(pass == Pass::BackwardKv)];
        args.extend(segments.iter().chain(&self.shift).cloned());
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

    /// Returns output `i` and its strides, if the program has it.
    pub fn output(&self, i: usize) -> Result<Option<(Arg, Strides)>> {
        let Some(&v) = self.l.outputs.get(i).filter(|v| **v != ValueId::NONE) else { return Ok(None) };
        debug_assert!(self.program.values.len() > v.0 as usize, "this is a bug: an output without a value");
        let layout = self.l.layouts[i];
        let strides = Strides::of(&layout, self.result)
            .ok_or_else(|| bug("attention cannot store its output in this layout".into()))?;
        Ok(Some((Arg::Value(v, layout.offset as i64 * self.result.size() as i64), strides)))
    }

    /// Where dk and dv are stored, if the program has one of them.
    pub fn gradients_of_keys(&mut self) -> Result<Option<[(Arg, Strides); 2]>> {
        let wanted = [1, 2].iter().any(|&i| self.l.outputs.get(i).is_some_and(|v| *v != ValueId::NONE));
        match wanted {
            true => {
                let dk = self.output_or_scratch(1, [self.g, self.s, self.d])?;
                Ok(Some([dk, self.output_or_scratch(2, [self.g, self.s, self.e])?]))
            }
            false => Ok(None),
        }
    }

    /// Like `output`, or workspace for an output that the program does not have.
    fn output_or_scratch(&mut self, i: usize, [heads, rows, width]: [usize; 3]) -> Result<(Arg, Strides)> {
        let contiguous = Strides::contiguous(heads, rows, width);
        let found = self.output(i)?;
        Ok(found.unwrap_or_else(|| (self.scratch(self.b * heads * rows * width * self.result.size()), contiguous)))
    }
}

/// Bytes that concurrently processed heads read: well within the L2 cache of an A100 (40 MB) or H100 (50 MB).
const SECTION_BYTES: usize = 16 << 20;
