//! Checks that 16-bit convolutions, products and their gradients round once: the error against f64 is that of correct rounding.
//!
//! The reference sums the products of the exact 16-bit inputs in f64. Errors are root mean squares over a tensor, as a
//! multiple of the error of the reference rounded to the tensor's dtype. Rotary positions are compared with angles in f64.
#![allow(clippy::unwrap_used)]

use perilune_core::graph::NodeId;
use perilune_core::ops::Value;
use perilune_core::{DType, HostTensor, Shape, grad};
use perilune_engine::Engine;
use perilune_tests::harness::{self, call, int, ints, read_all, t};
use perilune_tests::rng::Pcg;

/// Maximum error as a multiple of that of one rounding.
const LIMIT: f64 = 1.05;
const HALVES: [DType; 2] = [DType::BF16, DType::F16];

/// A tensor of random numbers: on the device, and as the exact values of its elements.
struct Random {
    node: NodeId,
    values: Vec<f64>,
}

fn random(e: &mut Engine, rng: &mut Pcg, dtype: DType, dims: &[usize]) -> Random {
    let host = harness::randn(rng, dtype, dims);
    Random { values: host.to_f64(), node: e.from_host(host) }
}

/// The error of `got` as a multiple of that of `want` rounded once to the same dtype.
fn ratio(got: &HostTensor, want: &[f64]) -> f64 {
    assert_eq!(got.numel(), want.len());
    let once = HostTensor::from_f64(got.dtype, got.shape, want);
    let square = |x: &HostTensor| -> f64 { x.to_f64().iter().zip(want).map(|(x, w)| (x - w).powi(2)).sum() };
    let (own, least) = (square(got), square(&once));
    if own == 0.0 { 0.0 } else { (own / least).sqrt() }
}

/// The comparisons that exceed the limit.
#[derive(Default)]
struct Exceeding(Vec<String>);

impl Exceeding {
    /// Compares results with what they should be, by name.
    fn compare(&mut self, what: &str, e: &mut Engine, nodes: &[(&str, NodeId, &[f64])]) {
        let ids: Vec<NodeId> = nodes.iter().map(|n| n.1).collect();
        let got = read_all(e, &ids).unwrap_or_else(|m| panic!("{what}: {m}"));
        let ratios: Vec<(&str, f64)> =
            nodes.iter().zip(&got).map(|((name, _, want), got)| (*name, ratio(got, want))).collect();
        if ratios.iter().any(|r| r.1.is_nan() || r.1 > LIMIT) {
            self.0.push(format!("{what}: errors over that of one rounding are {ratios:?}"));
        }
        e.flush().unwrap();
    }

    fn none(self) {
        assert!(self.0.is_empty(), "{}", self.0.join("\n"));
    }
}

fn gradients(e: &mut Engine, y: NodeId, seed: NodeId, of: &[NodeId]) -> Vec<NodeId> {
    let found = grad::grad(&mut e.recorder.graph, y, seed, of, false).unwrap();
    found.into_iter().map(Option::unwrap).collect()
}

/// A convolution of images x (n, c, ..) with a weight (o, c / groups, ..) to y (n, o, ..); of one row if `flat`.
#[derive(Clone, Copy, Debug)]
struct Conv {
    n: usize,
    c: usize,
    o: usize,
    size: [usize; 2],
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
    groups: usize,
    flat: bool,
}

const PLAIN: Conv = Conv {
    n: 3,
    c: 8,
    o: 16,
    size: [9, 9],
    kernel: [3, 3],
    stride: [1, 1],
    padding: [1, 1],
    dilation: [1, 1],
    groups: 1,
    flat: false,
};

