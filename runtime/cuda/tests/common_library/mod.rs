//! Builds library calls by hand: every op with its dtypes, layouts and edge sizes.
#![allow(dead_code)]

pub mod bench;
pub mod dump;
#[path = "../common/nvrtc.rs"]
pub mod nvrtc;

use perilune_core::ops::{Op, by_name, reduce, slicing};
use perilune_core::{DType, HostTensor, Layout, MAX_RANK, Shape};
use perilune_cuda::launch::{Props, Work};
use perilune_plan::BufferDesc;
use perilune_plan::ir::*;
use std::sync::Arc;

/// A small random number generator for test data.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let x = self.0 ^ (self.0 >> 33);
        x.wrapping_mul(0xff51afd7ed558ccd) >> 16
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    /// Values of mixed sign with repeats; some NaN and both zeros if `odd`.
    pub fn tensor(&mut self, dtype: DType, n: usize, odd: bool) -> HostTensor {
        let values: Vec<f64> = (0..n)
            .map(|_| match dtype {
                DType::Bool => self.below(2) as f64,
                DType::U8 => self.below(200) as f64,
                DType::I32 | DType::I64 => self.below(2001) as f64 - 1000.0,
                _ if odd && self.below(40) == 0 => [f64::NAN, 0.0, -0.0, f64::INFINITY][self.below(4)],
                _ => self.below(513) as f64 / 64.0 - 4.0,
            })
            .collect();
        HostTensor::from_f64(dtype, Shape::of(&[n]), &values)
    }
}

/// A program of one library call, and its inputs.
pub struct Case {
    pub label: String,
    pub values: Vec<Value>,
    pub inputs: Vec<HostTensor>,
    operands: Vec<Operand>,
    pub rng: Rng,
}

/// The memory layout of an operand.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Lie {
    Dense,
    /// Dims in reverse order in memory, starting at element 3.
    Turned,
    /// The last dim reversed.
    Backwards,
    Constant,
}

impl Case {
    pub fn new(label: impl Into<String>) -> Case {
        let label = label.into();
        let seed = label.bytes().fold(7, |h: u64, b| h.wrapping_mul(31) + b as u64);
        Case { label, values: Vec::new(), inputs: Vec::new(), operands: Vec::new(), rng: Rng(seed) }
    }

    fn view(&mut self, t: HostTensor, layout: Layout) {
        let storage = Storage::Input(self.inputs.len() as u32);
        self.values.push(Value { shape: t.shape, dtype: t.dtype, storage, origin: Origin::NONE });
        self.inputs.push(t);
        self.operands.push(Operand::View(ValueId(self.values.len() as u32 - 1), layout));
    }

    fn layout(dims: &[usize], lie: Lie) -> Layout {
        let mut l = Layout::contiguous(Shape::of(dims));
        match lie {
            Lie::Turned => {
                l.strides = [0; MAX_RANK];
                l.offset = 3;
                let mut step = 1;
                for (d, &n) in dims.iter().enumerate() {
                    l.strides[d] = step;
                    step *= n as isize;
                }
            }
            Lie::Backwards => {
                if let Some(last) = dims.len().checked_sub(1) {
                    l.offset = dims[last].saturating_sub(1) as isize;
                    l.strides[last] = -1;
                }
            }
            _ => {}
        }
        l
    }

    /// An operand of random elements.
    pub fn random(mut self, dtype: DType, dims: &[usize], lie: Lie, odd: bool) -> Case {
        if lie == Lie::Constant {
            let bits = if dtype.is_float() { 0f64.to_bits() } else { 0 };
            self.operands.push(Operand::Constant(bits, Shape::of(dims), dtype));
            return self;
        }
        let n = dims.iter().product::<usize>() + 3;
        let t = self.rng.tensor(dtype, n, odd);
        self.view(t, Case::layout(dims, lie));
        self
    }

    /// An operand whose running products stay in range.
    pub fn factors(mut self, dtype: DType, dims: &[usize], lie: Lie) -> Case {
        let n = dims.iter().product::<usize>() + 3;
        let values: Vec<f64> = (0..n)
            .map(|_| match self.rng.below(256) {
                0 => 2.0,
                1 => 0.5,
                x if x < 40 => -1.0,
                _ => 1.0,
            })
            .collect();
        self.view(HostTensor::from_f64(dtype, Shape::of(&[n]), &values), Case::layout(dims, lie));
        self
    }

