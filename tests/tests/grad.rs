//! Checks gradients of every op of the registry by central finite differences in f64, second derivatives for smooth ops.
#![allow(clippy::unwrap_used)]

use perilune_core::graph::NodeId;
use perilune_core::ops::{self, Grad, Op};
use perilune_core::{DType, HostTensor, Shape, grad};
use perilune_engine::Engine;
use perilune_tests::case::{self, Case, Variant};
use perilune_tests::harness::{self, Layout};
use perilune_tests::rng::Pcg;

/// The step of the differences. Two differences are combined, so that the error is of fourth order.
const STEP: f64 = 2e-4;

/// Returns the reason if an op's gradient differs from finite differences on purpose.
fn stops(op: &Op) -> Option<&'static str> {
    match op.name {
        "detach" => Some("that is its purpose"),
        "unique" => Some("runs on the host"),
        _ => None,
    }
}

/// Records the case and a scalar: the weighted sum of its float outputs (`order` 0) or of the gradients
/// of that sum (`order` 1). Also returns the leaves: float inputs and others.
struct Scalar {
    value: NodeId,
    floats: Vec<NodeId>,
    others: Vec<NodeId>,
}

fn record(e: &mut Engine, case: &Case, order: usize) -> Result<Option<Scalar>, String> {
    e.recorder.seed(7);
    let (args, nodes) = harness::args(e, case, Layout::Contiguous);
    let outs = e.call(case.op, &args).map_err(|f| f.error.to_string())?;
    let (floats, others): (Vec<NodeId>, Vec<NodeId>) =
        nodes.into_iter().partition(|n| e.recorder.graph.dtype(*n).is_float());
    let outs: Vec<NodeId> = outs.into_iter().filter(|o| e.recorder.graph.dtype(*o).is_float()).collect();
    let mut rng = Pcg::named(&[case.op.name, "cotangent"]);
    let Some(mut value) = weigh(e, &outs, &mut rng) else { return Ok(None) };
    for _ in 0..order {
        let found = gradients(e, value, &floats, true)?;
        let found: Vec<NodeId> = found.into_iter().flatten().collect();
        let Some(next) = weigh(e, &found, &mut rng) else { return Ok(None) };
        value = next;
    }
    Ok(Some(Scalar { value, floats, others }))
}

/// Sums all elements of `xs`, each times a random weight that is exact in every float dtype.
fn weigh(e: &mut Engine, xs: &[NodeId], rng: &mut Pcg) -> Option<NodeId> {
    let mut total: Option<NodeId> = None;
    for &x in xs {
        let (shape, dtype) = (e.recorder.graph.shape(x), e.recorder.graph.dtype(x));
        let weights: Vec<f64> = (0..shape.numel()).map(|_| rng.range(-16, 17) as f64 / 8.0).collect();
        let w = e.from_host(HostTensor::from_f64(dtype, shape, &weights));
        let g = &mut e.recorder.graph;
        let y = g.mul(x, w).unwrap();
        let y = g.sum_all(y).unwrap();
        let y = g.cast(y, DType::F64).unwrap();
        total = Some(match total {
            Some(t) => g.add_(t, y).unwrap(),
            None => y,
        });
    }
    total
}

fn gradients(e: &mut Engine, y: NodeId, wrt: &[NodeId], create_graph: bool) -> Result<Vec<Option<NodeId>>, String> {
    let dtype = e.recorder.graph.dtype(y);
    let one = e.recorder.graph.constant(1.0, dtype);
    grad::grad(&mut e.recorder.graph, y, one, wrt, create_graph).map_err(|m| m.to_string())
}

/// Computes the value of the scalar.
fn value(e: &mut Engine, case: &Case, order: usize) -> f64 {
    let s = record(e, case, order).unwrap().unwrap();
    let v = e.read_node(s.value).unwrap_or_else(|f| panic!("{}: {}", case.key, f.error)).get_f64(0);
    e.flush().unwrap();
    v
}

