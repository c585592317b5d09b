//! Compares library ops with naive loops: dtypes, strided and constant operands, thread counts, errors.

mod common;

use common::{Build, Rng, device, position, same};
use perilune_core::ops::{self, Class, source};
use perilune_core::{DType, HostTensor, Layout, MAX_RANK, Shape};
use perilune_plan::ir::*;

#[test]
fn every_library_op_has_a_routine() {
    for op in ops::all().iter().filter(|op| matches!(op.class, Class::Library) && **op != &source::KERNEL) {
        assert!(perilune_cpu::has_routine(op), "the CPU has no routine for {}", op.name);
    }
}

/// An operand, and its elements in order.
struct Given {
    operand: Operand,
    elements: HostTensor,
}

impl Given {
    fn f(&self, i: usize) -> f64 {
        self.elements.get_f64(i)
    }
}

/// A random tensor viewed through a random permutation of its memory.
fn strided(b: &mut Build, rng: &mut Rng, dtype: DType, dims: &[usize]) -> Given {
    let n: usize = dims.iter().product();
    let t = rng.tensor(dtype, Shape::of(&[n + 3]));
    given(b, rng, t, dims)
}

fn given(b: &mut Build, rng: &mut Rng, t: HostTensor, dims: &[usize]) -> Given {
    let mut order: Vec<usize> = (0..dims.len()).collect();
    for i in (1..order.len()).rev() {
        order.swap(i, rng.below(i + 1));
    }
    let mut l = Layout { shape: Shape::of(dims), strides: [0; MAX_RANK], offset: 2 };
    let mut step = 1;
    for &d in &order {
        l.strides[d] = step;
        step *= dims[d] as isize;
    }
    view(b, t, l)
}

fn view(b: &mut Build, t: HostTensor, l: Layout) -> Given {
    let mut bytes = Vec::new();
    let size = t.dtype.size();
    for p in 0..l.numel() {
        let at = position(&l, p) as usize;
        bytes.extend_from_slice(&t.bytes[at * size..(at + 1) * size]);
    }
    let elements = HostTensor::new(t.dtype, l.shape, bytes);
    let v = b.input(t);
    Given { operand: Operand::View(v, l), elements }
}

fn constant(x: f64, dtype: DType, dims: &[usize]) -> Given {
    let shape = Shape::of(dims);
    let bits = if dtype.is_float() { x.to_bits() } else { x as i64 as u64 };
    let elements = HostTensor::from_f64(dtype, shape, &vec![x; shape.numel()]);
    Given { operand: Operand::Constant(bits, shape, dtype), elements }
}

fn indices(b: &mut Build, rng: &mut Rng, below: usize, dims: &[usize]) -> Given {
    let n: usize = dims.iter().product();
    let values: Vec<i64> = (0..n + 3).map(|_| rng.below(below) as i64).collect();
    given(b, rng, HostTensor::from_i64(Shape::of(&[n + 3]), &values), dims)
}

fn check(b: &mut Build, op: &str, attrs: &[i64], inputs: &[&Given], want: &HostTensor) {
    b.output(want.shape, want.dtype);
    let kernel = b.library(op, attrs, inputs.iter().map(|g| g.operand).collect());
    for threads in [1, 2, 3, 8] {
        let got = b.run(&device(threads), vec![kernel.clone()]).expect("runs");
        same(&got[0], want, &format!("{op} {attrs:?} of {} on {threads} threads", want.dtype));
    }
}

/// Coordinates of element `p`.
fn coords(shape: &Shape, mut p: usize) -> Vec<usize> {
    let mut c = vec![0; shape.rank()];
    for d in (0..shape.rank()).rev() {
        c[d] = p % shape.dims()[d];
        p /= shape.dims()[d];
    }
    c
}

fn index_of(shape: &Shape, c: &[usize]) -> usize {
    c.iter().zip(shape.dims()).fold(0, |p, (c, d)| p * d + c)
}

fn collect(dtype: DType, shape: Shape, f: impl Fn(&[usize]) -> f64) -> HostTensor {
    let values: Vec<f64> = (0..shape.numel()).map(|p| f(&coords(&shape, p))).collect();
    HostTensor::from_f64(dtype, shape, &values)
}

const DTYPES: [DType; 8] = DType::ALL;