    /// An operand of indices below `below`; with `hot`, most are the same number.
    pub fn indices(mut self, below: usize, dims: &[usize], lie: Lie, hot: bool) -> Case {
        let n = dims.iter().product::<usize>() + 3;
        let values: Vec<i64> = (0..n)
            .map(|_| if hot && self.rng.below(8) > 0 { below as i64 / 2 } else { self.rng.below(below) as i64 })
            .collect();
        self.view(HostTensor::from_i64(Shape::of(&[n]), &values), Case::layout(dims, lie));
        self
    }

    /// An operand of these integers, as every second element of a longer list.
    pub fn integers(mut self, values: &[i64]) -> Case {
        let spread: Vec<i64> = values.iter().flat_map(|v| [*v, -99]).collect();
        let mut layout = Layout::contiguous(Shape::of(&[values.len()]));
        layout.strides[0] = 2;
        self.view(HostTensor::from_i64(Shape::of(&[spread.len()]), &spread), layout);
        self
    }

    /// A contiguous operand without data.
    pub fn empty(mut self, dtype: DType, dims: &[usize]) -> Case {
        let (shape, at) = (Shape::of(dims), self.values.len() as u32);
        self.values.push(Value { shape, dtype, storage: Storage::Input(at), origin: Origin::NONE });
        self.operands.push(Operand::View(ValueId(at), Layout::contiguous(shape)));
        self
    }

    /// Replaces one index by another number.
    pub fn spoiled(mut self, input: usize, at: usize, by: i64) -> Case {
        let t = &self.inputs[input];
        let mut values: Vec<i64> = (0..t.numel()).map(|i| t.get_i64(i)).collect();
        values[at] = by;
        self.inputs[input] = HostTensor::from_i64(t.shape, &values);
        self
    }

    pub fn finish(mut self, op: &str, attrs: &[i64], dims: &[usize], dtype: DType) -> Call {
        let (shape, storage) = (Shape::of(dims), Storage::Output(0));
        self.values.push(Value { shape, dtype, storage, origin: Origin::NONE });
        let dtypes = self
            .operands
            .iter()
            .map(|o| match o {
                Operand::View(v, _) => self.values[v.0 as usize].dtype,
                Operand::Constant(_, _, d) => *d,
            })
            .collect();
        let library = Library {
            op: named(op),
            attrs: attrs.into(),
            inputs: self.operands,
            dtypes,
            outputs: vec![ValueId(self.values.len() as u32 - 1)],
            layouts: vec![Layout::contiguous(shape)],
            epilogue: None,
            tf32: false,
            origin: Origin::NONE,
        };
        let inputs = self.values.iter().filter(|v| v.storage != storage).map(|v| (v.shape, v.dtype)).collect();
        let program = Arc::new(Program {
            values: self.values,
            kernels: vec![Kernel::Library(library.clone())],
            in_flight: Vec::new(),
            inputs,
            outputs: vec![BufferDesc::new(shape, dtype)],
            slots: Vec::new(),
            starts: Vec::new(),
            results: vec![Root::Output(0)],
            arena_bytes: 0,
            live_bytes: 0,
            exchanges: Vec::new(),
            stages: Vec::new(),
            route: Default::default(),
        });
        Call { label: format!("{op} {}", self.label), program, library, inputs: self.inputs }
    }
}

/// A finished case.
pub struct Call {
    pub label: String,
    pub program: Arc<Program>,
    pub library: Library,
    pub inputs: Vec<HostTensor>,
}

impl Call {
    pub fn work(&self) -> Work {
        self.work_on(&Props::H200)
    }

    pub fn work_on(&self, props: &Props) -> Work {
        let made = perilune_cuda::library::routine(&self.program, &self.library, props);
        made.unwrap_or_else(|e| panic!("{}: {e}", self.label))
    }
}

/// Some ops have no Lua name and are only found as statics.
fn named(name: &str) -> &'static Op {
    let inner = [&slicing::STRIDED_PAD, &slicing::COL2IM, &reduce::ARGREDUCE];
    by_name(name).or_else(|| inner.into_iter().find(|op| op.name == name)).expect("op")
}

