//! Calls every op with numeric arguments at their limits.

use crate::{caught, engine, eval, extreme, report, seeds};
use perilune_core::error::Error;
use perilune_core::graph::{Graph, NodeId, Number};
use perilune_core::ops::{self, Args, Class, Op, Param, Ty, Value, create, parse_signature};
use perilune_core::{DType, HostTensor, Kind, Shape, grad};
use perilune_cuda::launch::Props;
use perilune_cuda::{OfflineTarget, offline_target};
use perilune_engine::Engine;
use perilune_plan::{Options, Request, Tracer, pipeline};
use perilune_tests::case::{self, Arg, Case, Variant};
use perilune_tests::harness::{self, Layout};
use perilune_tests::reference;
use perilune_tests::rng::Pcg;
use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

/// The maximum bytes and operations of a call that is run.
const WORTH: usize = 20_000_000;

/// The outcome of a call.
enum Outcome {
    Refused(String),
    /// It needs more memory than the device has, or too much time for a test.
    TooLarge,
    Values(Vec<HostTensor>),
}

fn numeric(p: &Param) -> bool {
    matches!(p.ty, Ty::Int | Ty::Ints | Ty::IntsOr(_) | Ty::Float | Ty::Number)
}

/// Returns the ops with a number among their arguments.
fn candidates() -> Vec<(&'static Op, Vec<Param>)> {
    let with = |op: &'static Op| Some((op, parse_signature(op.sig).ok().filter(|p| p.iter().any(numeric))?));
    ops::all().iter().filter(|op| !op.sig.is_empty()).filter_map(|op| with(op)).collect()
}

/// Replaces one numeric argument, or each with some probability. Returns the inserted integers, and whether something else changed.
fn mutate(rng: &mut Pcg, case: &mut Case, params: &[Param]) -> (Vec<i64>, bool) {
    let sizes: Vec<i64> = case.tensors().flat_map(|t| t.dims.iter().map(|d| *d as i64)).collect();
    let slots: Vec<usize> = (0..params.len()).filter(|k| numeric(&params[*k])).collect();
    let only = rng.one_in(3).then_some(()).is_none().then(|| *rng.pick(&slots));
    let (mut put, mut more) = (Vec::new(), false);
    for k in slots {
        if only.is_some_and(|o| o != k) || only.is_none() && rng.one_in(3) {
            continue;
        }
        let Arg::Value(value) = &mut case.args[k] else { continue };
        let mut int = |rng: &mut Pcg, old: i64| {
            let near = if rng.one_in(2) { old } else { *rng.pick(if sizes.is_empty() { &[3] } else { &sizes }) };
            let v = extreme(rng, near);
            put.push(v);
            v
        };
        *value = match (&params[k].ty, &*value) {
            (Ty::Int, Value::Number(Number::Int(old))) => Value::Number(Number::Int(int(rng, *old))),
            (Ty::Int, _) => Value::Number(Number::Int(int(rng, 0))),
            (Ty::Float, _) => {
                more = true;
                Value::Number(Number::Float(float(rng)))
            }
            (Ty::Number, Value::Number(Number::Int(old))) if !rng.one_in(4) => {
                Value::Number(Number::Int(int(rng, *old)))
            }
            (Ty::Number, _) => {
                more = true;
                Value::Number(Number::Float(float(rng)))
            }
            (_, Value::Ints(list)) => {
                let mut list = list.clone();
                let change = rng.below(8);
                more |= change < 2 || list.is_empty();
                match change {
                    0 => list.push(int(rng, 1)),
                    1 => drop(list.pop()),
                    2 => list.iter_mut().for_each(|v| *v = int(rng, *v)),
                    _ if list.is_empty() => list.push(int(rng, 1)),
                    _ => {
                        let at = rng.below(list.len());
                        list[at] = int(rng, list[at]);
                    }
                }
                Value::Ints(list)
            }
            _ => Value::Ints([int(rng, 1)].into_iter().collect()),
        };
    }
    (put, more)
}

