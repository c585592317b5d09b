//! Checks that the bits of a product are a function of shape and dtype alone: not of strides, nor of the thread count.

mod common;
#[path = "../../../tests/src/skip.rs"]
mod skip;

use common::{Build, Rng, device, same};
use perilune_core::{DType, HostTensor, Layout, MAX_RANK, Shape};
use perilune_plan::ir::*;

/// The layout of a matrix in memory.
#[derive(Clone, Copy, Debug)]
enum Lie {
    Dense,
    Transposed,
    /// One row repeated for all rows, or one column for all columns.
    RowExpanded,
    ColExpanded,
    /// Every second row and third column, starting at an offset.
    Sliced,
    RowsBackwards,
    ColsBackwards,
    AllBackwards,
}

use Lie::*;
const ALL: [Lie; 8] = [Dense, Transposed, RowExpanded, ColExpanded, Sliced, RowsBackwards, ColsBackwards, AllBackwards];

/// A layout of `rows` x `cols` and how many elements of memory it needs.
fn layout(lie: Lie, rows: usize, cols: usize) -> (Layout, usize) {
    let (r, c) = (rows as isize, cols as isize);
    let (strides, offset, len) = match lie {
        Dense => ([c, 1], 0, r * c),
        Transposed => ([1, r], 0, r * c),
        RowExpanded => ([0, 1], 1, c + 1),
        ColExpanded => ([1, 0], 1, r + 1),
        Sliced => ([2 * (3 * c + 1), 3], 5, 2 * r * (3 * c + 1) + 5),
        RowsBackwards => ([-c, 1], (r - 1) * c, r * c),
        ColsBackwards => ([c, -1], c - 1, r * c),
        AllBackwards => ([-1, -r], r * c - 1, r * c),
    };
    let mut l = Layout { shape: Shape::of(&[rows, cols]), strides: [0; MAX_RANK], offset };
    l.strides[..2].copy_from_slice(&strides);
    (l, len as usize)
}

/// The elements of the view, copied to contiguous memory.
fn contiguous(t: &HostTensor, l: &Layout) -> HostTensor {
    let size = t.dtype.size();
    let mut bytes = Vec::with_capacity(l.numel() * size);
    for i in 0..l.shape.dims()[0] as isize {
        for j in 0..l.shape.dims()[1] as isize {
            let at = (l.offset + i * l.strides[0] + j * l.strides[1]) as usize;
            bytes.extend_from_slice(&t.bytes[at * size..(at + 1) * size]);
        }
    }
    HostTensor::new(t.dtype, l.shape, bytes)
}

fn product(a: (&HostTensor, Layout), b: (&HostTensor, Layout), threads: usize) -> HostTensor {
    let mut build = Build::default();
    let (x, y) = (build.input(a.0.clone()), build.input(b.0.clone()));
    let shape = Shape::of(&[a.1.shape.dims()[0], b.1.shape.dims()[1]]);
    build.output(shape, a.0.dtype);
    let kernel = build.library("matmul", &[], vec![Operand::View(x, a.1), Operand::View(y, b.1)]);
    build.run(&device(threads), vec![kernel]).expect("runs").remove(0)
}

fn check(rng: &mut Rng, dtype: DType, (m, n, k): (usize, usize, usize), lies: (Lie, Lie)) {
    let ((la, na), (lb, nb)) = (layout(lies.0, m, k), layout(lies.1, k, n));
    let (a, b) = (rng.tensor(dtype, Shape::of(&[na])), rng.tensor(dtype, Shape::of(&[nb])));
    let (da, db) = (contiguous(&a, &la), contiguous(&b, &lb));
    let want = product((&da, Layout::contiguous(da.shape)), (&db, Layout::contiguous(db.shape)), 1);
    for threads in [1, 2, 3] {
        let got = product((&a, la), (&b, lb), threads);
        same(&got, &want, &format!("{dtype} {m}x{n}x{k}, {lies:?}, {threads} threads"));
    }
}

fn sweep(dtype: DType) {
    const SIZES: [usize; 6] = [1, 2, 5, 16, 17, 64];
    let mut rng = Rng(dtype as u64 + 1);
    for m in SIZES {
        for n in SIZES {
            for k in [1, 7, 130, 1024] {
                // Every layout of either side at every size, and every pair at some sizes.
                for (i, &lie) in ALL.iter().enumerate() {
                    let other = ALL[(i + m + n + k) % ALL.len()];
                    check(&mut rng, dtype, (m, n, k), (lie, Dense));
                    check(&mut rng, dtype, (m, n, k), (lie, other));
                }
            }
        }
    }
}

#[test]
fn f32_products_do_not_depend_on_layout() {
    sweep(DType::F32);
}

#[test]
fn f64_products_do_not_depend_on_layout() {
    sweep(DType::F64);
}

#[test]
fn bf16_products_do_not_depend_on_layout() {
    sweep(DType::BF16);
}

#[test]
fn f16_products_do_not_depend_on_layout() {
    sweep(DType::F16);
}

#[test]
fn i64_products_do_not_depend_on_layout() {
    sweep(DType::I64);
}

/// Sizes beyond one chunk of K, one block of columns, and one block of the `gemm` crates.
#[test]
fn long_products_do_not_depend_on_layout() {
    let mut rng = Rng(9);
    for dtype in [DType::F32, DType::F64] {
        for size in [(1, 1, 20_000), (1, 300, 8_200), (300, 1, 9_000), (5, 130, 8_193), (16, 300, 700), (70, 65, 1_100)]
        {
            for (i, &lie) in ALL.iter().enumerate() {
                check(&mut rng, dtype, size, (lie, ALL[(i + 3) % ALL.len()]));
            }
        }
    }
}

