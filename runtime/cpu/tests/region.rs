//! Compares compiled regions with the literal reference: every function and dtype, every schedule, every thread count.

mod common;

use common::{Build, Rng};
use perilune_core::mesh::Start;
use perilune_core::ops::ReduceFn;
use perilune_core::ops::elementwise::{Domain, MapFn};
use perilune_core::{DType, HostTensor, Layout, MAX_RANK, Shape};
use perilune_plan::ir::*;
use std::sync::Arc;

fn defined(f: MapFn, d: DType) -> bool {
    match f.domain() {
        Domain::Float | Domain::Code => d.is_float(),
        Domain::Number => d != DType::Bool,
        Domain::Any | Domain::Compare => true,
        Domain::Logic => d == DType::Bool,
    }
}

/// Generates `n` test values, including all special cases.
fn specials(rng: &mut Rng, dtype: DType, n: usize) -> HostTensor {
    let mut t = rng.tensor(dtype, Shape::of(&[n])).to_f64();
    let extra: &[f64] = match dtype {
        DType::Bool => &[0.0, 1.0],
        DType::U8 => &[0.0, 1.0, 255.0, 7.0],
        DType::I32 | DType::I64 => &[0.0, 1.0, -1.0, -2147483648.0, 2147483647.0, 13.0],
        _ => &[
            0.0,
            -0.0,
            1.0,
            -1.0,
            f64::INFINITY,
            f64::NEG_INFINITY,
            f64::NAN,
            1e30,
            -1e30,
            1e-30,
            88.0,
            -104.0,
            0.5,
            2.5,
            65504.0,
            6e-8,
        ],
    };
    for (i, v) in t.iter_mut().enumerate() {
        if i % 3 == 0 {
            *v = extra[rng.below(extra.len())];
        }
    }
    HostTensor::from_f64(dtype, Shape::of(&[n]), &t)
}

#[test]
fn every_function_of_every_dtype() {
    let mut rng = Rng(1);
    let n = 300;
    for &f in MapFn::ALL {
        for d in DType::ALL.into_iter().filter(|d| defined(f, *d)) {
            // Which of the last two operands is a constant.
            for still in 0..3 {
                if f.arity() == 1 && still > 0 {
                    continue;
                }
                let mut b = Build::default();
                let mut args = Vec::new();
                for k in 0..f.arity() {
                    let dtype = if f == MapFn::Where && k == 0 { DType::Bool } else { d };
                    let from_end = f.arity() - 1 - k;
                    args.push(if still > 0 && from_end + 1 == still {
                        b.constant(3.0, dtype, n)
                    } else {
                        let v = b.input(specials(&mut rng, dtype, n));
                        b.load(v, Layout::contiguous(Shape::of(&[n])), Level::Full)
                    });
                }
                let y = b.map(f, &args);
                b.store(y, Shape::of(&[n]));
                b.check(1, 1, n, &format!("{f:?} of {d}, still {still}"));
            }
        }
    }
}

#[test]
fn every_cast() {
    let mut rng = Rng(2);
    let n = 200;
    for from in DType::ALL {
        for to in DType::ALL {
            let mut b = Build::default();
            let v = b.input(specials(&mut rng, from, n));
            let x = b.load(v, Layout::contiguous(Shape::of(&[n])), Level::Full);
            let y = b.push(Code::Cast(x), to, Level::Full);
            b.store(y, Shape::of(&[n]));
            b.check(1, 1, n, &format!("{from} to {to}"));
        }
    }
}

/// Returns a random layout of `shape`, and the number of elements of memory that it needs.
fn random_layout(rng: &mut Rng, dims: &[usize]) -> (Layout, usize) {
    let mut l = Layout { shape: Shape::of(dims), strides: [0; MAX_RANK], offset: rng.below(3) as isize };
    let mut order: Vec<usize> = (0..dims.len()).collect();
    for i in (1..order.len()).rev() {
        order.swap(i, rng.below(i + 1));
    }
    if rng.below(2) == 0 {
        order.sort_unstable_by(|a, b| b.cmp(a));
    }
    let mut step = 1 + (rng.below(4) / 3) as isize;
    for &d in &order {
        match rng.below(8) {
            0 | 1 => l.strides[d] = 0,
            2 => {
                l.strides[d] = -step;
                l.offset += step * (dims[d] as isize - 1);
                step *= dims[d] as isize;
            }
            _ => {
                l.strides[d] = step;
                step *= dims[d] as isize + (rng.below(4) / 3) as isize;
            }
        }
    }
    let reach = l.extent().map_or(1, |(_, high)| high as usize + 1);
    (l, reach)
}