/// Beside a bias, a GPU has a way of its own for each of: channels in multiples of 8, other numbers, groups of many channels,
/// groups of few (`perilune_cuda::conv::Route`).
const CONVOLUTIONS: [Conv; 20] = [
    Conv { c: 16, o: 32, kernel: [1, 1], stride: [2, 1], padding: [0, 0], ..PLAIN },
    Conv { c: 32, o: 32, kernel: [1, 1], padding: [1, 0], groups: 2, ..PLAIN },
    PLAIN,
    Conv { c: 5, o: 7, size: [11, 8], kernel: [3, 2], stride: [2, 1], padding: [1, 0], ..PLAIN },
    Conv { n: 2, c: 6, o: 9, size: [10, 13], groups: 3, dilation: [2, 1], padding: [2, 1], ..PLAIN },
    Conv { n: 5, c: 16, o: 16, groups: 16, ..PLAIN },
    Conv { n: 4, c: 3, o: 24, size: [15, 15], kernel: [7, 7], stride: [2, 2], padding: [3, 3], ..PLAIN },
    Conv { n: 1, c: 64, o: 32, kernel: [1, 1], padding: [0, 0], ..PLAIN },
    Conv { n: 32, c: 4, o: 4, size: [6, 7], dilation: [1, 2], padding: [0, 3], stride: [1, 3], ..PLAIN },
    Conv { c: 8, size: [1, 40], kernel: [1, 5], padding: [0, 2], flat: true, ..PLAIN },
    Conv {
        c: 9,
        o: 6,
        size: [1, 31],
        kernel: [1, 4],
        stride: [1, 2],
        dilation: [1, 3],
        padding: [0, 1],
        groups: 3,
        flat: true,
        ..PLAIN
    },
    // Odd numbers of channels on one side.
    Conv { c: 16, o: 13, ..PLAIN },
    Conv { c: 17, o: 24, size: [8, 10], stride: [2, 1], ..PLAIN },
    // Groups of many channels, in multiples of 8 or not.
    Conv { n: 2, c: 32, o: 64, size: [6, 7], groups: 2, ..PLAIN },
    Conv { n: 2, c: 54, o: 60, size: [7, 6], stride: [1, 2], groups: 3, ..PLAIN },
    // Depthwise: channels in a multiple of 8 or not, and several filters for each.
    Conv { c: 24, o: 24, kernel: [5, 3], stride: [2, 2], padding: [2, 1], groups: 24, ..PLAIN },
    Conv { c: 13, o: 13, dilation: [2, 1], padding: [2, 1], groups: 13, ..PLAIN },
    Conv { c: 8, o: 24, groups: 8, ..PLAIN },
    Conv { c: 32, o: 32, size: [1, 50], kernel: [1, 4], padding: [0, 3], groups: 32, flat: true, ..PLAIN },
    Conv { c: 7, o: 11, size: [1, 33], kernel: [1, 3], padding: [0, 1], flat: true, ..PLAIN },
];

impl Conv {
    fn out(&self) -> [usize; 2] {
        [0, 1].map(|d| {
            let reach = self.dilation[d] * (self.kernel[d] - 1) + 1;
            (self.size[d] + 2 * self.padding[d] - reach) / self.stride[d] + 1
        })
    }

    /// The dims of a tensor without the row of a flat one.
    fn dims(&self, lead: [usize; 2], tail: [usize; 2]) -> Vec<usize> {
        let tail = if self.flat { &tail[1..] } else { &tail[..] };
        lead.iter().chain(tail).copied().collect()
    }

    fn x(&self) -> Vec<usize> {
        self.dims([self.n, self.c], self.size)
    }

    fn w(&self) -> Vec<usize> {
        self.dims([self.o, self.c / self.groups], self.kernel)
    }

    fn y(&self) -> Vec<usize> {
        self.dims([self.n, self.o], self.out())
    }