const LIES: [Lie; 3] = [Lie::Dense, Lie::Turned, Lie::Backwards];

/// Every op, dtype and layout.
pub fn cases() -> Vec<Call> {
    let mut out = Vec::new();
    for dtype in DType::ALL {
        for lie in LIES {
            moving(&mut out, dtype, lie);
            indexing(&mut out, dtype, lie);
            ordering(&mut out, dtype, lie);
            if dtype != DType::Bool {
                arithmetic(&mut out, dtype, lie);
                groups(&mut out, dtype, lie);
            }
        }
    }
    bad_indices(&mut out);
    for lie in [Lie::Dense, Lie::Turned, Lie::Backwards] {
        sampling(&mut out, lie);
    }
    // Long enough for full-size tiles.
    for dtype in [DType::F32, DType::F64] {
        let case = Case::new(format!("{dtype} tiles")).random(dtype, &[2, 140001], Lie::Dense, true);
        out.push(case.finish("argsort", &[1, 0], &[2, 140001], DType::I64));
    }
    out
}

fn moving(out: &mut Vec<Call>, dtype: DType, lie: Lie) {
    let label = |what: &str| Case::new(format!("{dtype} {lie:?} {what}"));
    let fill = 2f64.to_bits() as i64;
    for (dims, axis) in [(&[3usize, 5, 8][..], 1usize), (&[6, 16], 1), (&[7], 0), (&[2, 3, 2], 2)] {
        let n = dims[axis];
        for (low, step, more) in [(0usize, 1usize, 3usize), (8, 1, 8), (1, 3, 2)] {
            let total = low + (n - 1) * step + 1 + more;
            let mut to = dims.to_vec();
            to[axis] = total;
            let attrs = [axis as i64, low as i64, step as i64, total as i64, fill];
            let case = label(&format!("{dims:?} {axis} {low} {step} {more}"));
            out.push(case.random(dtype, dims, lie, false).finish("strided_pad", &attrs, &to, dtype));
        }
        let mut to = dims.to_vec();
        let mut case = label(&format!("{dims:?} {axis}"));
        to[axis] = 0;
        for (k, extra) in [0usize, 2, 1].into_iter().enumerate() {
            let mut part = dims.to_vec();
            part[axis] = if extra == 1 { 0 } else { n + extra };
            to[axis] += part[axis];
            case = case.random(dtype, &part, if k == 0 { lie } else { Lie::Dense }, false);
        }
        out.push(case.finish("cat", &[axis as i64], &to, dtype));
    }
    out.push(label("empty").random(dtype, &[0], Lie::Dense, false).finish(
        "strided_pad",
        &[0, 2, 1, 5, fill],
        &[5],
        dtype,
    ));
}

/// affine_sample of bytes and floats, reductions and enlargements, both borders, no images.
fn sampling(out: &mut Vec<Call>, lie: Lie) {
    for (from, result) in [(DType::U8, DType::F32), (DType::F32, DType::F32), (DType::F64, DType::F64)] {
        for (dims, to) in [([2usize, 3, 9, 7], [5usize, 12]), ([3, 1, 1, 1], [4, 4]), ([0, 3, 4, 4], [4, 4])] {
            for edge in [0, 1] {
                let case = Case::new(format!("{from} {lie:?} {dims:?} {to:?} {edge}")).random(from, &dims, lie, false);
                let case = case.random(result, &[dims[0], 2, 3], lie, false);
                let attrs = [to[0] as i64, to[1] as i64, edge, 2.5f64.to_bits() as i64];
                out.push(case.finish("affine_sample", &attrs, &[dims[0], dims[1], to[0], to[1]], result));
            }
        }
    }
}