#[test]
fn gather_and_scatter_equal_naive_loops() {
    let mut rng = Rng(11);
    for dtype in DTYPES {
        for (dims, below) in [
            (&[5usize, 6][..], &[4usize, 6][..]),
            (&[700], &[9000]),
            (&[3, 40, 50], &[3, 90, 20]),
            (&[300, 40], &[300, 7]),
        ] {
            for axis in 0..dims.len() {
                let mut small = below.to_vec();
                for d in 0..dims.len() {
                    if d != axis {
                        small[d] = small[d].min(dims[d]);
                    }
                }
                let (xs, is) = (Shape::of(dims), Shape::of(&small));
                let mut b = Build::default();
                let x = strided(&mut b, &mut rng, dtype, dims);
                let index = indices(&mut b, &mut rng, dims[axis], &small);
                let at = |c: &[usize]| {
                    let mut c = c.to_vec();
                    c[axis] = index.elements.get_i64(index_of(&is, &c)) as usize;
                    index_of(&xs, &c)
                };
                let want = collect(dtype, is, |c| x.f(at(c)));
                check(&mut b, "gather", &[axis as i64], &[&x, &index], &want);

                let mut b = same_inputs(&b);
                let src = strided(&mut b, &mut rng, dtype, &small);
                let mut values = x.elements.to_f64();
                for p in 0..is.numel() {
                    values[at(&coords(&is, p))] = src.f(p);
                }
                check(
                    &mut b,
                    "scatter",
                    &[axis as i64],
                    &[&x, &index, &src],
                    &HostTensor::from_f64(dtype, xs, &values),
                );

                if dtype == DType::Bool {
                    continue;
                }
                let b = same_inputs(&b);
                let zero = constant(0.0, dtype, dims);
                for x in [&x, &zero] {
                    let mut values = x.elements.to_f64();
                    for p in 0..is.numel() {
                        let to = &mut values[at(&coords(&is, p))];
                        *to = add(dtype, *to, src.f(p));
                    }
                    let mut b = same_inputs(&b);
                    check(
                        &mut b,
                        "scatter_add",
                        &[axis as i64],
                        &[x, &index, &src],
                        &HostTensor::from_f64(dtype, xs, &values),
                    );
                }
            }
        }
    }
}

/// Adds once in the accumulator type.
fn add(dtype: DType, a: f64, b: f64) -> f64 {
    match dtype {
        DType::F32 | DType::BF16 | DType::F16 => (a as f32 + b as f32) as f64,
        DType::U8 => ((a + b) as i64 as u8) as f64,
        _ => a + b,
    }
}

/// A builder with the inputs of a finished program.
fn same_inputs(b: &Build) -> Build {
    Build { inputs: b.inputs.clone(), values: b.values[..b.inputs.len()].to_vec(), ..Build::default() }
}

#[test]
fn index_select_and_index_add_equal_naive_loops() {
    let mut rng = Rng(12);
    for dtype in DTYPES {
        for (dims, k) in
            [(&[5usize, 3][..], 7usize), (&[50, 768], 300), (&[2, 9, 130], 20), (&[400], 5000), (&[6, 4], 0)]
        {
            for axis in 0..dims.len() {
                let xs = Shape::of(dims);
                let os = xs.with(axis, k);
                let mut b = Build::default();
                let x = strided(&mut b, &mut rng, dtype, dims);
                let index = indices(&mut b, &mut rng, dims[axis], &[k]);
                let at = |c: &[usize]| {
                    let mut c = c.to_vec();
                    c[axis] = index.elements.get_i64(c[axis]) as usize;
                    index_of(&xs, &c)
                };
                let want = collect(dtype, os, |c| x.f(at(c)));
                check(&mut b, "index_select", &[axis as i64], &[&x, &index], &want);

                if dtype == DType::Bool {
                    continue;
                }
                let mut b = same_inputs(&b);
                let src = strided(&mut b, &mut rng, dtype, os.dims());
                let mut values = x.elements.to_f64();
                for p in 0..os.numel() {
                    let to = &mut values[at(&coords(&os, p))];
                    *to = add(dtype, *to, src.f(p));
                }
                check(
                    &mut b,
                    "index_add",
                    &[axis as i64],
                    &[&x, &index, &src],
                    &HostTensor::from_f64(dtype, xs, &values),
                );
            }
        }
    }
}