    /// Calls `f` for each product of the convolution with the positions of its elements in x, the weight and y.
    fn products(&self, mut f: impl FnMut(usize, usize, usize)) {
        let ([h, w], [kh, kw], [oh, ow]) = (self.size, self.kernel, self.out());
        let (cg, og) = (self.c / self.groups, self.o / self.groups);
        let at = |d: usize, out: usize, k: usize| {
            (out * self.stride[d] + k * self.dilation[d]).checked_sub(self.padding[d]).filter(|&i| i < self.size[d])
        };
        for (n, o) in (0..self.n).flat_map(|n| (0..self.o).map(move |o| (n, o))) {
            for (p, q) in (0..oh).flat_map(|p| (0..ow).map(move |q| (p, q))) {
                let y = ((n * self.o + o) * oh + p) * ow + q;
                for (c, i, j) in (0..cg).flat_map(|c| (0..kh).flat_map(move |i| (0..kw).map(move |j| (c, i, j)))) {
                    if let (Some(row), Some(col)) = (at(0, p, i), at(1, q, j)) {
                        let x = ((n * self.c + o / og * cg + c) * h + row) * w + col;
                        f(x, ((o * cg + c) * kh + i) * kw + j, y);
                    }
                }
            }
        }
    }

    /// y = conv(x, w), from the exact values.
    fn forward(&self, x: &[f64], w: &[f64]) -> Vec<f64> {
        let mut y = vec![0.0; self.y().iter().product()];
        self.products(|i, k, o| y[o] += x[i] * w[k]);
        y
    }

    /// The gradient of x, which is a transposed convolution of the gradient of y.
    fn input_gradient(&self, w: &[f64], d: &[f64]) -> Vec<f64> {
        let mut x = vec![0.0; self.x().iter().product()];
        self.products(|i, k, o| x[i] += d[o] * w[k]);
        x
    }

    fn weight_gradient(&self, x: &[f64], d: &[f64]) -> Vec<f64> {
        let mut w = vec![0.0; self.w().iter().product()];
        self.products(|i, k, o| w[k] += d[o] * x[i]);
        w
    }

    /// A list with an entry for each spatial dim of the op.
    fn option(&self, v: [usize; 2]) -> Value {
        let v = v.map(|v| v as i64);
        ints(if self.flat { &v[1..] } else { &v })
    }

    fn options(&self) -> Vec<(&'static str, Value)> {
        vec![
            ("stride", self.option(self.stride)),
            ("padding", self.option(self.padding)),
            ("dilation", self.option(self.dilation)),
            ("groups", int(self.groups as i64)),
        ]
    }
}

/// Adds a number for each channel of (N, C, ...).
fn add_bias(y: &mut [f64], bias: &[f64], batch: usize) {
    let size = y.len() / bias.len() / batch;
    for (k, y) in y.iter_mut().enumerate() {
        *y += bias[k / size % bias.len()];
    }
}

/// Sums the elements of each of `channels` channels.
fn bias_gradient(d: &[f64], channels: usize, batch: usize) -> Vec<f64> {
    let (mut sums, size) = (vec![0.0; channels], d.len() / channels / batch);
    for (k, d) in d.iter().enumerate() {
        sums[k / size % channels] += d;
    }
    sums
}

#[test]
fn convolutions_and_their_gradients_round_once() {
    let (mut e, mut errors) = (harness::engine(2), Exceeding::default());
    for (k, c) in CONVOLUTIONS.iter().enumerate() {
        for (dtype, biased) in HALVES.iter().flat_map(|d| [(*d, false), (*d, true)]) {
            let rng = &mut Pcg::new(k as u64);
            let (x, w) = (random(&mut e, rng, dtype, &c.x()), random(&mut e, rng, dtype, &c.w()));
            let (b, d) = (random(&mut e, rng, dtype, &[c.o]), random(&mut e, rng, dtype, &c.y()));
            let mut inputs = vec![x.node, w.node];
            let mut y = c.forward(&x.values, &w.values);
            if biased {
                inputs.push(b.node);
                add_bias(&mut y, &b.values, c.n);
            }
            let args: Vec<Value> = inputs.iter().map(|x| t(*x)).collect();
            let op = if c.flat { "conv1d" } else { "conv2d" };
            let out = call(&mut e, op, &args, &c.options()).unwrap();
            let found = gradients(&mut e, out, d.node, &inputs);
            let (dx, dw) = (c.input_gradient(&w.values, &d.values), c.weight_gradient(&x.values, &d.values));
            let db = bias_gradient(&d.values, c.o, c.n);
            let mut all =
                vec![("result", out, &y[..]), ("input gradient", found[0], &dx), ("weight gradient", found[1], &dw)];
            all.extend(found.get(2).map(|b| ("bias gradient", *b, &db[..])));
            errors.compare(&format!("{op} in {dtype}, bias {biased}, {c:?}"), &mut e, &all);
        }
    }
    errors.none();
}