/// Returns the numeric arguments of a call that are at their limits: an integer of more than 31 bits, or an odd float.
fn at_limits<'a>(case: &'a Case, params: &'a [Param]) -> impl Iterator<Item = &'static str> + use<'a> {
    let large = |v: &i64| v.unsigned_abs() >= (1 << 31) - 1;
    let odd = |v: f64| !v.is_finite() || v.abs() > 1e18 || v != 0.0 && v.abs() < 1e-300;
    params.iter().zip(&case.args).filter(|(p, _)| numeric(p)).filter_map(move |(p, arg)| {
        let found = match arg {
            Arg::Value(Value::Number(Number::Int(v))) => large(v),
            Arg::Value(Value::Number(Number::Float(v))) => odd(*v),
            Arg::Value(Value::Ints(list)) => list.iter().any(large),
            _ => false,
        };
        found.then_some(p.name)
    })
}

fn float(rng: &mut Pcg) -> f64 {
    *rng.pick(&[f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e300, -1e300, 9.3e18, 1e-320, 0.0, -0.0, -1.0, 2.0, 0.3])
}

fn run(e: &mut Engine, case: &Case) -> Result<Outcome, String> {
    e.recorder.seed(7);
    let (args, leaves) = harness::args(e, case, Layout::Contiguous);
    let from = e.recorder.graph.len();
    let out = match e.call(case.op, &args) {
        Ok(out) => out,
        Err(f) => return Ok(Outcome::Refused(f.error.to_string())),
    };
    for id in &out {
        e.recorder.graph.shape(*id).check("").map_err(|e| format!("a result is too large: {e}"))?;
    }
    // Uploaded values count as known.
    let cost = match e.cost_since(NodeId(from as u32), &out) {
        Ok((_, cost)) => cost,
        Err(f) => return Ok(Outcome::Refused(f.error.to_string())),
    };
    let bytes = cost.read.saturating_add(cost.written);
    let held: usize = out.iter().map(|id| e.recorder.graph.shape(*id).numel()).sum();
    if bytes.saturating_add(cost.flops) > WORTH && (held < 4 * crate::LIMIT || harness::on_gpu()) {
        return Ok(Outcome::TooLarge);
    }
    if let Err(f) = e.evaluate(&out) {
        return match f.error.kind {
            Kind::Memory => Ok(Outcome::TooLarge),
            _ if is_device_fault(&f.error) => Err(f.error.to_string()),
            _ => Ok(Outcome::Refused(f.error.to_string())),
        };
    }
    let mut values = Vec::new();
    for id in &out {
        match e.read_node(*id) {
            Ok(value) => values.push(value),
            // A GPU reports a bad index when the host waits.
            Err(f) if !is_device_fault(&f.error) => return Ok(Outcome::Refused(f.error.to_string())),
            Err(f) => return Err(f.error.to_string()),
        }
    }
    differentiate(e, &leaves, out[0])?;
    Ok(Outcome::Values(values))
}

/// Records and runs the backward pass of a result, where there is one: it computes with the same numbers.
fn differentiate(e: &mut Engine, leaves: &[NodeId], y: NodeId) -> Result<(), String> {
    let g = &mut e.recorder.graph;
    let leaves: Vec<NodeId> = leaves.iter().copied().filter(|x| g.dtype(*x).is_float()).collect();
    if leaves.is_empty() || !g.dtype(y).is_float() {
        return Ok(());
    }
    let from = NodeId(g.len() as u32);
    let total = g.sum_all(y).map_err(|e| e.to_string())?;
    let one = g.constant(1.0, g.dtype(total));
    let found = match grad::grad(g, total, one, &leaves, false) {
        Ok(found) => found,
        Err(e) if e.kind == Kind::Gradient => return Ok(()),
        Err(e) => return Err(format!("backward: {e}")),
    };
    let found: Vec<NodeId> = found.into_iter().flatten().collect();
    let (_, cost) = e.cost_since(from, &found).map_err(|f| format!("backward: {}", f.error))?;
    if cost.read.saturating_add(cost.written).saturating_add(cost.flops) > WORTH {
        return Ok(());
    }
    match e.evaluate(&found) {
        Err(f) if f.error.kind != Kind::Memory => return Err(format!("backward: {}", f.error)),
        Err(_) => return Ok(()),
        Ok(()) => {}
    }
    // A GPU reports a bad address when the host waits for it.
    for id in found {
        e.read_node(id).map_err(|f| format!("backward: {}", f.error))?;
    }
    Ok(())
}

