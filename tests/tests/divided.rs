//! Checks that a training step on the virtual devices of a mesh computes what it computes on one device: losses, gradients and
//! updated weights, for models of several kinds and meshes of one and two axes.
#![allow(clippy::unwrap_used)]

use perilune_core::graph::NodeId;
use perilune_core::mesh::{Along, Axis};
use perilune_core::ops::{Value, collective, create};
use perilune_core::{DType, HostTensor, Mesh, Placement, Shape, grad};
use perilune_engine::Engine;
use perilune_plan::ir::{Kernel, Program};
use perilune_plan::request::InputBuffer;
use perilune_plan::{Null, Request};
use perilune_tests::harness::{call, call_all, float, int, ints, randn, t};
use perilune_tests::rng::Pcg;
use perilune_tests::virtual_devices::{self, Spread, Values};
use std::collections::HashMap;
use std::sync::Arc;

/// A recorded training step with the values of its inputs.
struct Step {
    e: Engine,
    rng: Pcg,
    dtype: DType,
    values: HashMap<InputBuffer, HostTensor>,
    /// What a mesh may split: inputs with the batch in dim 0.
    batch: Vec<InputBuffer>,
    weights: Vec<(u64, NodeId)>,
    request: Request,
}

impl Step {
    fn new(dtype: DType) -> Step {
        let mut e = Engine::new(Arc::new(Null));
        e.recorder.seed(11);
        let (rng, values, request) = (Pcg::new(5), HashMap::new(), Request::default());
        Step { e, rng, dtype, values, batch: Vec::new(), weights: Vec::new(), request }
    }

    fn leaf(&mut self, value: HostTensor) -> NodeId {
        let id = self.values.len() as u64 + 1;
        let g = &mut self.e.recorder.graph;
        let node = g.leaf(&create::LEAF, value.shape, value.dtype, &[], id);
        self.values.insert(InputBuffer::Leaf(id), value);
        node
    }

    /// An input with the batch in dim 0.
    fn batch(&mut self, value: HostTensor) -> NodeId {
        let node = self.leaf(value);
        self.batch.push(InputBuffer::Leaf(self.e.recorder.graph.node(node).payload));
        node
    }

    fn batch_randn(&mut self, dims: &[usize]) -> NodeId {
        let value = randn(&mut self.rng, self.dtype, dims);
        self.batch(value)
    }

    fn batch_ids(&mut self, dims: &[usize], below: usize) -> NodeId {
        let n: usize = dims.iter().product();
        let ids: Vec<i64> = (0..n).map(|_| self.rng.below(below) as i64).collect();
        self.batch(HostTensor::from_i64(Shape::of(dims), &ids))
    }

    fn state(&mut self, value: HostTensor) -> (u64, NodeId) {
        let id = 1000 + self.values.len() as u64;
        let node = self.e.recorder.graph.leaf(&create::STATE, value.shape, value.dtype, &[], id);
        self.values.insert(InputBuffer::State(id), value);
        (id, node)
    }

    fn weight(&mut self, dims: &[usize]) -> NodeId {
        let fan: usize = dims.iter().skip(1).product::<usize>().max(1);
        let value = randn(&mut self.rng, self.dtype, dims);
        let scaled: Vec<f64> = value.to_f64().iter().map(|v| v / (fan as f64).sqrt()).collect();
        let (id, node) = self.state(HostTensor::from_f64(self.dtype, Shape::of(dims), &scaled));
        self.weights.push((id, node));
        node
    }

    fn call(&mut self, name: &str, args: &[Value]) -> NodeId {
        call(&mut self.e, name, args, &[]).unwrap()
    }

    fn with(&mut self, name: &str, args: &[Value], options: &[(&str, Value)]) -> NodeId {
        call(&mut self.e, name, args, options).unwrap()
    }

    fn layer(&mut self, x: NodeId, from: usize, to: usize) -> NodeId {
        let (w, b) = (self.weight(&[to, from]), self.weight(&[to]));
        self.call("linear", &[t(x), t(w), t(b)])
    }

