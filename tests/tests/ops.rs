//! Compares every op of the registry with PyTorch's results, in every dtype and layout, fused and unfused.
#![allow(clippy::unwrap_used)]

use perilune_core::graph::NodeId;
use perilune_core::ops::{self, Op, Value};
use perilune_core::{DType, HostTensor, Shape};
use perilune_engine::Engine;
use perilune_tests::case::{self, Arg, Case, Data, Variant};
use perilune_tests::harness::{self, Layout, Outcome};
use perilune_tests::reference::{self, Known, Reference};

/// Selects part k of n of the ops by `PERILUNE_SHARE=k/n` (k from 0), for several processes in parallel on a GPU, where one process
/// spends a quarter of an hour of CPU time on compilation.
fn share() -> (usize, usize) {
    let Ok(text) = std::env::var("PERILUNE_SHARE") else { return (0, 1) };
    let share = text.split_once('/').and_then(|(k, n)| Some((k.parse().ok()?, n.parse().ok()?)));
    share.filter(|(k, n)| k < n).unwrap_or_else(|| panic!("PERILUNE_SHARE is {text}; it must be k/n, as in 0/4"))
}

/// Asserts that a sweep over all ops made at least that many checks.
fn enough(n: usize, want: usize) {
    if share().1 == 1 {
        harness::assert_swept(n, want);
    }
}

/// Runs `f` over the ops, one per core at a time, and fails with all differences found.
fn over(ops: &[&'static Op], f: impl Fn(&mut Engine, &'static Op, &mut Vec<String>) -> usize + Sync) -> usize {
    let (k, n) = share();
    let ops: Vec<_> = ops.iter().copied().skip(k).step_by(n).collect();
    let (next, found) = (std::sync::atomic::AtomicUsize::new(0), std::sync::Mutex::new((Vec::new(), 0)));
    std::thread::scope(|s| {
        for _ in 0..std::thread::available_parallelism().map_or(2, |c| c.get().min(16).div_ceil(n)) {
            s.spawn(|| {
                let mut e = harness::engine(1);
                loop {
                    let k = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    let Some(op) = ops.get(k) else { break };
                    let mut faults = Vec::new();
                    let n = f(&mut e, op, &mut faults);
                    let mut all = found.lock().unwrap();
                    all.0.extend(faults);
                    all.1 += n;
                }
            });
        }
    });
    let (faults, n) = found.into_inner().unwrap();
    assert!(
        faults.is_empty(),
        "{} of {n} checks failed:\n{}",
        faults.len(),
        faults[..faults.len().min(400)].join("\n")
    );
    n
}

/// Returns the case in each dtype that its reference supports.
fn in_dtypes(case: &Case) -> Vec<(DType, Case)> {
    match case.variant {
        Variant::Full => vec![(DType::F64, case.clone())],
        Variant::Grid => [DType::F32, DType::BF16, DType::F16].iter().map(|d| (*d, case.floats_as(*d))).collect(),
        Variant::As(d) => vec![(d, case.clone())],
    }
}

/// Returns whether Perilune differs from PyTorch on purpose.
fn differs_on_purpose(case: &Case) -> Option<&'static str> {
    let name = case.op.name;
    let bools = case.tensors().filter(|t| t.kind.is_float()).all(|t| t.dtype == DType::Bool);
    match name {
        "sign" | "matmul" | "mm" | "bmm" | "grouped_matmul" | "linear" | "outer" | "dot" | "einsum" | "scatter_add"
        | "index_add"
            if bools =>
        {
            Some("arithmetic on bools is arithmetic on i64")
        }
        "pow" if !case.tensors().any(|t| t.dtype.is_float()) => {
            Some("an integer to a negative power is 0, not an error")
        }
        _ => None,
    }
}

