//! Records training steps and compares their runs on meshes.

use perilune_core::graph::NodeId;
use perilune_core::mesh::{Along, Axis};
use perilune_core::ops::{Value, collective, create};
use perilune_core::{DType, HostTensor, Mesh, Placement, Shape, grad};
use perilune_engine::Engine;
use perilune_plan::ir::{Kernel, Program};
use perilune_plan::request::InputBuffer;
use perilune_plan::{Null, Request};
use perilune_tests::harness::{call, call_all, float, int, randn, t};
use perilune_tests::rng::Pcg;
use perilune_tests::virtual_devices::{self, Spread, Values};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// A recorded training step with the values of its inputs.
pub struct Step {
    pub e: Engine,
    pub rng: Pcg,
    pub dtype: DType,
    pub values: HashMap<InputBuffer, HostTensor>,
    /// What a mesh may split: inputs with the batch in dim 0.
    pub batch: Vec<InputBuffer>,
    pub weights: Vec<(u64, NodeId)>,
    pub request: Request,
}

impl Step {
    pub fn new(dtype: DType) -> Step {
        let mut e = Engine::new(Arc::new(Null));
        e.recorder.seed(11);
        let (rng, values, request) = (Pcg::new(5), HashMap::new(), Request::default());
        Step { e, rng, dtype, values, batch: Vec::new(), weights: Vec::new(), request }
    }

    pub fn leaf(&mut self, value: HostTensor) -> NodeId {
        let id = self.values.len() as u64 + 1;
        let g = &mut self.e.recorder.graph;
        let node = g.leaf(&create::LEAF, value.shape, value.dtype, &[], id);
        self.values.insert(InputBuffer::Leaf(id), value);
        node
    }

    /// An input with the batch in dim 0.
    pub fn batch(&mut self, value: HostTensor) -> NodeId {
        let node = self.leaf(value);
        self.batch.push(InputBuffer::Leaf(self.e.recorder.graph.node(node).payload));
        node
    }

    pub fn batch_randn(&mut self, dims: &[usize]) -> NodeId {
        let value = randn(&mut self.rng, self.dtype, dims);
        self.batch(value)
    }

    pub fn batch_ids(&mut self, dims: &[usize], below: usize) -> NodeId {
        let n: usize = dims.iter().product();
        let ids: Vec<i64> = (0..n).map(|_| self.rng.below(below) as i64).collect();
        self.batch(HostTensor::from_i64(Shape::of(dims), &ids))
    }

    pub fn state(&mut self, value: HostTensor) -> (u64, NodeId) {
        let id = 1000 + self.values.len() as u64;
        let node = self.e.recorder.graph.leaf(&create::STATE, value.shape, value.dtype, &[], id);
        self.values.insert(InputBuffer::State(id), value);
        (id, node)
    }

    pub fn weight(&mut self, dims: &[usize]) -> NodeId {
        let fan: usize = dims.iter().skip(1).product::<usize>().max(1);
        let value = randn(&mut self.rng, self.dtype, dims);
        let scaled: Vec<f64> = value.to_f64().iter().map(|v| v / (fan as f64).sqrt()).collect();
        let (id, node) = self.state(HostTensor::from_f64(self.dtype, Shape::of(dims), &scaled));
        self.weights.push((id, node));
        node
    }

    pub fn call(&mut self, name: &str, args: &[Value]) -> NodeId {
        call(&mut self.e, name, args, &[]).unwrap()
    }

    pub fn with(&mut self, name: &str, args: &[Value], options: &[(&str, Value)]) -> NodeId {
        call(&mut self.e, name, args, options).unwrap()
    }

    pub fn layer(&mut self, x: NodeId, from: usize, to: usize) -> NodeId {
        let (w, b) = (self.weight(&[to, from]), self.weight(&[to]));
        self.call("linear", &[t(x), t(w), t(b)])
    }

    /// Records gradients, clipping by their norm, and AdamW for every weight.
    pub fn train(&mut self, loss: NodeId) {
        let grads = self.gradients(loss);
        self.update(loss, &grads);
    }

    /// Records the gradient of every weight.
    pub fn gradients(&mut self, loss: NodeId) -> Vec<NodeId> {
        let wrt: Vec<NodeId> = self.weights.iter().map(|w| w.1).collect();
        let g = &mut self.e.recorder.graph;
        let seed = g.filled(1.0, Shape::SCALAR, self.dtype).unwrap();
        grad::grad(g, loss, seed, &wrt, false).unwrap().into_iter().map(Option::unwrap).collect()
    }