fn indexing(out: &mut Vec<Call>, dtype: DType, lie: Lie) {
    let label = |what: &str| Case::new(format!("{dtype} {lie:?} {what}"));
    for (dims, small) in
        [(&[5usize, 16][..], &[4usize, 9][..]), (&[30], &[300]), (&[3, 4, 5], &[3, 7, 2]), (&[4, 1], &[1, 1])]
    {
        for axis in 0..dims.len() {
            let mut index = small.to_vec();
            for d in (0..dims.len()).filter(|d| *d != axis) {
                index[d] = index[d].min(dims[d]);
            }
            let case = || {
                label(&format!("{dims:?} {axis}"))
                    .random(dtype, dims, lie, false)
                    .indices(dims[axis], &index, lie, false)
            };
            let axis = [axis as i64];
            out.push(case().finish("gather", &axis, &index, dtype));
            out.push(case().random(dtype, &index, lie, false).finish("scatter", &axis, dims, dtype));
            if dtype != DType::Bool {
                out.push(case().random(dtype, &index, lie, false).finish("scatter_add", &axis, dims, dtype));
            }
        }
    }
    for (dims, k, hot) in
        [(&[5usize, 16][..], 7usize, false), (&[9, 40], 700, true), (&[2, 6, 24], 3000, true), (&[4, 3], 0, false)]
    {
        for axis in 0..dims.len() {
            let mut to = dims.to_vec();
            to[axis] = k;
            let case = || {
                label(&format!("{dims:?} {axis} {k}")).random(dtype, dims, lie, false).indices(
                    dims[axis],
                    &[k],
                    lie,
                    hot,
                )
            };
            let at = [axis as i64];
            out.push(case().finish("index_select", &at, &to, dtype));
            if dtype != DType::Bool {
                out.push(case().random(dtype, &to, lie, false).finish("index_add", &at, dims, dtype));
            }
        }
    }
    if dtype != DType::Bool && lie == Lie::Dense {
        // Long runs: more than one level of partial sums, and sums into a constant.
        let case = label("hot").random(dtype, &[3, 8], Lie::Constant, false).indices(3, &[9000], lie, true);
        out.push(case.random(dtype, &[9000, 8], lie, false).finish("index_add", &[0], &[3, 8], dtype));
        let case = label("hot").random(dtype, &[11], lie, false).indices(11, &[9000], lie, true);
        out.push(case.random(dtype, &[9000], lie, false).finish("scatter_add", &[0], &[11], dtype));
        let case = label("nowhere").random(dtype, &[0], lie, false).indices(1, &[0], lie, false);
        out.push(case.random(dtype, &[0], lie, false).finish("scatter_add", &[0], &[0], dtype));
    }
}

fn ordering(out: &mut Vec<Call>, dtype: DType, lie: Lie) {
    let label = |what: &str| Case::new(format!("{dtype} {lie:?} {what}"));
    for dims in
        [&[7usize, 5][..], &[1000], &[3, 40, 6], &[4, 1], &[2, 0], &[3, 4096], &[2, 5000], &[2100, 2], &[1, 20001]]
    {
        for axis in 0..dims.len() {
            for way in [0, 1] {
                let case = || label(&format!("{dims:?} {axis} {way}")).random(dtype, dims, lie, true);
                let attrs = [axis as i64, way];
                if dims.iter().product::<usize>() < 20000 {
                    out.push(case().finish("argsort", &attrs, dims, DType::I64));
                }
                if dims[axis] > 0 {
                    let mut to = dims.to_vec();
                    to[axis] = 1;
                    out.push(case().finish("argreduce", &attrs, &to, DType::I64));
                }
            }
        }
    }
}