#[test]
fn indices_are_checked_before_anything_is_written() {
    for bad in [10, -1] {
        for op in ["gather", "scatter", "scatter_add", "index_select", "index_add"] {
            let mut b = Build::default();
            let x =
                view(&mut b, HostTensor::from_f32(Shape::of(&[10]), &[1.0; 10]), Layout::contiguous(Shape::of(&[10])));
            let index =
                view(&mut b, HostTensor::from_i64(Shape::of(&[2]), &[3, bad]), Layout::contiguous(Shape::of(&[2])));
            let src = constant(1.0, DType::F32, &[2]);
            let two = op == "gather" || op == "index_select";
            b.output(Shape::of(&[if two { 2 } else { 10 }]), DType::F32);
            let all = [x.operand, index.operand, src.operand];
            let kernel = b.library(op, &[0], all[..if two { 2 } else { 3 }].to_vec());
            let failure = b.run(&device(2), vec![kernel]).expect_err("must fail");
            assert_eq!(failure.error.op, op);
            assert_eq!(failure.error.message, format!("index {bad} is out of range for dim 0 of size 10"));
        }
    }
}

#[test]
fn argreduce_and_argsort_equal_naive_loops() {
    let mut rng = Rng(13);
    for dtype in DTYPES {
        for dims in [&[7usize, 5][..], &[1000], &[3, 200, 30], &[4, 1]] {
            for axis in 0..dims.len() {
                let xs = Shape::of(dims);
                let n = xs.numel();
                let mut t = rng.tensor(dtype, Shape::of(&[n + 3]));
                if dtype.is_float() {
                    let mut values = t.to_f64();
                    for _ in 0..n / 20 {
                        let (i, j, k) = (rng.below(n), rng.below(n), rng.below(n));
                        values[i] = f64::NAN;
                        values[j] = values[k];
                    }
                    t = HostTensor::from_f64(dtype, t.shape, &values);
                }
                let row = |x: &Given, c: &[usize]| -> Vec<f64> {
                    let mut c = c.to_vec();
                    (0..dims[axis])
                        .map(|i| {
                            c[axis] = i;
                            x.f(index_of(&xs, &c))
                        })
                        .collect()
                };
                let above = |a: f64, b: f64| a.is_nan() && !b.is_nan() || a > b;
                let below = |a: f64, b: f64| !a.is_nan() && b.is_nan() || a < b;
                for max in [1, 0] {
                    let mut b = Build::default();
                    let x = given(&mut b, &mut rng, t.clone(), dims);
                    let want = collect(DType::I64, xs.with(axis, 1), |c| {
                        let row = row(&x, c);
                        let mut best = 0;
                        for i in 1..row.len() {
                            let beats = if max == 1 { row[i] > row[best] } else { row[i] < row[best] };
                            if !row[best].is_nan() && (beats || row[i].is_nan()) {
                                best = i;
                            }
                        }
                        best as f64
                    });
                    check(&mut b, "argreduce", &[axis as i64, max], &[&x], &want);
                    let mut b = Build::default();
                    let x = given(&mut b, &mut rng, t.clone(), dims);
                    let want = collect(DType::I64, xs, |c| {
                        let row = row(&x, c);
                        let mut order: Vec<usize> = (0..row.len()).collect();
                        let before =
                            |i: usize, j: usize| if max == 1 { above(row[i], row[j]) } else { below(row[i], row[j]) };
                        order.sort_by(|&i, &j| before(j, i).cmp(&before(i, j)));
                        order[c[axis]] as f64
                    });
                    check(&mut b, "argsort", &[axis as i64, max], &[&x], &want);
                }
            }
        }
    }
}

#[test]
fn cat_and_strided_pad_equal_naive_loops() {
    let mut rng = Rng(14);
    for dtype in DTYPES {
        for (dims, axis) in
            [(&[4usize, 5][..], 0usize), (&[4, 5], 1), (&[30, 7, 200], 1), (&[30, 7, 200], 2), (&[9], 0)]
        {
            let mut b = Build::default();
            let mut parts = Vec::new();
            for extra in [0usize, 3, 1] {
                let mut dims = dims.to_vec();
                dims[axis] = if extra == 1 { 0 } else { dims[axis] + extra };
                parts.push(strided(&mut b, &mut rng, dtype, &dims));
            }
            let mut last = dims.to_vec();
            last[axis] = 2;
            parts.push(constant(1.0, dtype, &last));
            let total = parts.iter().map(|p| p.elements.shape.dims()[axis]).sum::<usize>();
            let want = collect(dtype, Shape::of(dims).with(axis, total), |c| {
                let mut c = c.to_vec();
                for p in &parts {
                    let n = p.elements.shape.dims()[axis];
                    if c[axis] < n {
                        return p.f(index_of(&p.elements.shape, &c));
                    }
                    c[axis] -= n;
                }
                unreachable!()
            });
            check(&mut b, "cat", &[axis as i64], &parts.iter().collect::<Vec<_>>(), &want);

            for (lo, step) in [(0usize, 1usize), (3, 1), (2, 3)] {
                let n = dims[axis];
                let total = lo + (n - 1) * step + 1 + 4;
                let mut b = Build::default();
                let x = strided(&mut b, &mut rng, dtype, dims);
                let want = collect(dtype, Shape::of(dims).with(axis, total), |c| {
                    let mut c = c.to_vec();
                    let i = c[axis];
                    if i < lo || (i - lo) % step != 0 || (i - lo) / step >= n {
                        return 1.0;
                    }
                    c[axis] = (i - lo) / step;
                    x.f(index_of(&Shape::of(dims), &c))
                });
                let attrs = [axis as i64, lo as i64, step as i64, total as i64, 1f64.to_bits() as i64];
                check(&mut b, "strided_pad", &attrs, &[&x], &want);
            }
        }
    }
}