#[test]
fn loads_through_any_layout() {
    let mut rng = Rng(3);
    let shapes: [&[usize]; 7] = [&[6], &[7, 50], &[3, 4, 5], &[40, 300], &[2, 3, 4, 64], &[3, 2500], &[33, 65, 4]];
    for round in 0..160 {
        let dims = shapes[round % shapes.len()];
        let n: usize = dims.iter().product();
        for dtype in [DType::F32, DType::BF16, DType::I64, DType::U8, DType::F16] {
            let mut b = Build::default();
            let mut regs = Vec::new();
            let mut note = String::new();
            for _ in 0..3 {
                let (l, reach) = random_layout(&mut rng, dims);
                note += &format!("{:?}{:?}+{} ", dims, l.strides(), l.offset);
                let v = b.input(rng.tensor(dtype, Shape::of(&[reach])));
                regs.push(b.load(v, l, Level::Full));
            }
            let s = b.map(MapFn::Add, &[regs[0], regs[1]]);
            let s = b.map(MapFn::Mul, &[regs[2], s]);
            b.store(s, Shape::of(&[n]));
            // Also a copy of a load without arithmetic.
            b.store(regs[0], Shape::of(&[n]));
            b.check(1, 1, n, &format!("{dtype} {note}"));
        }
    }
}

#[test]
fn generators() {
    let mut rng = Rng(4);
    for dims in [&[5usize, 7][..], &[3, 5000], &[100, 40], &[9000]] {
        let n: usize = dims.iter().product();
        for round in 0..6 {
            let (l, _) = random_layout(&mut rng, dims);
            // Of a whole tensor, or of a part that begins at a multiple of a group of four numbers or beside one.
            let start = (round % 3 > 0).then_some(3);
            let first = if round % 3 == 1 { 1 << 33 } else { 1_000_003 };
            let mut slots = vec![(DType::I64, 0x1234_5678_9abc_def0), (DType::I64, 77), (DType::F32, 0.3f64.to_bits())];
            slots.push((DType::I64, first));
            let mut b = Build { slots, ..Build::default() };
            let u = b.push(
                Code::Load { source: Source::Uniform { seed: 0, counter: 1, start }, layout: Arc::new(l.collapse()) },
                DType::F32,
                Level::Full,
            );
            let plain = Layout::contiguous(Shape::of(&[n]));
            let w = b.push(
                Code::Load { source: Source::Uniform { seed: 0, counter: 1, start }, layout: Arc::new(plain) },
                DType::F32,
                Level::Full,
            );
            let i = b.push(
                Code::Load { source: Source::Iota { start }, layout: Arc::new(l.collapse()) },
                DType::I64,
                Level::Full,
            );
            let s = b.push(
                Code::Load { source: Source::Slot(2), layout: Arc::new(Layout { strides: [0; 8], ..plain }) },
                DType::BF16,
                Level::Full,
            );
            let f = b.push(Code::Cast(i), DType::F32, Level::Full);
            let s = b.push(Code::Cast(s), DType::F32, Level::Full);
            let y = b.map(MapFn::Add, &[u, f]);
            let y = b.map(MapFn::Mul, &[y, s]);
            let y = b.map(MapFn::Sub, &[y, w]);
            for r in [u, i, s, y] {
                b.store(r, Shape::of(&[n]));
            }
            b.check(1, 1, n, &format!("generators through {:?}", l));
        }
    }
}