fn arithmetic(out: &mut Vec<Call>, dtype: DType, lie: Lie) {
    let label = |what: &str| Case::new(format!("{dtype} {lie:?} {what}"));
    for (outer, inner, total, size, step, dilation) in
        [(1, 1, 9, 3, 1, 1), (3, 4, 20, 3, 2, 1), (2, 5, 30, 4, 1, 3), (4, 3, 21, 5, 5, 1)]
    {
        let n = (total - (dilation * (size - 1) + 1)) / step + 1;
        let attrs = [1, size as i64, step as i64, dilation as i64, total as i64];
        let case = label(&format!("{size} {step} {dilation}")).random(dtype, &[outer, n, inner, size], lie, false);
        out.push(case.finish("col2im", &attrs, &[outer, total, inner], dtype));
    }
    for dims in [&[7usize, 5][..], &[3, 70, 6], &[2, 0], &[2, 3000], &[1, 20000], &[1500, 3], &[1], &[3, 300]] {
        for axis in 0..dims.len() {
            for op in ["cumsum", "cumprod"] {
                let case = label(&format!("{dims:?} {axis}"));
                let case =
                    if op == "cumsum" { case.random(dtype, dims, lie, true) } else { case.factors(dtype, dims, lie) };
                out.push(case.finish(op, &[axis as i64], dims, dtype));
            }
        }
    }
    for (batch, m, n, k) in [(&[][..], 3, 4, 5), (&[2usize, 3][..], 5, 7, 9), (&[], 70, 65, 33), (&[], 4, 4, 0)] {
        let dims = |p: usize, q: usize| [batch, &[p, q]].concat();
        let case = label(&format!("{batch:?} {m} {n} {k}")).random(dtype, &dims(m, k), lie, false);
        out.push(case.random(dtype, &dims(k, n), Lie::Dense, false).finish("matmul", &[], &dims(m, n), dtype));
    }
    // Other dtypes are decomposed.
    for (m, n, k) in [(3, 4, 5), (70, 65, 33), (4, 4, 0)].into_iter().filter(|_| dtype.is_float() && dtype.size() == 2)
    {
        let case = label(&format!("{m} {n} {k}")).random(dtype, &[m, k], lie, false);
        let case = case.random(dtype, &[n, k], Lie::Dense, false).random(dtype, &[n], lie, false);
        out.push(case.finish("linear", &[], &[m, n], dtype));
    }
}

fn groups(out: &mut Vec<Call>, dtype: DType, lie: Lie) {
    let label = |what: &str| Case::new(format!("{dtype} {lie:?} {what}"));
    for (rows, k, n, ends) in [
        (7, 3, 4, &[2i64, 2, 6][..]),
        (300, 72, 136, &[0, 130, 131, 290]),
        (300, 33, 70, &[300]),
        (150, 16, 8, &[1; 70]),
        (5, 0, 8, &[3, 5]),
        (4, 8, 8, &[]),
        (0, 8, 8, &[0, 0]),
    ] {
        let e = ends.len();
        for other in [Lie::Dense, Lie::Turned] {
            let case = label(&format!("{other:?} {rows} {k} {n} {e}")).random(dtype, &[rows, k], lie, false);
            let case = case.random(dtype, &[e, k, n], other, false).integers(ends);
            out.push(case.finish("grouped_matmul", &[], &[rows, n], dtype));
            let case = label(&format!("{other:?} {rows} {k} {n} {e}")).random(dtype, &[rows, k], lie, false);
            let case = case.random(dtype, &[rows, n], other, false).integers(ends);
            out.push(case.finish("grouped_sums", &[], &[e, k, n], dtype));
        }
    }
}

fn bad_indices(out: &mut Vec<Call>) {
    for dtype in [DType::F32, DType::BF16] {
        for ends in [[3, 11], [-1, 4], [7, 4]] {
            for (k, n) in [(8, 16), (8, 0)] {
                let case = Case::new(format!("bad {ends:?} {n}")).random(dtype, &[10, k], Lie::Dense, false);
                let case = case.random(dtype, &[2, k, n], Lie::Dense, false).integers(&ends);
                out.push(case.finish("grouped_matmul", &[], &[10, n], dtype));
                let case = Case::new(format!("bad {ends:?} {n}")).random(dtype, &[10, k], Lie::Dense, false);
                let case = case.random(dtype, &[10, n], Lie::Dense, false).integers(&ends);
                out.push(case.finish("grouped_sums", &[], &[2, k, n], dtype));
            }
        }
    }
    for bad in [10, -1] {
        for op in ["gather", "scatter", "scatter_add", "index_select", "index_add"] {
            let case = Case::new(format!("bad {bad}")).random(DType::F32, &[10], Lie::Dense, false);
            let case = case.indices(10, &[6], Lie::Dense, false).spoiled(1, 3, bad);
            let two = op == "gather" || op == "index_select";
            let case = if two { case } else { case.random(DType::F32, &[6], Lie::Dense, false) };
            out.push(case.finish(op, &[0], &[if two { 6 } else { 10 }], DType::F32));
        }
    }
}