fn check_values(r: &Reference, case: &Case, dtype: DType, got: &[HostTensor]) -> Result<(), String> {
    let (want, exact) = match r.get(case) {
        Known::Exact(w) => (w, true),
        Known::Values(w) => (w, false),
        Known::Refused => return Ok(()),
        Known::Nothing => return Err("no reference; see golden/ops/make.py".into()),
    };
    if got.len() != want.len() {
        return Err(format!("{} outputs instead of {}", got.len(), want.len()));
    }
    let own = differs_on_purpose(case);
    if exact && own.is_none() {
        let dtypes = match case.variant {
            Variant::Grid => r.dtypes(case, dtype),
            _ => Some(want.iter().map(|w| w.dtype).collect()),
        };
        for (g, d) in got.iter().zip(dtypes.unwrap_or_default()) {
            if g.dtype != d {
                return Err(format!("result is {} instead of {d}", g.dtype));
            }
        }
    }
    for (k, (g, w)) in got.iter().zip(&want).enumerate() {
        let computed = if g.dtype.is_float() { g.dtype } else { DType::F64 };
        if own.is_some() && g.dtype != w.dtype {
            continue;
        }
        let mut room = reference::tolerance(case.op, computed);
        // Tensor cores keep 14 bits or so of a sum of products of 8-bit numbers (DeepSeek-V3 Technical Report, 2024, 3.5.2).
        if case.op.name == "matmul_fp8" && harness::on_gpu() {
            room.scaled = room.scaled.max(2f64.powi(-11) / f64::from(f32::EPSILON));
        }
        reference::compare(g, w, room).map_err(|m| format!("output {k}: {m}"))?;
    }
    Ok(())
}

#[test]
fn values_match_pytorch_in_every_dtype() {
    let r = Reference::read();
    let n = over(&harness::callable_ops(), |e, op, faults| {
        let mut n = 0;
        if case::is_random(op) {
            return 0;
        }
        for base in case::cases(op) {
            let mut runs = in_dtypes(&base);
            if base.variant == Variant::Full && base.has_ints() {
                runs.push((DType::F64, base.ints_as(DType::I32)));
            }
            for (dtype, c) in runs {
                n += 1;
                match harness::run(e, &c, Layout::Contiguous) {
                    Outcome::Values(got) => {
                        if let Err(m) = check_values(&r, &c, dtype, &got) {
                            faults.push(format!("{} in {dtype}: {m}", c.key));
                        }
                    }
                    Outcome::Refused(text) => {
                        if dtype.is_float() {
                            faults.push(format!("{} in {dtype} is refused: {text}", c.key));
                        } else if matches!(r.get(&c), Known::Exact(_)) {
                            faults.push(format!("{} in {dtype} is refused, PyTorch takes it: {text}", c.key));
                        }
                    }
                    Outcome::Panicked(text) => faults.push(format!("{} in {dtype} panics: {text}", c.key)),
                }
            }
        }
        n
    });
    enough(n, 4000);
}

#[test]
fn promotion_is_that_of_pytorch() {
    let r = Reference::read();
    let mut e = harness::engine(1);
    let mut faults = Vec::new();
    for c in case::promotion_cases() {
        match harness::run(&mut e, &c, Layout::Contiguous) {
            Outcome::Values(got) => {
                if let Err(m) = check_values(&r, &c, DType::F64, &got) {
                    faults.push(format!("{}: {m}", c.key));
                }
            }
            other => faults.push(format!("{}: {other:?}", c.key)),
        }
    }
    assert!(faults.is_empty(), "{} failed:\n{}", faults.len(), faults.join("\n"));
}