/// Returns whether a kernel broke the device, which fails every later call.
fn is_device_fault(error: &Error) -> bool {
    error.message.contains("CUDA error")
}

/// The call alone, recorded over leaves; its results, and what the leaves hold.
fn recorded(case: &Case) -> Option<(Graph, Vec<NodeId>, HashMap<NodeId, Vec<f64>>)> {
    let mut g = Graph::new();
    let mut leaves = HashMap::new();
    let mut leaf = |g: &mut Graph, d: &case::Data| {
        let id = g.leaf(&create::LEAF, Shape::of(&d.dims), d.dtype, &[], leaves.len() as u64);
        leaves.insert(id, d.values.clone());
        id
    };
    let mut values = Vec::new();
    for a in &case.args {
        values.push(match a {
            Arg::Tensor(d) => Value::Tensor(leaf(&mut g, d)),
            Arg::Tensors(ds) => Value::Tensors(ds.iter().map(|d| leaf(&mut g, d)).collect()),
            Arg::Value(v) => v.clone(),
        });
    }
    let out = ops::call(&mut g, case.op, &Args::new(case.op, values)).ok()?;
    Some((g, out.to_vec(), leaves))
}

/// Plans an accepted call for a GPU and writes the texts and arguments of its launches, however large they are. Errors are fine.
fn launch_on_paper(case: &Case) {
    if matches!(case.op.class, Class::Host(_)) {
        return;
    }
    let Some((g, out, leaves)) = recorded(case) else { return };
    let (target, props) = (OfflineTarget::default(), Props::H200);
    let (mut tracer, request) = (Tracer::default(), Request { roots: out, ..Request::default() });
    tracer.run(&g, &request, |id| leaves.contains_key(&id).then_some(u64::from(id.0)));
    let Ok(program) = pipeline::plan(&g, &tracer, &request, Options::default(), &target) else { return };
    for k in 0..program.kernels.len() {
        offline_target::work(&program, k, &props).map(drop).unwrap_or_default();
    }
}

/// The results by the interpreter of primitives, where it can say: i64 beyond 2^53 and random numbers it cannot.
fn wanted(case: &Case) -> Option<Vec<Vec<f64>>> {
    if case::is_random(case.op) || matches!(case.op.class, Class::Host(_)) {
        return None;
    }
    let (mut g, out, leaves) = recorded(case)?;
    let lowered = eval::lower(&mut g, &out, &mut HashMap::new());
    let large = |n: &perilune_core::graph::Node| {
        let number = if n.op == &create::SCALAR { n.payload as i64 } else { *n.attrs.first().unwrap_or(&0) };
        let exact = !n.dtype.is_float() && (n.op == &create::SCALAR || n.op == &create::CONSTANT);
        exact && number.unsigned_abs() > 1 << 53 || n.dtype.is_int() && n.dtype != DType::I64
    };
    // The interpreter stores intermediate values that a region keeps in registers.
    let elements: usize = g.nodes().iter().map(|n| n.shape.numel()).fold(0, usize::saturating_add);
    if elements > WORTH / 8 || g.nodes().iter().any(large) {
        return None;
    }
    Some(eval::eval(&g, &leaves, &lowered))
}

/// Returns whether the interpreter's f64 represent these numbers exactly if they are integers.
fn exact(values: &[f64]) -> bool {
    values.iter().all(|v| v.abs() < (1u64 << 53) as f64 || v.fract() != 0.0 || !v.is_finite())
}