#[test]
fn transposed_convolutions_and_their_gradients_round_once() {
    let (mut e, mut errors) = (harness::engine(2), Exceeding::default());
    for (k, c) in CONVOLUTIONS.iter().enumerate() {
        for (dtype, biased) in HALVES.iter().flat_map(|d| [(*d, false), (*d, true)]) {
            // The roles of x and y are exchanged, and the output padding makes the sizes agree.
            let rng = &mut Pcg::new(100 + k as u64);
            let (x, w) = (random(&mut e, rng, dtype, &c.y()), random(&mut e, rng, dtype, &c.w()));
            let (b, d) = (random(&mut e, rng, dtype, &[c.c]), random(&mut e, rng, dtype, &c.x()));
            let extra = [0, 1].map(|i| {
                let least = (c.out()[i] - 1) * c.stride[i] + c.dilation[i] * (c.kernel[i] - 1) + 1;
                c.size[i] + 2 * c.padding[i] - least
            });
            let mut inputs = vec![x.node, w.node];
            let mut y = c.input_gradient(&w.values, &x.values);
            if biased {
                inputs.push(b.node);
                add_bias(&mut y, &b.values, c.n);
            }
            let args: Vec<Value> = inputs.iter().map(|x| t(*x)).collect();
            let op = if c.flat { "conv_transpose1d" } else { "conv_transpose2d" };
            let options = [c.options(), vec![("output_padding", c.option(extra))]].concat();
            let out = call(&mut e, op, &args, &options).unwrap();
            let found = gradients(&mut e, out, d.node, &inputs);
            let (dx, dw) = (c.forward(&d.values, &w.values), c.weight_gradient(&d.values, &x.values));
            let db = bias_gradient(&d.values, c.c, c.n);
            let mut all =
                vec![("result", out, &y[..]), ("input gradient", found[0], &dx), ("weight gradient", found[1], &dw)];
            all.extend(found.get(2).map(|b| ("bias gradient", *b, &db[..])));
            errors.compare(&format!("{op} in {dtype}, bias {biased}, {c:?}"), &mut e, &all);
        }
    }
    errors.none();
}

/// A bias is added before the sum is rounded: 16 * 16 + 1 needs 9 bits, of which bf16 has 8.
#[test]
fn sixteen_times_sixteen_plus_one_minus_256_is_one() {
    let mut e = harness::engine(1);
    let tensor = |e: &mut Engine, dims: &[usize], values: &[f64]| {
        t(e.from_host(HostTensor::from_f64(DType::BF16, Shape::of(dims), values)))
    };
    for (op, x, w) in [
        ("linear", &[1, 2][..], &[1, 2][..]),
        ("conv1d", &[1, 2, 1], &[1, 2, 1]),
        ("conv2d", &[1, 2, 1, 1], &[1, 2, 1, 1]),
        ("conv_transpose1d", &[1, 2, 1], &[2, 1, 1]),
        ("conv_transpose2d", &[1, 2, 1, 1], &[2, 1, 1, 1]),
    ] {
        let args = [tensor(&mut e, x, &[16.0, 1.0]), tensor(&mut e, w, &[16.0, 1.0]), tensor(&mut e, &[1], &[-256.0])];
        let y = call(&mut e, op, &args, &[]).unwrap();
        assert_eq!(read_all(&mut e, &[y]).unwrap()[0].to_f64(), [1.0], "{op}");
        e.flush().unwrap();
    }
}

