//! Checks that grouped products have the same bits as one product per group on any number of threads, and reject
//! invalid group end offsets.

mod common;

use common::{Build, Rng, device, same};
use perilune_core::{DType, HostTensor, Layout, MAX_RANK, Shape};
use perilune_plan::ir::*;

const THREADS: [usize; 4] = [1, 2, 3, 8];

/// A layout of two dims: row-major or transposed, starting at element 3.
fn lying(dims: &[usize], turned: bool) -> Layout {
    let mut l = Layout { offset: 3, ..Layout::contiguous(Shape::of(dims)) };
    if turned {
        let r = dims.len();
        l.strides[r - 2] = 1;
        l.strides[r - 1] = dims[r - 2] as isize;
    }
    l
}

/// Rows `from` to `to` of dim `dim`.
fn part(l: &Layout, dim: usize, from: usize, to: usize) -> Layout {
    let mut out = Layout { offset: l.offset + from as isize * l.strides[dim], ..*l };
    out.shape = l.shape.with(dim, to - from);
    out
}

fn matrix(l: &Layout, e: usize) -> Layout {
    let mut out = Layout { offset: l.offset + e as isize * l.strides[0], strides: [0; MAX_RANK], shape: Shape::SCALAR };
    out.shape = Shape::of(&l.shape.dims()[1..]);
    out.strides[..2].copy_from_slice(&l.strides[1..3]);
    out
}

fn run(
    op: &str,
    operands: &[(&HostTensor, Layout)],
    out: &[usize],
    threads: usize,
) -> Result<HostTensor, perilune_core::Error> {
    let mut b = Build::default();
    let given = operands.iter().map(|(t, l)| Operand::View(b.input((*t).clone()), *l)).collect();
    b.output(Shape::of(out), operands[0].0.dtype);
    let kernel = b.library(op, &[], given);
    b.run(&device(threads), vec![kernel]).map(|mut out| out.remove(0)).map_err(|f| f.error)
}

fn ends(values: &[i64]) -> HostTensor {
    HostTensor::from_i64(Shape::of(&[values.len()]), values)
}

/// Concatenates results.
fn joined(dtype: DType, dims: &[usize], parts: &[HostTensor]) -> HostTensor {
    let mut bytes: Vec<u8> = parts.iter().flat_map(|p| p.bytes.iter().copied()).collect();
    let shape = Shape::of(dims);
    bytes.resize(shape.numel() * dtype.size(), 0);
    HostTensor::new(dtype, shape, bytes)
}

#[test]
fn grouped_products_equal_separate_products() {
    let mut rng = Rng(23);
    let shapes: [(usize, usize, usize, &[i64]); 7] = [
        (7, 3, 4, &[2, 2, 6]),
        (300, 72, 136, &[0, 130, 131, 290]),
        (520, 64, 96, &[500, 505, 510, 515, 520]),
        (90, 20, 16, &[1; 40]),
        (4, 0, 5, &[1, 4]),
        (3, 4, 5, &[]),
        (0, 4, 5, &[0, 0]),
    ];
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16, DType::I64, DType::U8] {
        for (rows, k, n, at) in shapes {
            for turned in [false, true] {
                let e = at.len();
                let (lx, lw) = (lying(&[rows, k], turned), lying(&[e, k, n], turned));
                let (ly, end) = (lying(&[rows, n], !turned), ends(at));
                let le = Layout::contiguous(end.shape);
                let mut data = |n: usize| rng.tensor(dtype, Shape::of(&[n + 3]));
                let (x, w, y) = (data(rows * k), data(e * k * n), data(rows * n));
                let (mut products, mut sums, mut start) = (Vec::new(), Vec::new(), 0);
                for (g, &stop) in at.iter().enumerate() {
                    let (from, to) = (start, stop as usize);
                    start = to;
                    let (rx, ry) = (part(&lx, 0, from, to), part(&ly, 0, from, to));
                    products.push(run("matmul", &[(&x, rx), (&w, matrix(&lw, g))], &[to - from, n], 1).expect("runs"));
                    sums.push(run("matmul", &[(&x, rx.permute(&[1, 0])), (&y, ry)], &[k, n], 1).expect("runs"));
                }
                let (products, sums) = (joined(dtype, &[rows, n], &products), joined(dtype, &[e, k, n], &sums));
                for threads in THREADS {
                    let what = format!("{dtype} {rows} {k} {n} {at:?}, turned {turned}, {threads} threads");
                    let got = run("grouped_matmul", &[(&x, lx), (&w, lw), (&end, le)], &[rows, n], threads);
                    same(&got.expect("runs"), &products, &what);
                    let got = run("grouped_sums", &[(&x, lx), (&y, ly), (&end, le)], &[e, k, n], threads);
                    same(&got.expect("runs"), &sums, &format!("sums of {what}"));
                }
            }
        }
    }
}

#[test]
fn ends_out_of_order_are_refused() {
    let mut rng = Rng(29);
    let (x, w) = (rng.tensor(DType::F32, Shape::of(&[10, 3])), rng.tensor(DType::F32, Shape::of(&[2, 3, 4])));
    for (at, words) in [
        ([3, 11], "ends[1] is 11, but there are 10 rows"),
        ([-1, 4], "ends[0] is -1, but there are 10 rows"),
        ([7, 4], "ends[1] is 4, less than the one before it"),
    ] {
        let end = ends(&at);
        let all = |t: &HostTensor| Layout::contiguous(t.shape);
        let got = run("grouped_matmul", &[(&x, all(&x)), (&w, all(&w)), (&end, all(&end))], &[10, 4], 2);
        let text = got.expect_err("bad ends").to_string();
        assert!(text.contains("grouped_matmul") && text.contains(words), "{text}");
        let got = run("grouped_sums", &[(&x, all(&x)), (&x, all(&x)), (&end, all(&end))], &[2, 3, 3], 2);
        assert!(got.expect_err("bad ends").to_string().contains(words));
    }
}
