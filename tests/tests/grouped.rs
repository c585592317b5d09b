//! Tests grouped products against one f64 product per group, with gradients; one plan for any routing; errors for bad ends.
#![allow(clippy::unwrap_used)]

use perilune_core::graph::NodeId;
use perilune_core::ops::Value;
use perilune_core::{DType, HostTensor, Shape, grad};
use perilune_engine::Engine;
use perilune_tests::harness::{self, call, t};
use perilune_tests::rng::Pcg;

struct Problem {
    x: HostTensor,
    w: HostTensor,
    seed: HostTensor,
}

fn normal(rng: &mut Pcg, dtype: DType, dims: &[usize]) -> HostTensor {
    let values: Vec<f64> = (0..dims.iter().product()).map(|_| rng.normal()).collect();
    HostTensor::from_f64(dtype, Shape::of(dims), &values)
}

impl Problem {
    fn new(rng: &mut Pcg, dtype: DType, [rows, k, n, groups]: [usize; 4]) -> Problem {
        let (x, w) = (normal(rng, dtype, &[rows, k]), normal(rng, dtype, &[groups, k, n]));
        Problem { x, w, seed: normal(rng, dtype, &[rows, n]) }
    }

    /// Computes the product and its gradients by x and w.
    fn run(&self, e: &mut Engine, ends: &[i64]) -> Vec<HostTensor> {
        let (x, w) = (e.from_host(self.x.clone()), e.from_host(self.w.clone()));
        let ends = e.from_host(HostTensor::from_i64(Shape::of(&[ends.len()]), ends));
        let seed = e.from_host(self.seed.clone());
        let y = call(e, "grouped_matmul", &[t(x), t(w), t(ends)], &[]).unwrap();
        let d = grad::grad(&mut e.recorder.graph, y, seed, &[x, w], false).unwrap();
        let all: Vec<NodeId> = std::iter::once(y).chain(d.into_iter().flatten()).collect();
        let out = harness::read_all(e, &all).unwrap();
        e.flush().unwrap();
        out
    }

    /// Computes the same in f64, with the sums of the terms' magnitudes.
    fn want(&self, ends: &[i64]) -> [Vec<(f64, f64)>; 3] {
        let (rows, k, n) = (self.x.shape.dims()[0], self.x.shape.dims()[1], self.seed.shape.dims()[1]);
        let mut out = [rows * n, rows * k, self.w.numel()].map(|n| vec![(0.0, 0.0); n]);
        let [x, w, d] = [&self.x, &self.w, &self.seed].map(HostTensor::to_f64);
        let mut add = |which: usize, at: usize, v: f64| {
            let (sum, size) = out[which][at];
            out[which][at] = (sum + v, size + v.abs());
        };
        for r in 0..rows {
            let Some(e) = ends.iter().position(|end| *end > r as i64) else { continue };
            for i in 0..k {
                for j in 0..n {
                    let weight = (e * k + i) * n + j;
                    add(0, r * n + j, x[r * k + i] * w[weight]);
                    add(1, r * k + i, d[r * n + j] * w[weight]);
                    add(2, weight, x[r * k + i] * d[r * n + j]);
                }
            }
        }
        out
    }
}

/// Makes ends of random groups, some of them empty, with rows after the last group.
fn routing(rng: &mut Pcg, rows: usize, groups: usize) -> Vec<i64> {
    let mut ends: Vec<i64> = (0..groups).map(|_| rng.below(rows + 1) as i64).collect();
    ends.sort_unstable();
    ends
}

#[test]
fn any_routing_has_one_plan_and_the_products_of_its_groups() {
    let mut rng = Pcg::named(&["grouped"]);
    // Rows of 33 and 70 elements are not multiples of 16 bytes.
    for (dims, dtypes) in [
        ([300, 72, 136, 5], &[DType::BF16, DType::F16, DType::F32][..]),
        ([130, 33, 70, 3], &[DType::BF16, DType::F64]),
        ([40, 16, 8, 70], &[DType::BF16, DType::F32]),
        // Enough for the largest tiles of a GPU, of rows and of the sums over them.
        ([2100, 16, 2056, 4], &[DType::BF16]),
        ([200, 136, 264, 40], &[DType::F16]),
    ] {
        for &dtype in dtypes {
            let p = Problem::new(&mut rng, dtype, dims);
            let mut e = harness::engine(2);
            let [rows, _, _, groups] = dims;
            let mut all = vec![vec![rows as i64; groups], vec![0; groups]];
            all.extend((0..3).map(|_| routing(&mut rng, rows, groups)));
            for ends in all {
                let (got, again) = (p.run(&mut e, &ends), p.run(&mut e, &ends));
                assert!(harness::same_bits(&got, &again), "{dtype} {dims:?} {ends:?}: other bits");
                let eps = match dtype {
                    DType::BF16 => 2f64.powi(-8),
                    DType::F16 => 2f64.powi(-11),
                    _ => 0.0,
                };
                let slack = if dtype == DType::F64 { 1e-14 } else { 2e-6 };
                for (k, (g, w)) in got.iter().zip(p.want(&ends)).enumerate() {
                    assert_eq!((g.dtype, g.numel()), (dtype, w.len()));
                    for (i, (want, size)) in w.into_iter().enumerate() {
                        let off = (g.get_f64(i) - want).abs();
                        // The smallest f16 numbers are 2^-24 apart.
                        let tiny = if dtype == DType::F16 { 2f64.powi(-24) } else { 0.0 };
                        let room = eps * want.abs() + slack * size + tiny;
                        assert!(
                            off <= room,
                            "{dtype} {dims:?} {ends:?}: {k}, element {i}: {} for {want}",
                            g.get_f64(i)
                        );
                    }
                }
            }
            assert_eq!(e.stats().misses, 1, "{dtype} {dims:?}");
        }
    }
}

