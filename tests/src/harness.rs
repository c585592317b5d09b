//! Runs cases on an engine in a chosen layout, fused or unfused, and catches panics.

use crate::case::{Arg, Case, Data};
use perilune_core::graph::NodeId;
use perilune_core::ops::{self, Args, Op, Value};
use perilune_core::{DType, HostTensor, Mesh, Shape};
use perilune_cpu::{Cpu, Isa};
use perilune_cuda::Cuda;
use perilune_dist::MeshBackend;
use perilune_engine::Engine;
use perilune_plan::Backend;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// The memory layout of an input. The logical values are the same in each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Layout {
    Contiguous,
    /// Dims in reverse order in memory.
    Transposed,
    /// Every second row, at an offset, of a larger tensor filled with poison values.
    Sliced,
    /// Reversed in memory along the first and last dim.
    Flipped,
}

impl Layout {
    pub const ALL: [Layout; 4] = [Layout::Contiguous, Layout::Transposed, Layout::Sliced, Layout::Flipped];
}

/// Returns `soak` in the long versions of the tests (`PERILUNE_SOAK`, which `.ci/soak` sets), else `usual`.
pub fn in_soak<T>(soak: T, usual: T) -> T {
    if std::env::var_os("PERILUNE_SOAK").is_some() { soak } else { usual }
}

/// Returns whether `PERILUNE_DEVICE` names a GPU.
pub fn on_gpu() -> bool {
    std::env::var("PERILUNE_DEVICE").is_ok_and(|name| name != "cpu")
}

/// The CPU with that many threads, or the device that `PERILUNE_DEVICE` names; as many of them as `PERILUNE_MESH` has.
pub fn device(threads: usize) -> Arc<dyn Backend> {
    match std::env::var("PERILUNE_MESH") {
        Ok(mesh) => on_mesh(Mesh::parse(&mesh).unwrap_or_else(|e| panic!("PERILUNE_MESH: {e}")), threads),
        Err(_) => one_device(threads),
    }
}

/// The devices of a mesh: CPUs, or virtual ones on the GPU that `PERILUNE_DEVICE` names. `PERILUNE_MESH_GPUS=2` spreads them over that GPU
/// and the next one, the outermost axis first.
pub fn on_mesh(mesh: Mesh, threads: usize) -> Arc<dyn Backend> {
    if mesh.devices() == 1 {
        return one_device(threads);
    }
    let gpus: usize = std::env::var("PERILUNE_MESH_GPUS").map_or(1, |n| n.parse().expect("PERILUNE_MESH_GPUS"));
    let devices = (0..mesh.devices()).map(|rank| nth_device(threads, rank * gpus / mesh.devices())).collect();
    Arc::new(MeshBackend::new(mesh, devices).unwrap_or_else(|e| panic!("{e}")))
}

fn one_device(threads: usize) -> Arc<dyn Backend> {
    nth_device(threads, 0)
}

/// The CPU, or the `n`-th GPU from the one that `PERILUNE_DEVICE` names.
fn nth_device(threads: usize, n: usize) -> Arc<dyn Backend> {
    let fail = |e| panic!("PERILUNE_DEVICE: {e}");
    match std::env::var("PERILUNE_DEVICE") {
        Ok(name) if name != "cpu" => {
            let first = name.strip_prefix("cuda:").and_then(|k| k.parse::<usize>().ok());
            let name = if n == 0 { name } else { format!("cuda:{}", first.unwrap_or(0) + n) };
            Arc::new(Cuda::named(&name).unwrap_or_else(fail))
        }
        _ => {
            Isa::chosen().unwrap_or_else(|e| panic!("{e}"));
            Arc::new(Cpu::new(Some(threads)))
        }
    }
}