/// What a device has of an input that is whole on all: the elements from a number of the run on.
#[test]
fn blocks_of_inputs() {
    let mut rng = Rng(5);
    for dims in [&[6usize, 50][..], &[3, 5000], &[100, 40]] {
        let n: usize = dims.iter().product();
        for dtype in [DType::F32, DType::BF16, DType::I64, DType::U8] {
            let start = 64 * (1 + rng.below(9));
            let (l, reach) = random_layout(&mut rng, dims);
            // The second device along an axis.
            let starts = vec![Start::from_attrs(&[0, start as i64])];
            let mut b = Build { slots: vec![(DType::I64, start as u64)], starts, ..Build::default() };
            let mut block = |b: &mut Build, layout: Layout, reach: usize| {
                let input = b.input(rng.tensor(dtype, Shape::of(&[start + reach])));
                let source = Source::Block { input, start: 0 };
                b.push(Code::Load { source, layout: Arc::new(layout.collapse()) }, dtype, Level::Full)
            };
            let (x, y) = (block(&mut b, l, reach), block(&mut b, Layout::contiguous(Shape::of(&[n])), n));
            let one = block(&mut b, Layout { strides: [0; 8], ..Layout::contiguous(Shape::of(&[n])) }, 1);
            let z = b.map(MapFn::Add, &[x, y]);
            let z = b.map(MapFn::Mul, &[z, one]);
            for r in [x, y, z] {
                b.store(r, Shape::of(&[n]));
            }
            b.check(1, 1, n, &format!("{dtype} from {start} through {l:?}"));
        }
    }
}

fn sizes(dtype: DType, cols: usize) -> Vec<(usize, usize, usize)> {
    match cols {
        0..=17 => vec![(1, 1, cols), (1, 9, cols), (2, 700, cols)],
        18..=1000 => vec![(1, 1, cols), (1, 7, cols), (2, 300, cols)],
        _ if dtype == DType::F32 => vec![(1, 1, cols), (1, 3, cols), (2, 20, cols)],
        _ => vec![(1, 3, cols)],
    }
}

const COLS: [usize; 13] = [0, 1, 2, 15, 16, 17, 100, 1000, 4096, 5000, 8192, 8193, 50304];

#[test]
fn row_and_column_reductions() {
    let mut rng = Rng(5);
    for dtype in [DType::F32, DType::F64, DType::I64, DType::BF16, DType::I32, DType::U8, DType::F16, DType::Bool] {
        for cols in COLS {
            for (batch, rows, cols) in sizes(dtype, cols) {
                let shape = Shape::of(&[batch * rows * cols]);
                let mut b = Build::default();
                let v = b.input(rng.tensor(dtype, shape));
                let x = b.load(v, Layout::contiguous(shape), Level::Full);
                let logic = |f: &ReduceFn| f.combine().domain() == Domain::Logic;
                for &f in ReduceFn::ALL.iter().filter(|f| dtype == DType::Bool || !logic(f)) {
                    let r = b.reduce_row(f, x);
                    b.store(r, Shape::of(&[batch * rows]));
                    let c = b.reduce_col(f, x);
                    b.store(c, Shape::of(&[batch * cols]));
                }
                b.check(batch, rows, cols, &format!("{dtype} {batch}x{rows}x{cols}"));
            }
        }
    }
}

#[test]
fn empty_rows_and_zero_rows() {
    for (batch, rows, cols) in [(1, 0, 5), (0, 3, 5), (2, 3, 0), (1, 0, 9000)] {
        let shape = Shape::of(&[batch * rows * cols]);
        let mut b = Build::default();
        let v = b.input(HostTensor::from_f32(shape, &vec![0.0; shape.numel()]));
        let x = b.load(v, Layout::contiguous(shape), Level::Full);
        let r = b.reduce_row(ReduceFn::Max, x);
        let s = b.spread(r);
        let y = b.map(MapFn::Sub, &[x, s]);
        let c = b.reduce_col(ReduceFn::Prod, y);
        b.store(r, Shape::of(&[batch * rows]));
        b.store(y, shape);
        b.store(c, Shape::of(&[batch * cols]));
        b.check(batch, rows, cols, &format!("{batch}x{rows}x{cols}"));
    }
}

/// Softmax fused with the sums of its columns.
#[test]
fn softmax_with_column_sums() {
    let mut rng = Rng(6);
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        for cols in COLS.into_iter().filter(|c| *c > 0) {
            for (batch, rows, cols) in sizes(dtype, cols) {
                let n = batch * rows * cols;
                let shape = Shape::of(&[n]);
                let mut b = Build::default();
                let v = b.input(rng.tensor(dtype, shape));
                let x = b.load(v, Layout::contiguous(shape), Level::Full);
                let m = b.reduce_row(ReduceFn::Max, x);
                let ms = b.spread(m);
                let d = b.map(MapFn::Sub, &[x, ms]);
                let e = b.map(MapFn::Exp, &[d]);
                let s = b.reduce_row(ReduceFn::Sum, e);
                let t = b.map(MapFn::Reciprocal, &[s]);
                let ts = b.spread(t);
                let y = b.map(MapFn::Mul, &[e, ts]);
                let c = b.reduce_col(ReduceFn::Sum, y);
                let l = b.map(MapFn::Log, &[s]);
                let l = b.map(MapFn::Add, &[l, m]);
                b.store(y, shape);
                b.store(c, Shape::of(&[batch * cols]));
                b.store(l, Shape::of(&[batch * rows]));
                b.check(batch, rows, cols, &format!("{dtype} softmax {batch}x{rows}x{cols}"));
            }
        }
    }
}