/// Computes the gradients of the scalar by each float input; zeros for independent inputs.
fn analytic(e: &mut Engine, case: &Case, order: usize) -> Result<Option<Vec<HostTensor>>, String> {
    let Some(s) = record(e, case, order)? else {
        e.flush().unwrap();
        return Ok(None);
    };
    let found = gradients(e, s.value, &s.floats, false)?;
    for other in gradients(e, s.value, &s.others, false)? {
        if other.is_some() {
            return Err("an integer input has a gradient".into());
        }
    }
    let ids: Vec<NodeId> = found.iter().flatten().copied().collect();
    let mut values = harness::read_all(e, &ids)?.into_iter();
    let mut out = Vec::new();
    for (x, d) in s.floats.iter().zip(&found) {
        let (shape, dtype) = (e.recorder.graph.shape(*x), e.recorder.graph.dtype(*x));
        let d = match d {
            Some(_) => values.next().unwrap(),
            None => HostTensor::from_f64(dtype, shape, &vec![0.0; shape.numel()]),
        };
        if d.shape != shape || d.dtype != dtype {
            return Err(format!("a gradient is {} {} for an input {dtype} {shape}", d.dtype, d.shape));
        }
        out.push(d);
    }
    e.flush().unwrap();
    Ok(Some(out))
}

/// Computes the derivative of the scalar along `direction` of float input `at`, by differences.
fn numeric(e: &mut Engine, case: &Case, order: usize, at: usize, direction: &[f64]) -> f64 {
    let mut moved = |h: f64| {
        let mut c = case.clone();
        let d = c.tensors_mut().filter(|t| t.dtype.is_float()).nth(at).unwrap();
        for (x, d) in d.values.iter_mut().zip(direction) {
            *x += h * d;
        }
        value(e, &c, order)
    };
    (8.0 * (moved(STEP) - moved(-STEP)) - (moved(2.0 * STEP) - moved(-2.0 * STEP))) / (12.0 * STEP)
}

fn check(e: &mut Engine, case: &Case, order: usize) -> Result<usize, String> {
    let Some(grads) = analytic(e, case, order)? else { return Ok(0) };
    e.switches.fusion = false;
    let apart = analytic(e, case, order)?.unwrap();
    e.switches.fusion = true;
    if !harness::same_bits(&grads, &apart) {
        return Err(format!("unfused gradients differ: {}", harness::difference(&grads, &apart)));
    }
    let size = value(e, case, order).abs();
    let mut rng = Pcg::named(&[&case.key, "direction"]);
    let mut n = 0;
    for (at, g) in grads.iter().enumerate() {
        let len = g.numel();
        let mut directions: Vec<Vec<f64>> = Vec::new();
        if len > 0 {
            directions.push((0..len).map(|_| rng.uniform(-1.0, 1.0)).collect());
        }
        for _ in 0..if len > 1 { len.min(4) } else { 0 } {
            let k = rng.below(len);
            directions.push((0..len).map(|i| f64::from(u8::from(i == k))).collect());
        }
        for d in directions {
            let want = numeric(e, case, order, at, &d);
            let (mut got, mut parts) = (0.0, 0.0);
            for (x, y) in g.to_f64().iter().zip(&d) {
                got += x * y;
                parts += (x * y).abs();
            }
            n += 1;
            let room = 1e-7 * (parts + want.abs()) + 2e-11 * (1.0 + size) / STEP.sqrt();
            if (got - want).abs() > room || got.is_nan() || want.is_nan() {
                return Err(format!(
                    "float input {at}: {got:e}, but differences say {want:e} (off by {:e})",
                    (got - want).abs()
                ));
            }
        }
    }
    Ok(n)
}

/// The number of engines in parallel. On a GPU most of the time is compilation on the host.
fn threads() -> usize {
    if harness::on_gpu() { std::thread::available_parallelism().map_or(2, |n| n.get().min(8)) } else { 2 }
}