/// The ops that a recipe can call; with `PERILUNE_OPS=trunc,softmax` only those, for work on one op.
pub fn callable_ops() -> Vec<&'static Op> {
    let callable = |op: &&Op| !op.sig.is_empty();
    match std::env::var("PERILUNE_OPS") {
        Ok(names) => {
            let find = |name| ops::by_name(name).filter(callable);
            let find = |name| find(name).unwrap_or_else(|| panic!("PERILUNE_OPS: a recipe can call no op {name}"));
            names.split(',').map(find).collect()
        }
        Err(_) => ops::all().iter().copied().filter(callable).collect(),
    }
}

/// Asserts that a sweep over [`callable_ops`] made more than `least` checks, unless `PERILUNE_OPS` chose some ops.
pub fn assert_swept(checks: usize, least: usize) {
    assert!(checks > least || std::env::var_os("PERILUNE_OPS").is_some(), "only {checks} checks");
}

/// Creates an engine on [`device`].
pub fn engine(threads: usize) -> Engine {
    let mut e = Engine::new(device(threads));
    e.switches.fusion = true;
    e
}

/// Uploads a tensor to the engine in the given layout.
pub fn upload(e: &mut Engine, d: &Data, layout: Layout) -> NodeId {
    let rank = d.dims.len();
    match layout {
        Layout::Contiguous => e.from_host(d.host()),
        Layout::Transposed => {
            let dims: Vec<usize> = d.dims.iter().rev().copied().collect();
            let mut values = vec![0.0; d.values.len()];
            for (i, v) in d.values.iter().enumerate() {
                let mut at = index(i, &d.dims);
                at.reverse();
                values[offset(&at, &dims)] = *v;
            }
            let x = e.from_host(HostTensor::from_f64(d.dtype, Shape::of(&dims), &values));
            let axes: Vec<usize> = (0..rank).rev().collect();
            e.recorder.graph.permute(x, &axes).unwrap()
        }
        Layout::Sliced => {
            let mut wide: Vec<usize> = d.dims.clone();
            if rank == 0 {
                wide = vec![3];
            } else {
                wide[0] = 2 * wide[0] + 1;
                wide[rank - 1] += 3;
            }
            let poison = if d.dtype.is_float() { f64::NAN } else { 99.0 };
            let mut values = vec![poison; wide.iter().product()];
            for (i, v) in d.values.iter().enumerate() {
                let mut at = index(i, &d.dims);
                match rank {
                    0 => at = vec![1],
                    1 => at[0] = 2 * at[0] + 1,
                    _ => {
                        at[0] = 2 * at[0] + 1;
                        at[rank - 1] += 2;
                    }
                }
                values[offset(&at, &wide)] = *v;
            }
            let x = e.from_host(HostTensor::from_f64(d.dtype, Shape::of(&wide), &values));
            let g = &mut e.recorder.graph;
            match rank {
                0 => {
                    let y = g.slice(x, 0, 1, 2, 1).unwrap();
                    g.reshape(y, &[]).unwrap()
                }
                1 => g.slice(x, 0, 1, 1 + 2 * d.dims[0], 2).unwrap(),
                _ => {
                    let y = g.slice(x, 0, 1, 1 + 2 * d.dims[0], 2).unwrap();
                    g.slice(y, rank - 1, 2, 2 + d.dims[rank - 1], 1).unwrap()
                }
            }
        }
        Layout::Flipped => {
            let mut values = vec![0.0; d.values.len()];
            let ends: Vec<usize> = if rank > 1 { vec![0, rank - 1] } else { (0..rank).collect() };
            for (i, v) in d.values.iter().enumerate() {
                let mut at = index(i, &d.dims);
                for &k in &ends {
                    at[k] = d.dims[k] - 1 - at[k];
                }
                values[offset(&at, &d.dims)] = *v;
            }
            let mut x = e.from_host(HostTensor::from_f64(d.dtype, Shape::of(&d.dims), &values));
            for k in ends {
                x = e.recorder.graph.flip(x, k).unwrap();
            }
            x
        }
    }
}

fn index(mut i: usize, dims: &[usize]) -> Vec<usize> {
    let mut at = vec![0; dims.len()];
    for k in (0..dims.len()).rev() {
        at[k] = i % dims[k];
        i /= dims[k];
    }
    at
}