/// Layer norm with every kind of load: row vectors, per-row values, a transposed residual, a stored statistic.
#[test]
fn layer_norm_with_mixed_loads() {
    let mut rng = Rng(7);
    for dtype in [DType::F32, DType::BF16] {
        for (rows, cols) in [(5, 3), (70, 40), (300, 768), (9, 300), (4, 5000), (40, 4500), (2, 30000)] {
            let (n, flat) = (rows * cols, Shape::of(&[rows * cols]));
            let grid = Shape::of(&[rows, cols]);
            let mut b = Build::default();
            let x = b.input(rng.tensor(dtype, flat));
            let gamma = b.input(rng.tensor(dtype, Shape::of(&[cols])));
            let scale = b.input(rng.tensor(dtype, Shape::of(&[rows])));
            let across = b.input(rng.tensor(dtype, flat));
            let expand = |l: Layout, s: [isize; 2]| {
                let mut l = Layout { shape: grid, ..l };
                l.strides[..2].copy_from_slice(&s);
                l
            };
            let plain = Layout::contiguous(flat);
            let x = b.load(x, plain, Level::Full);
            let gamma = b.load(gamma, expand(plain, [0, 1]), Level::Full);
            let each = b.load(scale, expand(plain, [1, 0]), Level::Full);
            let across = b.load(across, expand(plain, [1, rows as isize]), Level::Full);
            let scale = b.load(scale, Layout::contiguous(Shape::of(&[rows])), Level::Row);
            let s = b.reduce_row(ReduceFn::Sum, x);
            let c = b.push(
                Code::Load {
                    source: Source::Constant((1.0 / cols as f64).to_bits()),
                    layout: Arc::new(Layout { strides: [0; 8], ..Layout::contiguous(Shape::of(&[rows])) }),
                },
                dtype,
                Level::Row,
            );
            let m = b.map(MapFn::Mul, &[s, c]);
            let ms = b.spread(m);
            let d = b.map(MapFn::Sub, &[x, ms]);
            let q = b.map(MapFn::Mul, &[d, d]);
            let v = b.reduce_row(ReduceFn::Sum, q);
            let v = b.map(MapFn::Mul, &[v, c]);
            let r = b.map(MapFn::Rsqrt, &[v]);
            let r = b.map(MapFn::Mul, &[r, scale]);
            let rs = b.spread(r);
            let y = b.map(MapFn::Mul, &[d, rs]);
            let y = b.map(MapFn::Mul, &[gamma, y]);
            let y = b.map(MapFn::Add, &[y, across]);
            let big = b.map(MapFn::Gt, &[y, each]);
            let zero = b.constant(0.0, dtype, n);
            let y = b.map(MapFn::Where, &[big, y, zero]);
            let t = b.map(MapFn::Copy, &[y]);
            b.store(t, flat);
            b.store(m, Shape::of(&[rows]));
            b.store(big, flat);
            b.store(d, flat);
            b.store(each, flat);
            b.store(scale, Shape::of(&[rows]));
            b.check(1, rows, cols, &format!("{dtype} layer norm {rows}x{cols}"));
        }
    }
}

#[test]
fn stores_in_place() {
    let mut rng = Rng(8);
    for dtype in [DType::F32, DType::BF16] {
        for (rows, cols) in [(1, 100), (1, 100_000), (1000, 50), (3, 20_000), (50, 5000)] {
            let shape = Shape::of(&[rows * cols]);
            let mut b = Build::default();
            let (w, g) = (b.input(rng.tensor(dtype, shape)), b.input(rng.tensor(dtype, shape)));
            b.written = vec![0, 1];
            let plain = Layout::contiguous(shape);
            let (x, y) = (b.load(w, plain, Level::Full), b.load(g, plain, Level::Full));
            let s = b.map(MapFn::Add, &[x, y]);
            let r = b.reduce_row(ReduceFn::Sum, s);
            let r = b.spread(r);
            let t = b.map(MapFn::Mul, &[x, r]);
            b.stores.push((s, w));
            b.stores.push((t, g));
            b.store(s, shape);
            b.check(1, rows, cols, &format!("{dtype} in place {rows}x{cols}"));
            // Swapped: each store overwrites the operand of the other, with no arithmetic in between.
            b.stores[0].0 = y;
            b.stores[1].0 = x;
            b.check(1, rows, cols, &format!("{dtype} swapped {rows}x{cols}"));
        }
    }
}