/// Elements that no position reaches are the bias; an output padding of a stride or more adds such elements.
#[test]
fn output_padding_beyond_the_stride_adds_elements() {
    let mut e = harness::engine(1);
    for dtype in [DType::F32, DType::BF16] {
        let tensor = |e: &mut Engine, dims: &[usize], values: &[f64]| {
            t(e.from_host(HostTensor::from_f64(dtype, Shape::of(dims), values)))
        };
        let args = [
            tensor(&mut e, &[1, 1, 2], &[1.0, 2.0]),
            tensor(&mut e, &[1, 1, 2], &[3.0, 5.0]),
            tensor(&mut e, &[1], &[0.5]),
        ];
        let y = call(&mut e, "conv_transpose1d", &args, &[("dilation", ints(&[4])), ("output_padding", ints(&[3]))])
            .unwrap();
        // Tap 0 at positions 0 and 1, tap 1 four later.
        let want = [3.5, 6.5, 0.5, 0.5, 5.5, 10.5, 0.5, 0.5, 0.5];
        assert_eq!(read_all(&mut e, &[y]).unwrap()[0].to_f64(), want, "{dtype}");
        let args = [tensor(&mut e, &[1, 1, 0], &[]), args[1].clone(), args[2].clone()];
        let y = call(&mut e, "conv_transpose1d", &args, &[("dilation", ints(&[4])), ("output_padding", ints(&[3]))])
            .unwrap();
        assert_eq!(read_all(&mut e, &[y]).unwrap()[0].to_f64(), [0.5; 3], "{dtype}");
        e.flush().unwrap();
    }
}

#[test]
fn products_and_their_gradients_round_once() {
    let (mut e, mut errors) = (harness::engine(2), Exceeding::default());
    for [m, k, n] in [[33, 70, 17], [64, 64, 64], [5, 300, 129], [200, 40, 8]] {
        for (dtype, op) in HALVES.iter().flat_map(|d| [(*d, "matmul"), (*d, "linear"), (*d, "linear with bias")]) {
            let rng = &mut Pcg::named(&[op, dtype.name()]);
            // The weight of `linear` is (out, in).
            let (x, w) = (random(&mut e, rng, dtype, &[m, k]), random(&mut e, rng, dtype, &[n, k]));
            let (b, d) = (random(&mut e, rng, dtype, &[n]), random(&mut e, rng, dtype, &[m, n]));
            let mut inputs = vec![x.node, w.node];
            let out = if op == "matmul" {
                let right = e.recorder.graph.t(w.node).unwrap();
                call(&mut e, op, &[t(x.node), t(right)], &[]).unwrap()
            } else {
                inputs.extend((op != "linear").then_some(b.node));
                let args: Vec<Value> = inputs.iter().map(|x| t(*x)).collect();
                call(&mut e, "linear", &args, &[]).unwrap()
            };
            let found = gradients(&mut e, out, d.node, &inputs);
            let (mut y, mut dx, mut dw, mut db) = (vec![0.0; m * n], vec![0.0; m * k], vec![0.0; n * k], vec![0.0; n]);
            for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                db[j] += d.values[i * n + j];
                for p in 0..k {
                    y[i * n + j] += x.values[i * k + p] * w.values[j * k + p];
                    dx[i * k + p] += d.values[i * n + j] * w.values[j * k + p];
                    dw[j * k + p] += d.values[i * n + j] * x.values[i * k + p];
                }
                y[i * n + j] += if inputs.len() > 2 { b.values[j] } else { 0.0 };
            }
            let mut all =
                vec![("result", out, &y[..]), ("input gradient", found[0], &dx), ("weight gradient", found[1], &dw)];
            all.extend(found.get(2).map(|b| ("bias gradient", *b, &db[..])));
            errors.compare(&format!("{op} ({m}, {k}) x ({k}, {n}) in {dtype}"), &mut e, &all);
        }
    }
    errors.none();
}