fn offset(at: &[usize], dims: &[usize]) -> usize {
    at.iter().zip(dims).fold(0, |o, (i, d)| o * d + i)
}

/// Converts the arguments of a case to nodes, with all tensors in `layout`. Also returns the tensors' nodes in order.
pub fn args(e: &mut Engine, case: &Case, layout: Layout) -> (Args, Vec<NodeId>) {
    let (mut values, mut nodes) = (Vec::new(), Vec::new());
    for a in &case.args {
        values.push(match a {
            Arg::Tensor(d) => {
                let x = upload(e, d, layout);
                nodes.push(x);
                Value::Tensor(x)
            }
            Arg::Tensors(ds) => {
                let xs: Vec<NodeId> = ds.iter().map(|d| upload(e, d, layout)).collect();
                nodes.extend(&xs);
                Value::Tensors(xs)
            }
            Arg::Value(v) => v.clone(),
        });
    }
    (Args::new(case.op, values), nodes)
}

/// The outcome of a call.
#[derive(Clone, PartialEq, Debug)]
pub enum Outcome {
    Values(Vec<HostTensor>),
    /// An error, without a panic.
    Refused(String),
    Panicked(String),
}

/// Runs a case on an engine with an empty recording, and empties it again. Random counters start at `seed`.
pub fn run(e: &mut Engine, case: &Case, layout: Layout) -> Outcome {
    run_with(e, |e| {
        let (a, _) = args(e, case, layout);
        e.call(case.op, &a).map(|out| out.to_vec()).map_err(|f| f.error.to_string())
    })
}

/// Records with `f` on an empty engine, reads the nodes that it returns, and clears the engine.
pub fn run_with(e: &mut Engine, f: impl FnOnce(&mut Engine) -> Result<Vec<NodeId>, String>) -> Outcome {
    e.recorder.seed(7);
    let done = catch_unwind(AssertUnwindSafe(|| {
        let ids = f(e)?;
        read_all(e, &ids)
    }));
    match done {
        Ok(Ok(values)) => {
            e.flush().unwrap();
            Outcome::Values(values)
        }
        Ok(Err(text)) => {
            e.flush().unwrap();
            Outcome::Refused(text)
        }
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or(panic.downcast_ref::<&str>().map(|s| (*s).to_string())).unwrap_or_default();
            // After a panic its locks and scratch may be in any state.
            let (threads, fusion) = (1, e.switches.fusion);
            *e = engine(threads);
            e.switches.fusion = fusion;
            Outcome::Panicked(text)
        }
    }
}

/// Evaluates nodes in one plan and reads them.
pub fn read_all(e: &mut Engine, ids: &[NodeId]) -> Result<Vec<HostTensor>, String> {
    e.evaluate(ids).map_err(|f| f.error.to_string())?;
    ids.iter().map(|id| e.read_node(*id).map_err(|f| f.error.to_string())).collect()
}

/// Returns whether two lists of tensors have the same bits; all NaNs are equal.
pub fn same_bits(a: &[HostTensor], b: &[HostTensor]) -> bool {
    a.len() == b.len()
        && a.iter().zip(b).all(|(x, y)| {
            x.dtype == y.dtype
                && x.shape == y.shape
                && (x.bytes == y.bytes
                    || x.dtype.is_float()
                        && (0..x.numel()).all(|i| {
                            let (p, q) = (x.get_f64(i), y.get_f64(i));
                            p.to_bits() == q.to_bits() || p.is_nan() && q.is_nan()
                        }))
        })
}

/// Describes the first difference of two lists of tensors.
pub fn difference(a: &[HostTensor], b: &[HostTensor]) -> String {
    for (k, (x, y)) in a.iter().zip(b).enumerate() {
        if x.dtype != y.dtype || x.shape != y.shape {
            return format!("output {k}: {} {} and {} {}", x.dtype, x.shape, y.dtype, y.shape);
        }
        for i in 0..x.numel() {
            let (p, q) = (x.get_f64(i), y.get_f64(i));
            if p.to_bits() != q.to_bits() && !(p.is_nan() && q.is_nan()) {
                return format!("output {k}, element {i} of {} {}: {p:e} and {q:e}", x.dtype, x.shape);
            }
        }
    }
    format!("{} and {} outputs", a.len(), b.len())
}