fn sweep(order: usize, which: impl Fn(&Op) -> bool + Sync) -> usize {
    let ops: Vec<&'static Op> = harness::callable_ops().into_iter().filter(|op| which(op)).collect();
    let (next, found) = (std::sync::atomic::AtomicUsize::new(0), std::sync::Mutex::new((Vec::new(), 0)));
    std::thread::scope(|s| {
        for _ in 0..threads() {
            s.spawn(|| {
                let mut e = harness::engine(1);
                while let Some(op) = ops.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
                    for case in case::cases(op).into_iter().filter(|c| c.variant == Variant::Full) {
                        let done =
                            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| check(&mut e, &case, order)));
                        let mut all = found.lock().unwrap();
                        match done {
                            Ok(Ok(n)) => all.1 += n,
                            Ok(Err(m)) => {
                                all.0.push(format!("{}: {m}", case.key));
                                e = harness::engine(1);
                            }
                            Err(_) => {
                                all.0.push(format!("{} panics", case.key));
                                e = harness::engine(1);
                            }
                        }
                    }
                }
            });
        }
    });
    let (faults, n) = found.into_inner().unwrap();
    assert!(faults.is_empty(), "{} failures in {n} checks:\n{}", faults.len(), faults.join("\n"));
    n
}

fn has_gradient(op: &Op) -> bool {
    stops(op).is_none() && !matches!(op.grad, Grad::Missing(_)) && op.name != "to"
}

#[test]
fn gradients_match_finite_differences() {
    let n = sweep(0, has_gradient);
    harness::assert_swept(n, 1000);
}

#[test]
fn gradients_of_gradients_match_finite_differences() {
    let n = sweep(1, |op| op.smooth && has_gradient(op));
    harness::assert_swept(n, 700);
}

/// Zeros among the factors, where division is undefined: the gradients of products, and second derivatives of `prod`.
#[test]
fn products_with_zeros_have_gradients() {
    let mut e = harness::engine(1);
    let factors = [2.0, -0.5, 1.5, 3.0, -1.25, 0.75];
    for op in ["prod", "cumprod"].map(|name| ops::by_name(name).unwrap()) {
        for zeros in [&[][..], &[0], &[2], &[5], &[1, 4], &[2, 3], &[0, 2, 5], &[0, 1, 2, 3, 4, 5]] {
            let mut values = factors.to_vec();
            zeros.iter().for_each(|z| values[*z] = 0.0);
            // The second row has no zeros.
            values.extend(factors);
            let mut case =
                case::cases(op).into_iter().find(|c| c.variant == Variant::Full && c.key.contains("1")).unwrap();
            case.key = format!("{} with zeros at {zeros:?}", op.name);
            let d = case.tensors_mut().next().unwrap();
            (d.dims, d.values) = (vec![2, 6], values);
            let orders = if op.name == "prod" || zeros.is_empty() { 0..=1 } else { 0..=0 };
            for order in orders {
                let n = check(&mut e, &case, order).unwrap_or_else(|m| panic!("{}, order {order}: {m}", case.key));
                assert!(n > 3, "{}", case.key);
            }
        }
    }
}

/// Norms and standard deviations of 0 have the gradient 0, not NaN, and so have their gradients.
#[test]
fn norms_of_zeros_have_gradient_zero() {
    for (name, options) in [
        ("std", vec![]),
        ("norm", vec![]),
        ("norm", vec![("p", harness::float(0.5))]),
        ("norm", vec![("p", harness::float(1.5))]),
        ("norm", vec![("p", harness::float(3.0))]),
    ] {
        let mut e = harness::engine(1);
        // A row of zeros, which has equal values too, and one of different values.
        let x = HostTensor::from_f64(DType::F32, Shape::of(&[2, 3]), &[0.0, 0.0, 0.0, 1.0, -2.0, 0.5]);
        let x = e.from_host(x);
        let y = harness::call(&mut e, name, &[harness::t(x), harness::ints(&[1])], &options).unwrap();
        let y = e.recorder.graph.sum_all(y).unwrap();
        let dx = gradients(&mut e, y, &[x], true).unwrap()[0].unwrap();
        let s = e.recorder.graph.square(dx).unwrap();
        let s = e.recorder.graph.sum_all(s).unwrap();
        let ddx = gradients(&mut e, s, &[x], false).unwrap()[0].unwrap();
        let (dx, ddx) = (e.read_node(dx).unwrap().to_f64(), e.read_node(ddx).unwrap().to_f64());
        assert_eq!(dx[..3], [0.0; 3], "{name} {options:?}");
        assert!(dx[3..].iter().all(|d| d.is_finite() && *d != 0.0), "{name} {options:?}: {dx:?}");
        assert!(ddx.iter().all(|d| d.is_finite()), "{name} {options:?}: {ddx:?}");
    }
}