#[test]
fn col2im_equals_a_naive_loop() {
    let mut rng = Rng(15);
    for dtype in DTYPES.into_iter().filter(|d| *d != DType::Bool) {
        for (outer, inner, total, size, step, dilation) in
            [(1, 1, 9, 3, 1, 1), (3, 4, 20, 3, 2, 1), (2, 5, 30, 4, 1, 3), (40, 10, 50, 5, 5, 1)]
        {
            let n = (total - (dilation * (size - 1) + 1)) / step + 1;
            let dims = [outer, n, inner, size];
            let mut b = Build::default();
            let x = strided(&mut b, &mut rng, dtype, &dims);
            let want = collect(dtype, Shape::of(&[outer, total, inner]), |c| {
                let mut sum = 0.0;
                for w in 0..n {
                    for s in 0..size {
                        if w * step + s * dilation == c[1] {
                            sum = add(dtype, sum, x.f(index_of(&Shape::of(&dims), &[c[0], w, c[2], s])));
                        }
                    }
                }
                sum
            });
            let attrs = [1, size as i64, step as i64, dilation as i64, total as i64];
            check(&mut b, "col2im", &attrs, &[&x], &want);
        }
    }
}

#[test]
fn cumulative_sums_and_products_equal_naive_loops() {
    let mut rng = Rng(16);
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16, DType::I64, DType::I32] {
        for dims in [&[7usize, 5][..], &[1000], &[3, 20, 30], &[2, 0]] {
            for axis in 0..dims.len() {
                for op in ["cumsum", "cumprod"] {
                    let xs = Shape::of(dims);
                    let mut b = Build::default();
                    let n = xs.numel();
                    let t = match dtype.is_int() {
                        true => HostTensor::from_f64(dtype, Shape::of(&[n + 3]), &vec![1.0; n + 3]),
                        false => rng.tensor(dtype, Shape::of(&[n + 3])),
                    };
                    let x = given(&mut b, &mut rng, t, dims);
                    let want = collect(dtype, xs, |c| {
                        let mut total = if op == "cumsum" { 0.0 } else { 1.0 };
                        let mut c = c.to_vec();
                        for i in 0..=c[axis] {
                            c[axis] = i;
                            let v = x.f(index_of(&xs, &c));
                            let next = if op == "cumsum" { total + v } else { total * v };
                            total = if dtype == DType::F64 { next } else { next as f32 as f64 };
                        }
                        total
                    });
                    check(&mut b, op, &[axis as i64], &[&x], &want);
                }
            }
        }
    }
}