    /// Records gradients, clipping by their norm, and AdamW for every weight.
    fn train(&mut self, loss: NodeId) {
        let wrt: Vec<NodeId> = self.weights.iter().map(|w| w.1).collect();
        let g = &mut self.e.recorder.graph;
        let seed = g.filled(1.0, Shape::SCALAR, self.dtype).unwrap();
        let grads: Vec<NodeId> =
            grad::grad(g, loss, seed, &wrt, false).unwrap().into_iter().map(Option::unwrap).collect();
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
        self.request.roots.extend(&grads);
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
    fn run(&self, mesh: &str, axes: &[Axis]) -> Result<(Values, Arc<Program>), String> {
        let placement = axes.iter().fold(Placement::REPLICATED, |p, axis| p.with(*axis, Along::Split(0)));
        let placements = self.batch.iter().map(|b| (*b, placement)).collect();
        self.run_on(&Spread { mesh: Mesh::parse(mesh).unwrap(), placements })
    }

    fn run_on(&self, spread: &Spread) -> Result<(Values, Arc<Program>), String> {
        virtual_devices::run(&self.e.recorder.graph, &self.request, &self.values, spread)
    }

    /// Compares every mesh with one device. Returns the collectives of the last one.
    fn compare(&self, tolerance: f64, meshes: &[(&str, &[Axis])]) -> HashMap<&'static str, usize> {
        let (want, _) = self.run("", &[]).unwrap();
        let mut found = HashMap::new();
        for (mesh, axes) in meshes {
            let (got, program) = self.run(mesh, axes).unwrap_or_else(|e| panic!("{mesh}: {e}"));
            assert_near(mesh, &got, &want, tolerance);
            found = collectives(&program);
        }
        found
    }
}

fn assert_near(mesh: &str, got: &Values, want: &Values, tolerance: f64) {
    for (k, (a, b)) in got.roots.iter().chain(&got.states).zip(want.roots.iter().chain(&want.states)).enumerate() {
        // A result that is a view has the dims of the value that it is a view of.
        assert_eq!((a.numel(), a.dtype), (b.numel(), b.dtype), "{mesh}: value {k}");
        let scale = b.to_f64().iter().fold(1e-3f64, |m, v| m.max(v.abs()));
        for (i, (x, y)) in a.to_f64().iter().zip(b.to_f64()).enumerate() {
            assert!((x - y).abs() <= tolerance * scale, "{mesh}: value {k} {}, element {i}: {x} and {y}", a.shape);
        }
    }
}

/// Counts the collectives of a program.
fn collectives(p: &Program) -> HashMap<&'static str, usize> {
    let mut out = HashMap::new();
    for kernel in &p.kernels {
        if let Kernel::Library(l) = kernel
            && [collective::ALL_REDUCE.name, collective::ALL_GATHER.name, collective::REDUCE_SCATTER.name]
                .contains(&l.op.name)
        {
            *out.entry(l.op.name).or_default() += 1;
        }
    }
    out
}

const DATA_PARALLEL: [(&str, &[Axis]); 4] = [
    ("dp=2", &[Axis::Dp]),
    ("dp=4", &[Axis::Dp]),
    ("shard=8", &[Axis::Shard]),
    ("dp=2,shard=4", &[Axis::Dp, Axis::Shard]),
];

fn mlp(dtype: DType) -> Step {
    let mut s = Step::new(dtype);
    let (x, y) = (s.batch_randn(&[16, 12]), s.batch_ids(&[16], 7));
    let h = s.layer(x, 12, 24);
    let h = s.call("gelu", &[t(h)]);
    let h = s.call("dropout", &[t(h), float(0.25)]);
    let logits = s.layer(h, 24, 7);
    let loss = s.call("cross_entropy", &[t(logits), t(y)]);
    s.train(loss);
    s
}

#[test]
fn a_classifier_with_dropout_and_clipping() {
    let found = mlp(DType::F64).compare(1e-10, &DATA_PARALLEL[..3]);
    // The gradients of four weights, the loss and the number of targets: nothing is gathered.
    assert_eq!(found, HashMap::from([("all_reduce", 6)]));
    mlp(DType::F64).compare(1e-10, &DATA_PARALLEL);
    mlp(DType::F32).compare(2e-5, &DATA_PARALLEL);
}