#[test]
fn ops_without_gradients_give_none_or_an_error() {
    let mut e = harness::engine(1);
    for op in harness::callable_ops() {
        if stops(op).is_none() && !matches!(op.grad, Grad::Missing(_)) {
            continue;
        }
        for case in case::cases(op).into_iter().filter(|c| c.variant == Variant::Full) {
            let Some(s) = record(&mut e, &case, 0).unwrap() else { continue };
            match gradients(&mut e, s.value, &s.floats, false) {
                Ok(found) => assert!(found.iter().all(Option::is_none), "{} has a gradient", case.key),
                Err(text) => {
                    assert!(matches!(op.grad, Grad::Missing(_)) && text.contains(op.name), "{}: {text}", case.key)
                }
            }
            e.flush().unwrap();
        }
    }
}

/// Compares the gradients of a case in f32 and 16 bits with those in f64 at the same inputs. Returns the number of comparisons
/// and the differences.
fn narrow(e: &mut Engine, case: &Case, faults: &mut Vec<String>) -> usize {
    let Ok(Some(want)) = analytic(e, case, 0) else { return 0 };
    let mut n = 0;
    for (dtype, room) in [(DType::F32, 2e-5), (DType::BF16, 0.06), (DType::F16, 0.01)] {
        let got = match analytic(e, &case.floats_as(dtype), 0) {
            Ok(Some(got)) => got,
            other => {
                faults.push(format!("{} in {dtype}: {other:?}", case.key));
                continue;
            }
        };
        n += 1;
        for (g, w) in got.iter().zip(&want) {
            let largest = w.to_f64().iter().fold(0.0, |m: f64, v| m.max(v.abs()));
            for i in 0..w.numel() {
                let (x, y) = (g.get_f64(i), w.get_f64(i));
                if (x - y).abs() > room * (y.abs() + largest) + 1e-6 || x.is_nan() != y.is_nan() {
                    faults.push(format!("{} in {dtype}: element {i} is {x:e} instead of {y:e}", case.key));
                    break;
                }
            }
        }
    }
    n
}

#[test]
fn gradients_in_narrow_dtypes_follow_f64() {
    let ops: Vec<&'static Op> = harness::callable_ops().into_iter().filter(|op| has_gradient(op)).collect();
    let (next, found) = (std::sync::atomic::AtomicUsize::new(0), std::sync::Mutex::new((Vec::new(), 0)));
    std::thread::scope(|s| {
        for _ in 0..threads() {
            s.spawn(|| {
                let mut e = harness::engine(1);
                while let Some(op) = ops.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
                    let (mut n, mut faults) = (0, Vec::new());
                    for case in case::cases(op).into_iter().filter(|c| c.variant == Variant::Grid) {
                        n += narrow(&mut e, &case, &mut faults);
                    }
                    let mut all = found.lock().unwrap();
                    all.0.extend(faults);
                    all.1 += n;
                }
            });
        }
    });
    let (faults, n) = found.into_inner().unwrap();
    assert!(faults.is_empty(), "{} failures in {n} checks:\n{}", faults.len(), faults.join("\n"));
    harness::assert_swept(n, 800);
}