#[test]
fn sums_over_separate_dims_round_once() {
    let (mut e, mut errors) = (harness::engine(2), Exceeding::default());
    for dtype in HALVES {
        let x = random(&mut e, &mut Pcg::new(3), dtype, &[40, 30, 50]);
        let y = call(&mut e, "sum", &[t(x.node), ints(&[0, 2])], &[]).unwrap();
        assert_eq!(e.recorder.graph.dtype(y), dtype);
        errors.compare(&format!("sum in {dtype}"), &mut e, &[("sum", y, &bias_gradient(&x.values, 30, 40))]);
    }
    errors.none();
}

/// The rotation of x (T, D) by f64 angles at `positions`, with the pairs (i, i + D/2), or (2i, 2i + 1).
fn rotated(x: &[f64], positions: &[i64], rates: &[f64], interleaved: bool) -> Vec<f64> {
    let (half, mut y) = (rates.len(), x.to_vec());
    for (row, p) in positions.iter().enumerate() {
        for (i, rate) in rates.iter().enumerate() {
            let (a, b) = if interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
            let (a, b) = (row * 2 * half + a, row * 2 * half + b);
            let (sin, cos) = (*p as f64 * rate).sin_cos();
            (y[a], y[b]) = (x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin);
        }
    }
    y
}

/// Maximum error of a rotated pair as a fraction of its length, in f32; the doc of `rope` states it.
const ROPE_ERROR: f64 = 5e-7;

#[test]
fn rope_is_exact_at_every_position() {
    let (mut e, mut errors) = (harness::engine(2), Exceeding::default());
    let mut positions: Vec<i64> =
        vec![0, 1, 7, 4095, 99_999, 100_000, 131_071, 999_999, 1_000_000, (1 << 24) - 1, 1 << 24];
    let mut rng = Pcg::new(11);
    positions.extend((0..200).map(|_| rng.range(0, 1_000_000)));
    let (rows, size) = (positions.len(), 128);
    let at = positions.iter().map(|p| *p as f64).collect::<Vec<_>>();
    for (interleaved, base, given) in
        [(false, 10_000.0, false), (true, 500_000.0, false), (false, 10_000.0, true), (true, 500_000.0, true)]
    {
        let rates: Vec<f64> = (0..size / 2).map(|i| f64::powf(base, -2.0 * i as f64 / size as f64)).collect();
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let x = random(&mut e, &mut rng, dtype, &[rows, size]);
            let p = e.from_host(HostTensor::from_f64(DType::I64, Shape::of(&[rows]), &at));
            let mut options = vec![("base", harness::float(base)), ("interleaved", Value::Bool(interleaved))];
            if given {
                let rates = e.from_host(HostTensor::from_f64(DType::F64, Shape::of(&[size / 2]), &rates));
                options.push(("rates", t(rates)));
            }
            let y = call(&mut e, "rope", &[t(x.node), t(p)], &options).unwrap();
            let want = rotated(&x.values, &positions, &rates, interleaved);
            let what = format!("rope in {dtype}, interleaved {interleaved}, base {base}, rates {given}");
            if dtype != DType::F32 {
                errors.compare(&what, &mut e, &[("result", y, &want)]);
                continue;
            }
            let got = read_all(&mut e, &[y]).unwrap()[0].to_f64();
            e.flush().unwrap();
            for (row, p) in positions.iter().enumerate() {
                for i in 0..size / 2 {
                    let (a, b) = if interleaved { (2 * i, 2 * i + 1) } else { (i, i + size / 2) };
                    let [a, b] = [a, b].map(|k| row * size + k);
                    let error = f64::hypot(got[a] - want[a], got[b] - want[b]) / f64::hypot(want[a], want[b]);
                    assert!(error <= ROPE_ERROR, "{what}: position {p}, pair {i} errs by {error:e}");
                }
            }
        }
    }
    errors.none();
}