/// A left operand with a row stride that is a multiple of 1024 elements is packed first, in one or several parts.
#[test]
fn packed_products_do_not_depend_on_layout() {
    let mut rng = Rng(11);
    for (i, &lie) in ALL.iter().enumerate() {
        let other = ALL[(i + 3) % ALL.len()];
        check(&mut rng, DType::F32, (101, 290, 1024), (lie, other));
        check(&mut rng, DType::F32, (1024, 257, 270), (lie, other));
    }
    check(&mut rng, DType::F32, (290, 256, 16_384), (Sliced, Dense));
}

/// Split tasks reuse the packed right operand, also if blocks of columns with different widths share memory.
#[test]
fn parts_of_a_task_share_the_packed_operand() {
    let mut rng = Rng(13);
    for (i, &lie) in ALL.iter().enumerate() {
        check(&mut rng, DType::F32, (600, 100, 300), (ALL[(i + 3) % ALL.len()], lie));
    }
}

/// Compares batches with one matrix at a time: batches of few matrices are partitioned, batches of many are one task
/// each.
#[test]
fn batches_are_products_one_by_one() {
    let mut rng = Rng(5);
    for (batch, m, n, k) in [(2, 150, 90, 260), (3, 40, 210, 64), (48, 64, 32, 64), (61, 20, 33, 17)] {
        let a = rng.tensor(DType::F32, Shape::of(&[batch, m, k]));
        let b = rng.tensor(DType::F32, Shape::of(&[batch, n, k]));
        let part = |t: &HostTensor, rows: usize, i: usize| {
            let nbytes = rows * k * 4;
            HostTensor::new(DType::F32, Shape::of(&[rows, k]), t.bytes[i * nbytes..(i + 1) * nbytes].to_vec())
        };
        let mut want = Vec::new();
        for i in 0..batch {
            let (x, y) = (part(&a, m, i), part(&b, n, i));
            let flip = Layout::contiguous(y.shape).permute(&[1, 0]);
            want.extend(product((&x, Layout::contiguous(x.shape)), (&y, flip), 1).bytes);
        }
        for threads in [1, 2, 3] {
            let mut build = Build::default();
            let (x, y) = (build.input(a.clone()), build.input(b.clone()));
            build.output(Shape::of(&[batch, m, n]), DType::F32);
            let (x, y) = (
                Operand::View(x, Layout::contiguous(a.shape)),
                Operand::View(y, Layout::contiguous(b.shape).permute(&[0, 2, 1])),
            );
            let kernel = build.library("matmul", &[], vec![x, y]);
            let got = build.run(&device(threads), vec![kernel]).expect("runs").remove(0);
            assert!(got.bytes == want, "{batch} x {m}x{n}x{k}, {threads} threads");
        }
    }
}

/// The documented order of skinny products: lanes, a halving tree, chunks in f64.
#[test]
fn skinny_products_add_in_the_stated_order() {
    let mut rng = Rng(3);
    for (m, n, k) in [(1, 9, 40), (1, 1, 20_011), (3, 70, 130), (2, 100, 9_000)] {
        let a = rng.tensor(DType::F32, Shape::of(&[m, k]));
        let b = rng.tensor(DType::F32, Shape::of(&[k, n]));
        let got = product((&a, Layout::contiguous(a.shape)), (&b, Layout::contiguous(b.shape)), 2);
        for i in 0..m {
            for j in 0..n {
                let mut total = 0f64;
                for lo in (0..k).step_by(8192) {
                    let mut lanes = [0f32; 16];
                    for p in lo..k.min(lo + 8192) {
                        lanes[(p - lo) % 16] += (a.get_f64(i * k + p) as f32) * (b.get_f64(p * n + j) as f32);
                    }
                    for width in [8, 4, 2, 1] {
                        for l in 0..width {
                            lanes[l] += lanes[l + width];
                        }
                    }
                    total += f64::from(lanes[0]);
                }
                assert_eq!(got.get_f64(i * n + j), f64::from(total as f32), "{m}x{n}x{k} at {i}, {j}");
            }
        }
    }
}

/// The documented order of all other f32 products: chunks of K of about equal length, each a chain of fused multiply-adds.
#[cfg(target_arch = "x86_64")]
#[test]
fn dense_products_add_in_the_stated_order() {
    if perilune_cpu::Isa::chosen() == Ok(perilune_cpu::Isa::Baseline) {
        return skip::skipped("the instruction set is sse2, where `gemm` has its own order");
    }
    let mut rng = Rng(4);
    for (m, n, k, chunk) in
        [(17, 33, 40, 48), (64, 70, 256, 256), (130, 35, 257, 144), (70, 129, 768, 256), (20, 300, 1000, 256)]
    {
        let a = rng.tensor(DType::F32, Shape::of(&[m, k]));
        let b = rng.tensor(DType::F32, Shape::of(&[k, n]));
        for threads in [1, 2, 7] {
            let got = product((&a, Layout::contiguous(a.shape)), (&b, Layout::contiguous(b.shape)), threads);
            for i in 0..m {
                for j in 0..n {
                    let mut total = None;
                    for lo in (0..k).step_by(chunk) {
                        let sum = (lo..k.min(lo + chunk)).fold(0f32, |sum, p| {
                            (a.get_f64(i * k + p) as f32).mul_add(b.get_f64(p * n + j) as f32, sum)
                        });
                        total = Some(total.map_or(sum, |t: f32| t + sum));
                    }
                    let want = f64::from(total.unwrap_or(0.0));
                    assert_eq!(got.get_f64(i * n + j), want, "{m}x{n}x{k} at {i}, {j}, {threads} threads");
                }
            }
        }
    }
}