/// Checks ranges, moments and dtypes of the random ops, to five standard errors.
#[test]
fn random_numbers_are_distributed_as_promised() {
    let mut e = harness::engine(1);
    let n = 40_000;
    let dims = [harness::ints(&[n as i64])];
    // Name, arguments before or after the shape, dtype, bounds, mean, variance.
    let after = |v: &[Value]| [&dims[..], v].concat();
    let before = |v: &[Value]| [v, &dims[..]].concat();
    let (f, i) = (harness::float, harness::int);
    let inf = f64::INFINITY;
    let cases = [
        ("rand", after(&[]), "f32", 0.0, 1.0, 0.5, 1.0 / 12.0),
        ("rand", after(&[]), "f64", 0.0, 1.0, 0.5, 1.0 / 12.0),
        ("rand", after(&[]), "bf16", 0.0, 1.0, 0.5, 1.0 / 12.0),
        ("rand", after(&[]), "f16", 0.0, 1.0, 0.5, 1.0 / 12.0),
        ("uniform", after(&[f(-2.0), f(4.0)]), "f32", -2.0, 4.0, 1.0, 3.0),
        ("randn", after(&[]), "f32", -inf, inf, 0.0, 1.0),
        ("randn", after(&[]), "f64", -inf, inf, 0.0, 1.0),
        ("randn", after(&[]), "f16", -inf, inf, 0.0, 1.0),
        ("randint", before(&[i(-5), i(5)]), "i64", -5.0, 5.0, -0.5, 99.0 / 12.0),
        ("randint", before(&[i(0), i(1_000_000)]), "i32", 0.0, 1e6, 499_999.5, 1e12 / 12.0),
        ("bernoulli", before(&[f(0.3)]), "f32", 0.0, 1.5, 0.3, 0.21),
        ("bernoulli", before(&[f(0.3)]), "bool", 0.0, 1.5, 0.3, 0.21),
    ];
    for (name, args, dtype, low, high, mean, variance) in cases {
        e.recorder.seed(99);
        let dtype = DType::parse(dtype).unwrap();
        let x = harness::call(&mut e, name, &args, &[("dtype", Value::DType(dtype))]).unwrap();
        let y = e.read_node(x).unwrap();
        e.flush().unwrap();
        assert_eq!((y.dtype, y.numel()), (dtype, n), "{name}");
        let values = y.to_f64();
        assert!(values.iter().all(|v| *v >= low && *v < high), "{name} {dtype} leaves its range");
        let got = values.iter().sum::<f64>() / n as f64;
        // Rounding down to 8 bits shifts the mean of bf16 by half a step.
        let room = 5.0 * f64::sqrt(variance / n as f64) + if dtype == DType::BF16 { 0.002 } else { 0.0 };
        assert!((got - mean).abs() < room, "{name} {dtype}: mean {got} instead of {mean}");
        let spread = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n as f64;
        assert!((spread / variance - 1.0).abs() < 0.04, "{name} {dtype}: variance {spread} instead of {variance}");
        // Neighbours are uncorrelated.
        let pairs = values.windows(2).map(|w| (w[0] - mean) * (w[1] - mean)).sum::<f64>() / n as f64 / variance;
        assert!(pairs.abs() < 5.0 / (n as f64).sqrt(), "{name} {dtype}: neighbours correlate by {pairs}");
    }
}