/// A transposed gradient is updated in place together with its weight, and summed to one value.
#[test]
fn transposed_gradients() {
    let mut rng = Rng(9);
    for dtype in [DType::F32, DType::BF16] {
        for (rows, cols) in [(64, 64), (100, 700), (700, 100), (37, 5000), (2100, 129)] {
            let (n, flat) = (rows * cols, Shape::of(&[rows * cols]));
            let mut b = Build::default();
            let (w, g) = (b.input(rng.tensor(dtype, flat)), b.input(rng.tensor(dtype, flat)));
            let mut l = Layout::contiguous(Shape::of(&[rows, cols]));
            l.strides[..2].copy_from_slice(&[1, rows as isize]);
            let (x, y) = (b.load(w, Layout::contiguous(flat), Level::Full), b.load(g, l, Level::Full));
            let lr = b.constant(0.01, dtype, n);
            let u = b.map(MapFn::Mul, &[y, lr]);
            let u = b.map(MapFn::Sub, &[x, u]);
            b.written = vec![0];
            b.stores.push((u, w));
            b.check(1, 1, n, &format!("{dtype} update {rows}x{cols}"));
            let q = b.map(MapFn::Mul, &[y, y]);
            let s = b.reduce_row(ReduceFn::Sum, q);
            b.store(s, Shape::of(&[1]));
            b.check(1, 1, n, &format!("{dtype} update and norm {rows}x{cols}"));
        }
    }
}

/// Fused groups recompute cheap values of earlier groups: from memory and from saved registers of a long row, but not
/// if a result overwrites their operand.
#[test]
fn recomputed_values() {
    let mut rng = Rng(10);
    for (rows, cols) in [(3, 40), (70, 128), (9, 1003), (5, 4096), (6, 9000), (2, 30000)] {
        let shape = Shape::of(&[rows * cols]);
        let plain = Layout::contiguous(shape);
        for in_place in [false, true] {
            let mut b = Build::default();
            let (v, w) = (b.input(rng.tensor(DType::F32, shape)), b.input(rng.tensor(DType::F32, shape)));
            let (x, t) = (b.load(v, plain, Level::Full), b.load(w, plain, Level::Full));
            let m = b.reduce_row(ReduceFn::Max, x);
            let m = b.spread(m);
            let d = b.map(MapFn::Sub, &[x, m]);
            let q = b.map(MapFn::Mul, &[d, d]);
            let s = b.reduce_row(ReduceFn::Sum, q);
            let s = b.spread(s);
            let y = b.map(MapFn::Mul, &[d, s]);
            let y = b.map(MapFn::Mul, &[y, t]);
            if in_place {
                b.written = vec![0];
                b.stores.push((y, v));
                let z = b.map(MapFn::Add, &[d, t]);
                b.store(z, shape);
            } else {
                b.store(y, shape);
            }
            b.check(1, rows, cols, &format!("centred rows {rows}x{cols}, in place {in_place}"));
        }
        let mut b = Build::default();
        let (v, w) = (b.input(rng.tensor(DType::F32, shape)), b.input(rng.tensor(DType::F32, shape)));
        let (x, t) = (b.load(v, plain, Level::Full), b.load(w, plain, Level::Full));
        let m = b.reduce_row(ReduceFn::Max, x);
        let m = b.spread(m);
        let d = b.map(MapFn::Sub, &[x, m]);
        let e = b.map(MapFn::Exp, &[d]);
        let s = b.reduce_row(ReduceFn::Sum, e);
        let s = b.map(MapFn::Reciprocal, &[s]);
        let s = b.spread(s);
        let y = b.map(MapFn::Mul, &[e, s]);
        let y = b.map(MapFn::Sub, &[y, t]);
        b.store(y, shape);
        b.check(1, rows, cols, &format!("shares less targets {rows}x{cols}"));
    }
}