/// Bad ends are reported like any bad index: the step fails with the cause and the recipe's line.
#[test]
fn bad_ends_name_themselves() {
    for (ends, words) in [
        ([3, 11], "is 11, but there are 10 rows"),
        ([-1, 4], "is -1, but there are 10 rows"),
        ([7, 4], "is 4, less than the one before it"),
    ] {
        for (dtype, columns) in [(DType::BF16, 8), (DType::F32, 8), (DType::F32, 0)] {
            let mut e = harness::engine(1);
            let file = e.recorder.source_map.file("recipe.lua");
            let x = e.from_host(HostTensor::from_f64(dtype, Shape::of(&[10, 8]), &[1.0; 80]));
            let w = HostTensor::from_f64(dtype, Shape::of(&[2, 8, columns]), &vec![1.0; 16 * columns]);
            let w = e.from_host(w);
            let ends = e.from_host(HostTensor::from_i64(Shape::of(&[2]), &ends));
            e.recorder.graph.modes.loc = e.recorder.source_map.intern(file, 12);
            let y = call(&mut e, "grouped_matmul", &[t(x), t(w), t(ends)], &[]).unwrap();
            let fault = e.evaluate(&[y]).expect_err("bad ends");
            let text = fault.error.to_string();
            assert!(text.contains("grouped_matmul") && text.contains(words), "{text}");
            assert_eq!(fault.loc.map(|s| e.recorder.source_map.show(s)).as_deref(), Some("recipe.lua:12"));
        }
    }
}

#[test]
fn autocast_and_promotion_are_those_of_matmul() {
    let mut e = harness::engine(1);
    let mut rng = Pcg::named(&["grouped dtypes"]);
    let ends = HostTensor::from_i64(Shape::of(&[2]), &[3, 5]);
    let of = |e: &mut Engine, x: DType, w: DType, rng: &mut Pcg| {
        let (a, b) = (normal(rng, x, &[5, 4]), normal(rng, w, &[2, 4, 3]));
        let (a, b, ends) = (e.from_host(a), e.from_host(b), e.from_host(ends.clone()));
        let y = call(e, "grouped_matmul", &[t(a), t(b), t(ends)], &[]).unwrap();
        e.recorder.graph.dtype(y)
    };
    for (x, w) in [(DType::F32, DType::BF16), (DType::F16, DType::BF16), (DType::F64, DType::F32)] {
        assert_eq!(of(&mut e, x, w, &mut rng), DType::promote(x, w));
    }
    e.recorder.graph.modes.autocast = Some(DType::BF16);
    assert_eq!(of(&mut e, DType::F32, DType::F32, &mut rng), DType::BF16);
    assert_eq!(of(&mut e, DType::F64, DType::F64, &mut rng), DType::F64);
    e.recorder.graph.modes.autocast = None;
    let int = e.from_host(HostTensor::from_i64(Shape::of(&[2]), &[1, 2]));
    let (a, b) = (normal(&mut rng, DType::F32, &[5, 4]), normal(&mut rng, DType::F32, &[3, 4, 3]));
    let (a, b) = (e.from_host(a), e.from_host(b));
    let text = call(&mut e, "grouped_matmul", &[t(a), t(b), t(int)], &[]).unwrap_err();
    assert!(text.contains("3 matrices") && text.contains("2 groups"), "{text}");
    let text = call(&mut e, "grouped_matmul", &[t(a), t(b), Value::Tensor(a)], &[]).unwrap_err();
    assert!(text.contains("indices must be integers"), "{text}");
}