/// Ignored targets make the parts of the batch count differently.
#[test]
fn a_loss_divides_by_the_tokens_of_all_devices() {
    let mut s = Step::new(DType::F64);
    let x = s.batch_randn(&[8, 5, 6]);
    let ids: Vec<i64> = (0..40).map(|i| if i < 9 || i % 3 == 0 { -100 } else { i % 4 }).collect();
    let y = s.batch(HostTensor::from_i64(Shape::of(&[8, 5]), &ids));
    let h = s.layer(x, 6, 4);
    let (h, y) = (s.call("reshape", &[t(h), ints(&[40, 4])]), s.call("reshape", &[t(y), ints(&[40])]));
    let loss = s.call("cross_entropy", &[t(h), t(y)]);
    s.train(loss);
    s.compare(1e-10, &[("dp=2", &[Axis::Dp]), ("dp=8", &[Axis::Dp]), ("dp=2,shard=2", &[Axis::Dp, Axis::Shard])]);
}

#[test]
fn a_convolution_with_batch_statistics_over_the_whole_batch() {
    let mut s = Step::new(DType::F64);
    let (x, y) = (s.batch_randn(&[8, 2, 6, 6]), s.batch_ids(&[8], 3));
    let (w, b) = (s.weight(&[4, 2, 3, 3]), s.weight(&[4]));
    let h = s.with("conv2d", &[t(x), t(w), t(b)], &[("padding", ints(&[1, 1]))]);
    let (scale, shift) = (s.weight(&[4]), s.weight(&[4]));
    let out = call_all(&mut s.e, "batch_norm_train", &[t(h), t(scale), t(shift)], &[]);
    let h = out.map_or_else(|_| panic!("batch_norm_train"), |o| o[0]);
    let h = s.call("relu", &[t(h)]);
    let h = s.call("max_pool2d", &[t(h), ints(&[2, 2])]);
    let h = s.call("flatten", &[t(h), int(1)]);
    let logits = s.layer(h, 36, 3);
    let loss = s.call("cross_entropy", &[t(logits), t(y)]);
    s.train(loss);
    s.compare(1e-10, &DATA_PARALLEL);
}

#[test]
fn a_transformer_block_with_an_embedding() {
    let mut s = Step::new(DType::F64);
    let (ids, y) = (s.batch_ids(&[8, 6], 11), s.batch_ids(&[8, 6], 11));
    let (table, places) = (s.weight(&[11, 16]), s.weight(&[6, 16]));
    let tokens = s.call("embedding", &[t(table), t(ids)]);
    let x = s.call("add", &[t(tokens), t(places)]);
    let (scale, shift) = (s.weight(&[16]), s.weight(&[16]));
    let h = s.call("layer_norm", &[t(x), t(scale), t(shift)]);
    let qkv = s.layer(h, 16, 48);
    let qkv = s.call("view", &[t(qkv), ints(&[8, 6, 3, 2, 8])]);
    let qkv = s.call("permute", &[t(qkv), ints(&[2, 0, 3, 1, 4])]);
    let [q, k, v] = [0, 1, 2].map(|i| s.call("select", &[t(qkv), int(0), int(i)]));
    let h = s.with("scaled_dot_product_attention", &[t(q), t(k), t(v)], &[("is_causal", Value::Bool(true))]);
    let h = s.call("transpose", &[t(h), int(1), int(2)]);
    let h = s.call("reshape", &[t(h), ints(&[8, 6, 16])]);
    let h = s.layer(h, 16, 16);
    let h = s.call("add", &[t(x), t(h)]);
    let h = s.call("reshape", &[t(h), ints(&[48, 16])]);
    let logits = s.call("transpose", &[t(table), int(0), int(1)]);
    let logits = s.call("matmul", &[t(h), t(logits)]);
    let y = s.call("reshape", &[t(y), ints(&[48])]);
    let loss = s.call("cross_entropy", &[t(logits), t(y)]);
    s.train(loss);
    let found = s.compare(1e-10, &DATA_PARALLEL);
    assert!(!found.contains_key("all_gather"), "{found:?}");
}