    /// Records clipping of gradients by their norm, and AdamW for every weight.
    pub fn update(&mut self, loss: NodeId, grads: &[NodeId]) {
        let squares: Vec<NodeId> = (grads.iter())
            .map(|d| {
                let square = self.call("mul", &[t(*d), t(*d)]);
                self.call("sum", &[t(square)])
            })
            .collect();
        let sum = squares.into_iter().reduce(|a, b| self.call("add", &[t(a), t(b)])).unwrap();
        let norm = self.call("sqrt", &[t(sum)]);
        let inverse = self.call("div", &[float(0.5), t(norm)]);
        let factor = self.with("clamp", &[t(inverse)], &[("max", float(1.0))]);
        self.request.roots = vec![loss, norm];
        self.request.roots.extend(grads);
        for (k, (id, w)) in self.weights.clone().into_iter().enumerate() {
            let d = self.call("mul", &[t(grads[k]), t(factor)]);
            let value = self.values[&InputBuffer::State(id)].clone();
            let zeros = HostTensor::new(value.dtype, value.shape, vec![0; value.bytes.len()]);
            let (m, v) = (self.state(zeros.clone()), self.state(zeros));
            let options = [("lr", float(0.01)), ("step", int(1)), ("weight_decay", float(0.1))];
            let new = call_all(&mut self.e, "adamw_update", &[t(w), t(d), t(m.1), t(v.1)], &options).unwrap();
            self.request.state_writes.extend([id, m.0, v.0].into_iter().zip(new));
        }
    }

    /// Runs the step on a mesh whose `axes` split the batch.
    pub fn run(&self, mesh: &str, axes: &[Axis]) -> Result<(Values, Arc<Program>), String> {
        let placement = axes.iter().fold(Placement::REPLICATED, |p, axis| p.with(*axis, Along::Split(0)));
        let placements = self.batch.iter().map(|b| (*b, placement)).collect();
        self.run_on(&Spread { mesh: Mesh::parse(mesh).unwrap(), placements, ..Spread::default() })
    }

    pub fn run_on(&self, spread: &Spread) -> Result<(Values, Arc<Program>), String> {
        virtual_devices::run(&self.e.recorder.graph, &self.request, &self.values, spread)
    }

    /// Compares every mesh with one device. Returns the collectives of the last one.
    pub fn compare(&self, tolerance: f64, meshes: &[(&str, &[Axis])]) -> BTreeMap<&'static str, usize> {
        let (want, _) = self.run("", &[]).unwrap();
        let mut found = BTreeMap::new();
        for (mesh, axes) in meshes {
            let (got, program) = self.run(mesh, axes).unwrap_or_else(|e| panic!("{mesh}: {e}"));
            assert_near(mesh, &got, &want, tolerance);
            found = collectives(&program);
        }
        found
    }
}

pub fn assert_near(mesh: &str, got: &Values, want: &Values, tolerance: f64) {
    if let Some(text) = difference(got, want, tolerance) {
        panic!("{mesh}: {text}");
    }
}

/// The first difference of more than a part of the largest number. What follows an infinity or NaN is not compared with it.
pub fn difference(got: &Values, want: &Values, tolerance: f64) -> Option<String> {
    for (k, (a, b)) in got.roots.iter().chain(&got.states).zip(want.roots.iter().chain(&want.states)).enumerate() {
        // A result that is a view has the dims of the value that it is a view of.
        if (a.numel(), a.dtype) != (b.numel(), b.dtype) {
            return Some(format!("value {k} is {} {} and not {} {}", a.dtype, a.shape, b.dtype, b.shape));
        }
        let scale = b.to_f64().iter().filter(|v| v.is_finite()).fold(1e-3f64, |m, v| m.max(v.abs()));
        for (i, (x, y)) in a.to_f64().iter().zip(b.to_f64()).enumerate() {
            let same = *x == y || x.is_nan() && y.is_nan();
            let near = (x - y).abs() <= tolerance * scale;
            if !same && !near {
                return Some(format!("value {k} {}, element {i}: {x} and {y}", a.shape));
            }
        }
    }
    None
}

/// Counts the tensors that the collectives of a program move.
pub fn collectives(p: &Program) -> BTreeMap<&'static str, usize> {
    collectives_along(p, &Axis::ALL)
}

/// Counts the tensors that collectives along some axes move.
pub fn collectives_along(p: &Program, axes: &[Axis]) -> BTreeMap<&'static str, usize> {
    let mut out = BTreeMap::new();
    for kernel in &p.kernels {
        if let Kernel::Library(l) = kernel
            && ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute"].contains(&l.op.name)
            && axes.contains(&collective::axis(&l.attrs))
        {
            *out.entry(l.op.name).or_default() += l.inputs.len();
        }
    }
    out
}