/// Makes a host tensor of normal random numbers.
pub fn randn(rng: &mut crate::rng::Pcg, dtype: DType, dims: &[usize]) -> HostTensor {
    let n: usize = dims.iter().product();
    let values: Vec<f64> = (0..n).map(|_| rng.normal()).collect();
    HostTensor::from_f64(dtype, Shape::of(dims), &values)
}

/// Makes every tensor of a case constant along its first dim, so that it can be replaced by a broadcast.
#[must_use]
pub fn constant_rows(case: &Case) -> Case {
    let mut c = case.clone();
    for d in c.tensors_mut() {
        if d.kind == crate::sample::Kind::Perm || d.dims.first().is_none_or(|n| *n < 2) {
            continue;
        }
        let row = d.values.len() / d.dims[0];
        for i in row..d.values.len() {
            d.values[i] = d.values[i - row];
        }
    }
    c
}

/// Runs a case of [`constant_rows`] with each tensor expanded from one row.
pub fn run_broadcast(e: &mut Engine, case: &Case) -> Outcome {
    run_with(e, |e| {
        let mut expand = |d: &Data| {
            if d.kind == crate::sample::Kind::Perm || d.dims.first().is_none_or(|n| *n < 2) {
                return upload(e, d, Layout::Contiguous);
            }
            let mut one = d.clone();
            one.dims[0] = 1;
            one.values.truncate(d.values.len() / d.dims[0]);
            let x = e.from_host(one.host());
            e.recorder.graph.expand(x, Shape::of(&d.dims)).unwrap()
        };
        let values: Vec<Value> = case
            .args
            .iter()
            .map(|a| match a {
                Arg::Tensor(d) => Value::Tensor(expand(d)),
                Arg::Tensors(ds) => Value::Tensors(ds.iter().map(&mut expand).collect()),
                Arg::Value(v) => v.clone(),
            })
            .collect();
        e.call(case.op, &Args::new(case.op, values)).map(|out| out.to_vec()).map_err(|f| f.error.to_string())
    })
}

/// Calls an op by name as Lua does: positional arguments, then options, and defaults for the rest.
pub fn call(e: &mut Engine, name: &str, positional: &[Value], options: &[(&str, Value)]) -> Result<NodeId, String> {
    call_all(e, name, positional, options).map(|out| out[0])
}

/// Like [`call`], but returns all outputs.
pub fn call_all(
    e: &mut Engine,
    name: &str,
    positional: &[Value],
    options: &[(&str, Value)],
) -> Result<Vec<NodeId>, String> {
    let op = perilune_core::ops::by_name(name).ok_or_else(|| format!("no op {name}"))?;
    let params = perilune_core::ops::parse_signature(op.sig)?;
    let mut values: Vec<Value> = params.iter().map(|p| p.default.clone()).collect();
    values[..positional.len()].clone_from_slice(positional);
    for (option, v) in options {
        let at =
            params.iter().position(|p| p.name == *option).ok_or_else(|| format!("{name} has no option {option}"))?;
        values[at] = v.clone();
    }
    e.call(op, &Args::new(op, values)).map(|out| out.to_vec()).map_err(|f| f.error.to_string())
}

/// Makes arguments from a tensor, an integer, a float, a list of integers.
pub fn t(x: NodeId) -> Value {
    Value::Tensor(x)
}

pub fn int(i: i64) -> Value {
    Value::Number(perilune_core::graph::Number::Int(i))
}

pub fn float(f: f64) -> Value {
    Value::Number(perilune_core::graph::Number::Float(f))
}

pub fn ints(v: &[i64]) -> Value {
    Value::Ints(v.into())
}