/// The first layer is split by columns, the second by rows: one reduction of its result, none of the hidden layer.
#[test]
fn weights_split_along_another_axis() {
    let mut s = Step::new(DType::F64);
    let (x, y) = (s.batch_randn(&[8, 12]), s.batch_ids(&[8], 7));
    let h = s.layer(x, 12, 24);
    let h = s.call("gelu", &[t(h)]);
    let logits = s.layer(h, 24, 7);
    let loss = s.call("cross_entropy", &[t(logits), t(y)]);
    let wrt: Vec<NodeId> = s.weights.iter().map(|w| w.1).collect();
    let g = &mut s.e.recorder.graph;
    let seed = g.filled(1.0, Shape::SCALAR, DType::F64).unwrap();
    s.request.roots = grad::grad(g, loss, seed, &wrt, false).unwrap().into_iter().map(Option::unwrap).collect();
    s.request.roots.push(loss);
    let (want, _) = s.run("", &[]).unwrap();
    let split = |dim| Placement::REPLICATED.with(Axis::Tp, Along::Split(dim));
    let states: Vec<InputBuffer> = s.weights.iter().map(|w| InputBuffer::State(w.0)).collect();
    let batch = |b: &InputBuffer| (*b, Placement::REPLICATED.with(Axis::Dp, Along::Split(0)));
    for mesh in ["tp=2", "tp=4", "dp=2,tp=4"] {
        let weights = [(states[0], split(0)), (states[1], split(0)), (states[2], split(1))];
        let placements = s.batch.iter().map(batch).chain(weights).collect();
        let spread = Spread { mesh: Mesh::parse(mesh).unwrap(), placements };
        let (got, program) = s.run_on(&spread).unwrap_or_else(|e| panic!("{mesh}: {e}"));
        for (k, (a, b)) in got.roots.iter().zip(&want.roots).enumerate() {
            let (a, b) = (a.to_f64(), b.to_f64());
            assert!(a.iter().zip(&b).all(|(x, y)| (x - y).abs() < 1e-12), "{mesh}: root {k}: {a:?} and {b:?}");
        }
        // What is gathered are the gradients that the request returns.
        let found = collectives(&program);
        assert_eq!(found.get("all_gather"), Some(&3), "{mesh}: {found:?}");
        if mesh.starts_with("tp") {
            assert_eq!(found.get("all_reduce"), Some(&1), "{mesh}: {found:?}");
        }
    }
}

/// Where the moments are split, the State writes of a device are its blocks.
#[test]
fn split_moments_are_written_in_blocks() {
    let mut s = Step::new(DType::F64);
    let (x, y) = (s.batch_randn(&[8, 12]), s.batch_ids(&[8], 4));
    let h = s.layer(x, 12, 24);
    let h = s.call("gelu", &[t(h)]);
    let logits = s.layer(h, 24, 4);
    let loss = s.call("cross_entropy", &[t(logits), t(y)]);
    s.train(loss);
    let (want, _) = s.run("", &[]).unwrap();
    let split = Placement::REPLICATED.with(Axis::Dp, Along::Split(0));
    let weights: Vec<u64> = s.weights.iter().map(|w| w.0).collect();
    let moments = s.request.state_writes.iter().map(|w| w.0).filter(|id| !weights.contains(id)).map(InputBuffer::State);
    let placements: HashMap<_, _> = moments.chain(s.batch.iter().copied()).map(|b| (b, split)).collect();
    for mesh in ["dp=2", "dp=4"] {
        let spread = Spread { mesh: Mesh::parse(mesh).unwrap(), placements: placements.clone() };
        let (got, program) = s.run_on(&spread).unwrap_or_else(|e| panic!("{mesh}: {e}"));
        assert_near(mesh, &got, &want, 1e-10);
        let blocks = program.inputs.iter().filter(|i| i.0.dims().first() == Some(&(24 / spread.mesh.devices())));
        assert_eq!(blocks.count(), 4, "{mesh}: moments of a weight and a bias of 24 rows");
    }
}

#[test]
fn a_batch_that_the_axis_does_not_divide_is_refused() {
    let e = mlp(DType::F64).run("dp=3", &[Axis::Dp]).unwrap_err();
    assert!(e.contains("dp=3 does not divide dim 0 of an input of shape {16, 12}"), "{e}");
}