#[test]
fn floats_end_as_in_pytorch() {
    let r = Reference::read();
    let mut e = harness::engine(1);
    let mut faults = Vec::new();
    for c in case::special_cases() {
        match harness::run(&mut e, &c, Layout::Contiguous) {
            Outcome::Values(got) => {
                if let Err(m) = check_values(&r, &c, DType::F64, &got) {
                    faults.push(format!("{}: {m}", c.key));
                }
            }
            other => faults.push(format!("{}: {other:?}", c.key)),
        }
    }
    assert!(faults.is_empty(), "{} failed:\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn layouts_and_fusion_change_no_bit() {
    let n = over(&harness::callable_ops(), |e, op, faults| {
        let mut n = 0;
        for base in case::cases(op) {
            for (dtype, c) in in_dtypes(&base) {
                e.switches.fusion = true;
                let first = harness::run(e, &c, Layout::Contiguous);
                for layout in Layout::ALL {
                    e.switches.fusion = true;
                    let fused = harness::run(e, &c, layout);
                    e.switches.fusion = false;
                    let apart = harness::run(e, &c, layout);
                    n += 2;
                    compare(op, &first, &fused, &format!("{} in {dtype}, {layout:?}", c.key), faults);
                    if let (Outcome::Values(a), Outcome::Values(b)) = (&fused, &apart)
                        && !harness::same_bits(a, b)
                    {
                        faults.push(format!(
                            "{} in {dtype}, {layout:?}, unfused: {}",
                            c.key,
                            harness::difference(a, b)
                        ));
                    }
                }
                let flat = harness::constant_rows(&c);
                e.switches.fusion = true;
                let first = harness::run(e, &flat, Layout::Contiguous);
                for fusion in [true, false] {
                    e.switches.fusion = fusion;
                    let again = harness::run_broadcast(e, &flat);
                    n += 1;
                    compare(op, &first, &again, &format!("{} in {dtype}, broadcast, fusion {fusion}", c.key), faults);
                }
            }
        }
        n
    });
    enough(n, 30_000);
}

#[test]
fn shared_inputs_are_like_equal_ones() {
    let n = over(&harness::callable_ops(), |e, op, faults| {
        let mut n = 0;
        for mut c in case::cases(op).into_iter().filter(|c| matches!(c.variant, Variant::Full)) {
            let Some(first) = c.tensors().find(|d| d.kind.is_float()).cloned() else { continue };
            let alike = |d: &Data| d.kind.is_float() && d.dims == first.dims;
            if c.tensors().filter(|d| alike(d)).count() < 2 {
                continue;
            }
            // All positive, so that roots and logarithms are defined.
            let values: Vec<f64> = first.values.iter().map(|v| v.abs() + 0.1).collect();
            c.tensors_mut().filter(|d| alike(d)).for_each(|d| d.values.clone_from(&values));
            let apart = harness::run(e, &c, Layout::Contiguous);
            let shared = harness::run_with(e, |e| {
                let one = harness::upload(e, c.tensors().find(|d| alike(d)).unwrap(), Layout::Contiguous);
                let mut put = |d: &Data| if alike(d) { one } else { harness::upload(e, d, Layout::Contiguous) };
                let values: Vec<Value> = c
                    .args
                    .iter()
                    .map(|a| match a {
                        Arg::Tensor(d) => Value::Tensor(put(d)),
                        Arg::Tensors(ds) => Value::Tensors(ds.iter().map(&mut put).collect()),
                        Arg::Value(v) => v.clone(),
                    })
                    .collect();
                let out = e.call(op, &ops::Args::new(op, values));
                out.map(|out| out.to_vec()).map_err(|f| f.error.to_string())
            });
            n += 1;
            compare(op, &apart, &shared, &format!("{}, shared", c.key), faults);
        }
        n
    });
    enough(n, 60);
}

/// Returns whether the order of additions may depend on the memory layout of operands, as in matrix products.
fn layout_may_round(op: &Op) -> bool {
    let products = ["mm", "matmul", "bmm", "linear", "dot", "einsum", "matmul_fp8", "scaled_dot_product_attention"];
    products.contains(&op.name) || op.name.starts_with("conv")
}

fn compare(op: &Op, first: &Outcome, again: &Outcome, what: &str, faults: &mut Vec<String>) {
    match (first, again) {
        (Outcome::Values(a), Outcome::Values(b)) => {
            let alike = harness::same_bits(a, b) || layout_may_round(op) && reference::near(a, b);
            if !alike {
                faults.push(format!("{what}: {}", harness::difference(a, b)));
            }
        }
        (Outcome::Refused(_), Outcome::Refused(_)) => {}
        (_, Outcome::Panicked(m)) => faults.push(format!("{what} panics: {m}")),
        (a, b) => faults.push(format!("{what}: {a:?} and {b:?}")),
    }
}

/// The bias is added to the sum before that is rounded: 256 + 1 + 1 is 258 in bf16, which has no 257.
#[test]
fn linear_of_16_bit_floats_rounds_once() {
    for (dtype, big) in [(DType::BF16, 256.0), (DType::F16, 2048.0)] {
        for (m, n, k) in [(1, 1, 2), (3, 5, 7), (64, 64, 64)] {
            let row = |k: usize| [big, 1.0].into_iter().chain(std::iter::repeat_n(0.0, k - 2));
            let w: Vec<f64> = (0..n).flat_map(|_| row(k)).collect();
            for fusion in [true, false] {
                let mut e = harness::engine(1);
                e.switches.fusion = fusion;
                let got = harness::run_with(&mut e, |e| {
                    let mut up = |dims: &[usize], x: &[f64]| {
                        harness::t(e.from_host(HostTensor::from_f64(dtype, Shape::of(dims), x)))
                    };
                    let args = [up(&[m, k], &vec![1.0; m * k]), up(&[n, k], &w), up(&[n], &vec![1.0; n])];
                    harness::call(e, "linear", &args, &[]).map(|y| vec![y])
                });
                let want = HostTensor::from_f64(dtype, Shape::of(&[m, n]), &vec![big + 2.0; m * n]);
                assert_eq!(got, Outcome::Values(vec![want]), "{dtype} {m} {n} {k}, fusion {fusion}");
            }
        }
    }
}

/// Attention within documents equals attention with the mask that compares their numbers, with gradients: on a device
/// with kernels for documents (and none for masks) to the dtype's precision, elsewhere to the bit.
#[test]
fn documents_are_a_mask_of_equal_numbers() {
    documents_are_a_mask(DType::BF16, false, 1e-4);
    documents_are_a_mask(DType::F32, false, 1e-11);
    documents_are_a_mask(DType::F32, true, 1e-5);
}

/// `error`: sum of squared errors relative to the sum of squares.
fn documents_are_a_mask(dtype: DType, tf32: bool, error: f64) {
    const DIMS: [usize; 4] = [2, 4, 300, 64];
    const KEYS: [usize; 4] = [2, 2, 300, 64];
    let mut rng = perilune_tests::rng::Pcg::new(5);
    let mut make = |dims: &[usize]| harness::randn(&mut rng, dtype, dims);
    let (q, k, v, d) = (make(&DIMS), make(&KEYS), make(&KEYS), make(&DIMS));
    let numbers: [(&str, fn(usize) -> f64); 4] = [
        ("packed", |i| (i % 300 / 77) as f64),
        ("mixed", |i| (i * i % 5) as f64 - 2.0),
        ("beyond 32 bits", |i| (i % 300 / 50) as f64 * 4294967296.0),
        ("each", |i| i as f64),
    ];
    for (name, number) in numbers {
        // (B, T), and one row for all.
        for rows in [2, 1] {
            let ids: Vec<f64> = (0..rows * 300).map(number).collect();
            let ids = HostTensor::from_f64(DType::I64, Shape::of(&[rows, 300]), &ids);
            for causal in [true, false] {
                let run = |by_mask: bool| {
                    let mut e = harness::engine(1);
                    let got = harness::run_with(&mut e, |e| {
                        e.recorder.graph.modes.tf32 = tf32;
                        let x: Vec<NodeId> = [&q, &k, &v, &d].map(|x| e.from_host(x.clone())).to_vec();
                        let ids = e.from_host(ids.clone());
                        let given = if by_mask {
                            let (i, j) = (
                                e.recorder.graph.unsqueeze(ids, 2).unwrap(),
                                e.recorder.graph.unsqueeze(ids, 1).unwrap(),
                            );
                            let same = e.recorder.graph.eq(i, j).unwrap();
                            ("mask", harness::t(e.recorder.graph.unsqueeze(same, 1).unwrap()))
                        } else {
                            ("documents", harness::t(ids))
                        };
                        let options = [("is_causal", Value::Bool(causal)), ("enable_gqa", Value::Bool(true)), given];
                        let args = [x[0], x[1], x[2]].map(harness::t);
                        let y = harness::call(e, "scaled_dot_product_attention", &args, &options)?;
                        let grads = perilune_core::grad::grad(&mut e.recorder.graph, y, x[3], &x[..3], false);
                        let grads = grads.map_err(|e| e.to_string())?;
                        Ok(std::iter::once(y).chain(grads.into_iter().flatten()).collect())
                    });
                    let Outcome::Values(got) = got else { panic!("{got:?}") };
                    got
                };
                let (documents, mask) = (run(false), run(true));
                assert_eq!(documents.len(), 4);
                for (i, (a, b)) in documents.iter().zip(&mask).enumerate() {
                    let n = a.shape.numel();
                    let far: f64 = (0..n).map(|j| (a.get_f64(j) - b.get_f64(j)).powi(2)).sum();
                    let long: f64 = (0..n).map(|j| b.get_f64(j).powi(2)).sum();
                    // In documents of one position q and k have no gradient.
                    let limit = if long < 1e-6 * n as f64 { n as f64 * error } else { long * error };
                    assert!(far <= limit, "{dtype} {name} {rows} causal {causal}, result {i}: {far} of {long}");
                }
            }
        }
    }
}

/// Attention over views of one packed projection, with result and gradient read with the heads of a row side by side, has the bits
/// of attention over separate tensors. This covers devices that write outputs through strides.
#[test]
fn attention_of_a_packed_projection_has_the_same_bits() {
    of_a_packed_projection(DType::BF16);
    of_a_packed_projection(DType::F32);
}

fn of_a_packed_projection(dtype: DType) {
    const BATCH: usize = 2;
    const HEADS: usize = 3;
    const ROWS: usize = 40;
    const WIDTH: usize = 16;
    let mut rng = perilune_tests::rng::Pcg::new(11);
    let packed = harness::randn(&mut rng, dtype, &[BATCH, ROWS, 3 * HEADS, WIDTH]);
    let grad = harness::randn(&mut rng, dtype, &[BATCH, ROWS, HEADS, WIDTH]);
    let run = |apart: bool| {
        let mut e = harness::engine(1);
        let got = harness::run_with(&mut e, |e| {
            let x = e.from_host(packed.clone());
            let d = e.from_host(grad.clone());
            let (x, d) = (
                e.recorder.graph.permute(x, &[0, 2, 1, 3]).unwrap(),
                e.recorder.graph.permute(d, &[0, 2, 1, 3]).unwrap(),
            );
            let mut parts = Vec::new();
            for k in 0..3 {
                let part = e.recorder.graph.slice(x, 1, k * HEADS, (k + 1) * HEADS, 1).unwrap();
                parts.push(if apart { e.recorder.graph.copy(part).unwrap() } else { part });
            }
            let args: Vec<Value> = parts.iter().map(|p| harness::t(*p)).collect();
            let y = harness::call(e, "scaled_dot_product_attention", &args, &[("is_causal", Value::Bool(true))])?;
            let wrt = if apart { parts } else { vec![x] };
            let grads =
                perilune_core::grad::grad(&mut e.recorder.graph, y, d, &wrt, false).map_err(|e| e.to_string())?;
            let mut out = vec![y];
            out.extend(grads.into_iter().flatten());
            if !apart {
                for o in &mut out {
                    *o = e.recorder.graph.permute(*o, &[0, 2, 1, 3]).unwrap();
                }
            }
            Ok(out)
        });
        let Outcome::Values(got) = got else { panic!("{got:?}") };
        got
    };
    let (one, four) = (run(false), run(true));
    let part = HEADS * WIDTH;
    for b in 0..BATCH {
        for r in 0..ROWS {
            for h in 0..HEADS {
                for w in 0..WIDTH {
                    let (inside, own) =
                        ((b * ROWS + r) * part + h * WIDTH + w, ((b * HEADS + h) * ROWS + r) * WIDTH + w);
                    assert_eq!(one[0].get_f64(inside), four[0].get_f64(own), "out {b} {h} {r} {w}");
                    for k in 0..3 {
                        let inside = (b * ROWS + r) * 3 * part + k * part + h * WIDTH + w;
                        assert_eq!(one[1].get_f64(inside), four[1 + k].get_f64(own), "gradient {k}: {b} {h} {r} {w}");
                    }
                }
            }
        }
    }
}