/// Returns the fault of a call, if any, and whether its values were compared.
fn fault(e: &mut Engine, case: &Case, (put, more): &(Vec<i64>, bool)) -> Result<bool, String> {
    let got = match run(e, case)? {
        Outcome::TooLarge => {
            launch_on_paper(case);
            return Ok(false);
        }
        Outcome::Refused(text) => {
            let named = put.iter().any(|v| text.contains(&v.to_string()));
            // A single huge integer is the fault; with several, or a list of another length, it is undetermined. With a tensor of
            // probabilities, `bernoulli` takes no shape at all.
            let alone = put.len() == 1 && !more && put[0].unsigned_abs() >= 1 << 31 && case.op.name != "bernoulli";
            let clear = named || !alone || text.contains("has more than 2^48 elements");
            return if clear && text.len() < 1000 { Ok(false) } else { Err(format!("unclear: {text}")) };
        }
        Outcome::Values(got) => got,
    };
    launch_on_paper(case);
    let Some(want) = caught(|| Ok(wanted(case))).ok().flatten() else { return Ok(false) };
    for (g, w) in got.iter().zip(&want).filter(|(_, w)| exact(w)) {
        let w = HostTensor::from_f64(g.dtype, g.shape, w);
        reference::compare(g, &w, reference::tolerance(case.op, g.dtype)).map_err(|m| format!("wrong: {m}"))?;
    }
    Ok(true)
}

#[test]
fn every_op_refuses_or_computes_extreme_numbers() {
    let all = candidates();
    assert!(all.len() > 60, "{} ops take numbers", all.len());
    let mut e = engine();
    let (mut found, mut compared, mut calls) = (Vec::new(), 0, 0);
    let mut missing = BTreeSet::new();
    for (op, params) in &all {
        missing.extend(params.iter().filter(|p| numeric(p)).map(|p| (op.name, p.name)));
    }
    let arguments = missing.len();
    for seed in seeds(20_000) {
        let rng = &mut Pcg::new(seed);
        let (op, params) = &all[seed as usize % all.len()];
        let samples = case::samples(op);
        let floats = samples.iter().any(|s| s.text.contains("f("));
        let mut case = case::fill(rng.pick(&samples), Variant::Grid, floats);
        let put = mutate(rng, &mut case, params);
        for name in at_limits(&case, params) {
            missing.remove(&(op.name, name));
        }
        let start = Instant::now();
        let done = caught(|| fault(&mut e, &case, &put));
        let took = start.elapsed();
        let text: Vec<String> = case.args.iter().map(show).collect();
        match done {
            Ok(true) => compared += 1,
            Ok(false) => {}
            Err(m) => found.push(format!("{}({}) [seed {seed}]: {m}", op.name, text.join(", "))),
        }
        if took > Duration::from_secs(5) {
            found.push(format!("{}({}) [seed {seed}]: took {took:?}", op.name, text.join(", ")));
        }
        calls += 1;
        if found.last().is_some_and(|m| m.contains("CUDA error")) {
            break;
        }
        if found.last().is_some_and(|m| m.contains("PANIC")) {
            e = engine();
        } else {
            e.flush().unwrap_or_else(|f| panic!("{}", f.error));
        }
    }
    report(found);
    println!("{calls} calls of {} ops, {arguments} numeric arguments, {compared} compared", all.len());
    assert!(calls < 20_000 || missing.is_empty(), "never at their limits: {:?}", missing);
    assert!(calls < 1000 || compared * 10 > calls, "only {compared} of {calls} calls were compared");
}

fn show(a: &Arg) -> String {
    match a {
        Arg::Tensor(d) => format!("{}{:?}", d.dtype, d.dims),
        Arg::Tensors(ds) => format!("{:?}", ds.iter().map(|d| &d.dims).collect::<Vec<_>>()),
        Arg::Value(Value::Number(Number::Int(i))) => i.to_string(),
        Arg::Value(Value::Number(Number::Float(f))) => format!("{f:e}"),
        Arg::Value(Value::Ints(v)) => format!("{:?}", v.as_slice()),
        Arg::Value(v) => format!("{v:?}"),
    }
}