/// Products: exact on small whole numbers, close to the f64 result otherwise, and the same bits on every thread count.
#[test]
fn matrix_products_equal_naive_loops() {
    let mut rng = Rng(17);
    let shapes: [(&[usize], usize, usize, usize); 12] = [
        (&[], 3, 4, 5),
        (&[], 1, 70, 33),
        (&[], 90, 1, 40),
        (&[], 64, 64, 0),
        (&[], 130, 70, 257),
        (&[], 300, 200, 400),
        (&[48], 64, 64, 32),
        (&[2, 3], 5, 7, 9),
        (&[3], 200, 150, 130),
        (&[2], 0, 5, 5),
        (&[], 512, 512, 512),
        (&[1], 1, 1, 1),
    ];
    for dtype in DTYPES.into_iter().filter(|d| *d != DType::Bool) {
        for (batch, m, n, k) in shapes {
            if !matches!(dtype, DType::F32 | DType::BF16) && m * n * k > 1 << 22 {
                continue;
            }
            let dims = |p: usize, q: usize| [batch, &[p, q]].concat();
            let mut b = Build::default();
            let x = strided(&mut b, &mut rng, dtype, &dims(m, k));
            let y = strided(&mut b, &mut rng, dtype, &dims(k, n));
            let os = Shape::of(&dims(m, n));
            b.output(os, dtype);
            let kernel = b.library("matmul", &[], vec![x.operand, y.operand]);
            let mut first: Option<HostTensor> = None;
            for threads in [1, 2, 3, 8] {
                let got = b.run(&device(threads), vec![kernel.clone()]).expect("runs").remove(0);
                match &first {
                    None => first = Some(got),
                    Some(w) => same(&got, w, &format!("{dtype} {batch:?} {m}x{n}x{k} on {threads} threads")),
                }
            }
            let got = first.expect("ran");
            for _ in 0..200.min(os.numel()) {
                let p = rng.below(os.numel());
                let c = coords(&os, p);
                let r = c.len();
                let (mut sum, mut size) = (0.0, 0.0);
                for i in 0..k {
                    let (mut cx, mut cy) = (c.clone(), c.clone());
                    cx[r - 1] = i;
                    cy[r - 2] = i;
                    let v = x.f(index_of(&x.elements.shape, &cx)) * y.f(index_of(&y.elements.shape, &cy));
                    sum += v;
                    size += v.abs();
                }
                let g = got.get_f64(p);
                let slack = match dtype {
                    DType::F32 => 1e-6 * size,
                    DType::F64 => 1e-14 * size,
                    DType::BF16 => 0.005 * sum.abs() + 1e-5 * size,
                    DType::F16 => 0.001 * sum.abs() + 1e-4 * size,
                    DType::U8 => {
                        sum = (sum as i64 as u8) as f64;
                        0.0
                    }
                    _ => 0.0,
                };
                assert!((g - sum).abs() <= slack, "{dtype} {batch:?} {m}x{n}x{k}: {g} should be {sum}");
            }
        }
    }
}

#[test]
fn products_with_repeated_operands() {
    let mut rng = Rng(18);
    let mut b = Build::default();
    let x = strided(&mut b, &mut rng, DType::F32, &[4, 6, 5]);
    let t = rng.tensor(DType::F32, Shape::of(&[5]));
    // One column repeated over columns and batch.
    let mut l = Layout::contiguous(Shape::of(&[4, 5, 9]));
    l.strides[..3].copy_from_slice(&[0, 1, 0]);
    let y = view(&mut b, t, l);
    b.output(Shape::of(&[4, 6, 9]), DType::F32);
    let kernel = b.library("matmul", &[], vec![x.operand, y.operand]);
    let got = b.run(&device(2), vec![kernel]).expect("runs").remove(0);
    for p in 0..got.numel() {
        let (r, _) = (p / 9, p % 9);
        let want: f64 = (0..5).map(|i| x.f(r * 5 + i) * y.f((p / 54) * 45 + i * 9)).sum();
        assert!((got.get_f64(p) - want).abs() < 1e-5);
    }
}

/// Few left rows with a right operand contiguous along K use separate loops.
#[test]
fn products_of_few_rows() {
    let mut rng = Rng(19);
    for (m, n, k) in [(2, 64, 64), (8, 300, 517), (15, 70, 100), (16, 1000, 2048)] {
        let mut b = Build::default();
        let x = view(&mut b, rng.tensor(DType::F32, Shape::of(&[m * k])), Layout::contiguous(Shape::of(&[m, k])));
        let mut l = Layout::contiguous(Shape::of(&[k, n]));
        l.strides[..2].copy_from_slice(&[1, k as isize]);
        let y = view(&mut b, rng.tensor(DType::F32, Shape::of(&[k * n])), l);
        b.output(Shape::of(&[m, n]), DType::F32);
        let kernel = b.library("matmul", &[], vec![x.operand, y.operand]);
        let run = |threads| b.run(&device(threads), vec![kernel.clone()]).expect("runs").remove(0);
        let got = run(1);
        for threads in [2, 3, 8] {
            same(&run(threads), &got, &format!("{m}x{n}x{k} on {threads} threads"));
        }
        for p in 0..m * n {
            let terms = (0..k).map(|i| x.f(p / n * k + i) * y.f(i * n + p % n));
            let (want, size) = terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + f64::abs(t)));
            assert!((got.get_f64(p) - want).abs() <= 1e-6 * size, "{m}x{n}x{k}: {} should be {want}", got.get_f64(p));
        }
    }
}
