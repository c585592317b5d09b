//! Tests the planner on a device that runs nothing: snapshots of typical steps, growth, the cache.
//!
//! `PERILUNE_BLESS=1` rewrites the snapshots in `golden/plans`.
#![allow(clippy::unwrap_used)]

use perilune_core::graph::{Graph, NodeId, Number};
use perilune_core::ops::{Value, create};
use perilune_core::{DType, HostTensor, Layout, Shape, grad};
use perilune_cpu::Cpu;
use perilune_cuda::library::pool;
use perilune_cuda::{attention, conv};
use perilune_engine::{Engine, StateId};
use perilune_plan::ir::{Kernel, Operand, Program, Storage, ValueId};
use perilune_plan::{Backend, BufferDesc, Cache, Null, NullWith, Options, Request, Tracer, show};
use perilune_tests::harness::{call, call_all, float, int, ints, t};
use perilune_tests::machine::compiles;
use std::collections::HashMap;
use std::fmt::Write;
use std::sync::Arc;

type Fallible<T> = Result<T, String>;

/// A recording on the null device, with its assignments.
struct Sketch {
    e: Engine,
    state_writes: Vec<(u64, NodeId)>,
}

impl Sketch {
    fn new() -> Sketch {
        Sketch { e: Engine::new(Arc::new(Null)), state_writes: Vec::new() }
    }

    fn leaf(&mut self, dtype: DType, dims: &[usize]) -> NodeId {
        let shape = Shape::of(dims);
        self.e.from_host(HostTensor::new(dtype, shape, vec![0; shape.numel() * dtype.size()]))
    }

    fn x(&mut self, dims: &[usize]) -> NodeId {
        self.leaf(DType::F32, dims)
    }

    fn ids(&mut self, dims: &[usize]) -> NodeId {
        self.leaf(DType::I64, dims)
    }

    fn call(&mut self, name: &str, args: &[Value]) -> NodeId {
        call(&mut self.e, name, args, &[]).unwrap()
    }

    fn grads(&mut self, y: NodeId, wrt: &[NodeId]) -> Vec<NodeId> {
        let (shape, dtype) = (self.e.recorder.graph.shape(y), self.e.recorder.graph.dtype(y));
        let seed = self.e.recorder.graph.filled(1.0, shape, dtype).unwrap();
        grad::grad(&mut self.e.recorder.graph, y, seed, wrt, false).unwrap().into_iter().map(Option::unwrap).collect()
    }

    /// Makes States of zeros, in a separate generation.
    fn states(&mut self, shapes: &[&[usize]]) -> Vec<StateId> {
        let mut ids = Vec::new();
        for dims in shapes {
            let x = self.x(dims);
            ids.push(self.e.new_state(x, true).unwrap());
        }
        self.e.flush().unwrap();
        ids
    }

    fn assign(&mut self, s: StateId, x: NodeId) {
        self.state_writes.push((s.0, x));
    }

    /// Records the update `step` by AdamW of weights `w` with gradient `g` and moments `m` and `v`.
    fn adamw(&mut self, w: StateId, g: NodeId, m: StateId, v: StateId, step: i64) {
        let nodes: Vec<Value> = [w, m, v].iter().map(|s| t(self.e.state_node(*s).unwrap())).collect();
        let args = [nodes[0].clone(), t(g), nodes[1].clone(), nodes[2].clone()];
        let out = call_all(
            &mut self.e,
            "adamw_update",
            &args,
            &[("lr", float(1e-3)), ("step", int(step)), ("weight_decay", float(0.1))],
        )
        .unwrap();
        for (s, x) in [w, m, v].into_iter().zip(out) {
            self.assign(s, x);
        }
    }

    fn program(&mut self, roots: &[NodeId]) -> Program {
        let request = Request { roots: roots.to_vec(), state_writes: self.state_writes.clone(), ..Request::default() };
        program(&self.e.recorder.graph, &request).unwrap()
    }
}

fn program(g: &Graph, request: &Request) -> Fallible<Program> {
    program_on(g, request, &Null)
}

fn program_on(g: &Graph, request: &Request, backend: &dyn Backend) -> Fallible<Program> {
    let mut tracer = Tracer::default();
    tracer.run(g, request, |_| None);
    let p =
        perilune_plan::pipeline::plan(g, &tracer, request, Options::default(), backend).map_err(|e| e.to_string())?;
    perilune_plan::check::check(&p).map_err(|e| e.to_string())?;
    if p.values.len() < 2000 {
        no_overlap(&p)?;
    }
    Ok(p)
}

/// Values that are live at the same time must not share bytes of the arena, unless one is computed in place of the other.
fn no_overlap(p: &Program) -> Fallible<()> {
    let (mut first, mut last) = (HashMap::new(), HashMap::new());
    for (k, kernel) in p.kernels.iter().enumerate() {
        for v in kernel.writes() {
            first.entry(v).or_insert(k);
            last.insert(v, k);
        }
        for v in kernel.reads() {
            last.insert(v, k);
        }
    }
    let place = |v: &ValueId| match p.values[v.0 as usize].storage {
        Storage::Arena(at) => Some((at, at + p.values[v.0 as usize].nbytes())),
        _ => None,
    };
    for (a, from_a) in &first {
        for (b, from_b) in &first {
            let (Some((a0, a1)), Some((b0, b1))) = (place(a), place(b)) else { continue };
            if a == b || a1 <= b0 || b1 <= a0 || a1 == a0 || b1 == b0 {
                continue;
            }
            let takes_over = (a0, a1) == (b0, b1) && (last[a] == *from_b || last[b] == *from_a);
            if *from_a <= last[b] && *from_b <= last[a] && !takes_over {
                return Err(format!("values {} and {} share memory", a.0, b.0));
            }
        }
    }
    if let Some(out) = first.keys().filter_map(place).find(|(_, end)| *end > p.arena_bytes) {
        return Err(format!("bytes {out:?} of an arena of {}", p.arena_bytes));
    }
    Ok(())
}

fn text(p: &Program) -> String {
    let written: usize = p.outputs.iter().map(BufferDesc::nbytes).sum();
    let mut out = format!(
        "{} kernels, {} inputs, {} outputs of {written} bytes, arena {} bytes, live {} bytes\n",
        p.kernels.len(),
        p.inputs.len(),
        p.outputs.len(),
        p.arena_bytes,
        p.live_bytes
    );
    for k in &p.kernels {
        let space = show::space(k);
        let c = show::cost(p, k);
        let _ = writeln!(out, "{:<48} {:<28} reads {:>8} writes {:>8}", show::name(k), space, c.read, c.written);
    }
    out
}

/// Compares a plan with its snapshot.
fn snapshot(name: &str, p: &Program) {
    let slack = p.live_bytes / 20;
    assert!(p.arena_bytes <= p.live_bytes + slack, "{name}: arena {} for {} live bytes", p.arena_bytes, p.live_bytes);
    compiles(name, p);
    let path = format!("{}/golden/plans/{name}.txt", env!("CARGO_MANIFEST_DIR"));
    let got = text(p);
    if perilune_tests::scripts::blessing() {
        std::fs::write(&path, got).unwrap();
        return;
    }
    let want = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}; PERILUNE_BLESS=1 writes it"));
    assert!(got == want, "the plan of {name} changed; PERILUNE_BLESS=1 accepts it\n--- before\n{want}--- now\n{got}");
}

#[test]
fn elementwise_chain() {
    let mut s = Sketch::new();
    let (x, y) = (s.x(&[64, 1000]), s.x(&[1000]));
    let a = s.call("mul", &[t(x), float(2.0)]);
    let a = s.call("add", &[t(a), t(y)]);
    let a = s.call("tanh", &[t(a)]);
    let a = s.call("gelu", &[t(a)]);
    let p = s.program(&[a]);
    assert_eq!(p.kernels.len(), 1);
    snapshot("elementwise_chain", &p);
}

#[test]
fn softmax_forward_and_backward() {
    let mut s = Sketch::new();
    let (x, w) = (s.x(&[64, 1000]), s.x(&[64, 1000]));
    let y = s.call("softmax", &[t(x), int(-1)]);
    let p = s.program(&[y]);
    assert_eq!(p.kernels.len(), 1);
    snapshot("softmax", &p);
    let l = s.call("mul", &[t(y), t(w)]);
    let l = s.call("sum", &[t(l)]);
    let g = s.grads(l, &[x]);
    let p = s.program(&g);
    snapshot("softmax_backward", &p);
}

#[test]
fn layer_norm_forward_and_backward() {
    let mut s = Sketch::new();
    let (x, w, b, c) = (s.x(&[256, 384]), s.x(&[384]), s.x(&[384]), s.x(&[256, 384]));
    let y = s.call("layer_norm", &[t(x), t(w), t(b)]);
    let p = s.program(&[y]);
    assert_eq!(p.kernels.len(), 1);
    snapshot("layer_norm", &p);
    let l = s.call("mul", &[t(y), t(c)]);
    let l = s.call("sum", &[t(l)]);
    let mut g = s.grads(l, &[x, w, b]);
    g.push(y);
    let p = s.program(&g);
    snapshot("layer_norm_backward", &p);
}

#[test]
fn cross_entropy_forward_and_backward() {
    let mut s = Sketch::new();
    let (x, target) = (s.x(&[128, 1000]), s.ids(&[128]));
    let l = s.call("cross_entropy", &[t(x), t(target)]);
    let p = s.program(&[l]);
    snapshot("cross_entropy", &p);
    let mut g = s.grads(l, &[x]);
    g.push(l);
    let p = s.program(&g);
    snapshot("cross_entropy_backward", &p);
}

#[test]
fn attention_forward_and_backward() {
    let mut s = Sketch::new();
    let (q, k, v, c) = (s.x(&[2, 4, 64, 32]), s.x(&[2, 4, 64, 32]), s.x(&[2, 4, 64, 32]), s.x(&[2, 4, 64, 32]));
    let causal = [("is_causal", Value::Bool(true))];
    let y = call(&mut s.e, "scaled_dot_product_attention", &[t(q), t(k), t(v)], &causal).unwrap();
    let p = s.program(&[y]);
    snapshot("attention", &p);
    let l = s.call("mul", &[t(y), t(c)]);
    let l = s.call("sum", &[t(l)]);
    let g = s.grads(l, &[q, k, v]);
    let p = s.program(&g);
    snapshot("attention_backward", &p);
}

#[test]
fn statistics_of_a_batch() {
    let mut s = Sketch::new();
    let x = s.x(&[32, 16, 8, 8]);
    let m = s.call("mean", &[t(x), ints(&[0, 2, 3])]);
    let v = s.call("var", &[t(x), ints(&[0, 2, 3])]);
    let y = s.call("batch_norm", &[t(x), t(m), t(v)]);
    let p = s.program(&[y, m, v]);
    snapshot("batch_statistics", &p);
}

#[test]
fn dropout_forward_and_backward() {
    let mut s = Sketch::new();
    let (x, w) = (s.x(&[64, 512]), s.x(&[64, 512]));
    let y = s.call("dropout", &[t(x), float(0.1)]);
    let y = s.call("mul", &[t(y), t(w)]);
    let l = s.call("sum", &[t(y)]);
    let mut g = s.grads(l, &[x, w]);
    g.push(y);
    let p = s.program(&g);
    snapshot("dropout_backward", &p);
}

#[test]
fn embedding_backward() {
    let mut s = Sketch::new();
    let (w, ids, c) = (s.x(&[100, 16]), s.ids(&[4, 8]), s.x(&[4, 8, 16]));
    let y = s.call("embedding", &[t(w), t(ids)]);
    let l = s.call("mul", &[t(y), t(c)]);
    let l = s.call("sum", &[t(l)]);
    let g = s.grads(l, &[w]);
    let p = s.program(&g);
    snapshot("embedding_backward", &p);
}

#[test]
fn optimizer_over_many_leaves() {
    let mut s = Sketch::new();
    let shapes: Vec<Vec<usize>> = (1..=12).map(|k| vec![8 * k, 16]).collect();
    let dims: Vec<&[usize]> = shapes.iter().map(Vec::as_slice).collect();
    let (w, m, v) = (s.states(&dims), s.states(&dims), s.states(&dims));
    for (k, d) in dims.iter().enumerate() {
        let g = s.x(d);
        s.adamw(w[k], g, m[k], v[k], 3);
    }
    let p = s.program(&[]);
    snapshot("optimizer", &p);
}

/// The counts of updates are numbers of each weight: weights that were updated less often share the launch.
#[test]
fn weights_with_different_counts_of_updates_share_one_kernel() {
    let mut s = Sketch::new();
    let dims: [&[usize]; 5] = [&[8, 16], &[16], &[16, 16], &[3], &[64, 2]];
    let (w, m, v) = (s.states(&dims), s.states(&dims), s.states(&dims));
    for (k, d) in dims.iter().enumerate() {
        let g = s.x(d);
        s.adamw(w[k], g, m[k], v[k], 1 + 7 * (k as i64 % 3));
    }
    let p = s.program(&[]);
    assert_eq!(p.kernels.len(), 1, "{}", text(&p));
}

#[test]
fn mlp_training_step() {
    let mut s = Sketch::new();
    let dims: [&[usize]; 4] = [&[128, 64], &[128], &[10, 128], &[10]];
    let (w, m, v) = (s.states(&dims), s.states(&dims), s.states(&dims));
    let n: Vec<NodeId> = w.iter().map(|w| s.e.state_node(*w).unwrap()).collect();
    let (x, target) = (s.x(&[32, 64]), s.ids(&[32]));
    let h = s.call("linear", &[t(x), t(n[0]), t(n[1])]);
    let h = s.call("relu", &[t(h)]);
    let y = s.call("linear", &[t(h), t(n[2]), t(n[3])]);
    let l = s.call("cross_entropy", &[t(y), t(target)]);
    for (k, g) in s.grads(l, &n).into_iter().enumerate() {
        s.adamw(w[k], g, m[k], v[k], 3);
    }
    let p = s.program(&[l]);
    snapshot("mlp_step", &p);
}

#[test]
fn convolution_training_step() {
    let mut s = Sketch::new();
    let dims: [&[usize]; 3] = [&[8, 1, 3, 3], &[8], &[10, 8]];
    let w = s.states(&dims);
    let n: Vec<NodeId> = w.iter().map(|w| s.e.state_node(*w).unwrap()).collect();
    let (x, target) = (s.x(&[16, 1, 8, 8]), s.ids(&[16]));
    let h = call(&mut s.e, "conv2d", &[t(x), t(n[0]), t(n[1])], &[("padding", ints(&[1]))]).unwrap();
    let h = s.call("relu", &[t(h)]);
    let h = s.call("max_pool2d", &[t(h), ints(&[2])]);
    let h = s.call("mean", &[t(h), ints(&[2, 3])]);
    let y = s.call("linear", &[t(h), t(n[2])]);
    let l = s.call("cross_entropy", &[t(y), t(target)]);
    for (k, g) in s.grads(l, &n).into_iter().enumerate() {
        let step = s.call("mul", &[t(g), float(0.1)]);
        let new = s.call("sub", &[t(n[k]), t(step)]);
        s.assign(w[k], new);
    }
    let p = s.program(&[l]);
    snapshot("conv_step", &p);
}

/// A transformer block as in `recipes/chargpt.lua`: 2 sequences of 16 tokens, width 32, 4 heads, 50 letters.
fn transformer(s: &mut Sketch) -> NodeId {
    let dims: [&[usize]; 9] = [&[50, 32], &[32], &[32], &[96, 32], &[32, 32], &[32], &[32], &[128, 32], &[32, 128]];
    let (w, m, v) = (s.states(&dims), s.states(&dims), s.states(&dims));
    let n: Vec<NodeId> = w.iter().map(|w| s.e.state_node(*w).unwrap()).collect();
    let (ids, target) = (s.ids(&[2, 16]), s.ids(&[2, 16]));
    let x = s.call("embedding", &[t(n[0]), t(ids)]);
    let h = s.call("layer_norm", &[t(x), t(n[1]), t(n[2])]);
    let qkv = s.call("linear", &[t(h), t(n[3])]);
    let parts = call_all(&mut s.e, "split", &[t(qkv), ints(&[32]), int(-1)], &[]).unwrap();
    let heads: Vec<Value> = parts
        .into_iter()
        .map(|p| {
            let p = s.call("reshape", &[t(p), ints(&[2, 16, 4, 8])]);
            t(s.call("transpose", &[t(p), int(1), int(2)]))
        })
        .collect();
    let a = call(&mut s.e, "scaled_dot_product_attention", &heads, &[("is_causal", Value::Bool(true))]).unwrap();
    let a = s.call("transpose", &[t(a), int(1), int(2)]);
    let a = s.call("reshape", &[t(a), ints(&[2, 16, 32])]);
    let a = s.call("linear", &[t(a), t(n[4])]);
    let x = s.call("add", &[t(x), t(a)]);
    let h = s.call("layer_norm", &[t(x), t(n[5]), t(n[6])]);
    let h = s.call("linear", &[t(h), t(n[7])]);
    let h = s.call("gelu", &[t(h)]);
    let h = s.call("linear", &[t(h), t(n[8])]);
    let x = s.call("add", &[t(x), t(h)]);
    let y = s.call("linear", &[t(x), t(n[0])]);
    let l = s.call("cross_entropy", &[t(y), t(target)]);
    for (k, g) in s.grads(l, &n).into_iter().enumerate() {
        s.adamw(w[k], g, m[k], v[k], 3);
    }
    l
}

#[test]
fn transformer_training_step() {
    let mut s = Sketch::new();
    let l = transformer(&mut s);
    let p = s.program(&[l]);
    snapshot("transformer_step", &p);
}

/// The attention half of a GPT-2 block under autocast, on a device with a GPU's kernels: heads need no copy, gradients of
/// queries, keys and values are stored packed, and a normalised row is recomputed from the row and its statistics.
#[test]
fn attention_block_on_a_gpu() {
    let gpu = NullWith {
        has_kernel: |n| n.op.name == "linear" || attention::has_kernel(n),
        can_store_layout: attention::can_store_layout,
    };
    let mut s = Sketch::new();
    let dims: [&[usize]; 8] = [&[64], &[64], &[192, 64], &[192], &[64, 64], &[64], &[64], &[64]];
    let w = s.states(&dims);
    let n: Vec<NodeId> = w.iter().map(|w| s.e.state_node(*w).unwrap()).collect();
    let (x, c) = (s.x(&[2, 16, 64]), s.x(&[2, 16, 64]));
    s.e.recorder.graph.modes.autocast = Some(DType::BF16);
    let h = s.call("layer_norm", &[t(x), t(n[0]), t(n[1])]);
    let qkv = s.call("linear", &[t(h), t(n[2]), t(n[3])]);
    let qkv = s.call("reshape", &[t(qkv), ints(&[2, 16, 6, 32])]);
    let qkv = s.call("transpose", &[t(qkv), int(1), int(2)]);
    let heads: Vec<Value> = (0..3).map(|k| t(s.call("narrow", &[t(qkv), int(1), int(2 * k), int(2)]))).collect();
    let a = call(&mut s.e, "scaled_dot_product_attention", &heads, &[("is_causal", Value::Bool(true))]).unwrap();
    let a = s.call("transpose", &[t(a), int(1), int(2)]);
    let a = s.call("reshape", &[t(a), ints(&[2, 16, 64])]);
    let a = s.call("linear", &[t(a), t(n[4]), t(n[5])]);
    let y = s.call("add", &[t(x), t(a)]);
    let y = s.call("layer_norm", &[t(y), t(n[6]), t(n[7])]);
    s.e.recorder.graph.modes.autocast = None;
    let l = s.call("mul", &[t(y), t(c)]);
    let l = s.call("sum", &[t(l)]);
    let roots = s.grads(l, &[&[x], &n[..]].concat());
    let request = Request { roots, ..Request::default() };
    let p = program_on(&s.e.recorder.graph, &request, &gpu).unwrap();
    for k in &p.kernels {
        let name = show::name(k);
        assert!(name != "copy" && name != "cat", "{}", text(&p));
    }
    snapshot("attention_block_gpu", &p);
}

/// A bias that is one number for all columns, on a device with a GPU's kernels: it is stored as a row, as cuBLASLt
/// requires.
#[test]
fn a_bias_is_stored_as_a_row() {
    let gpu = NullWith { has_kernel: |n| n.op.name == "linear", can_store_layout: |_, _, _| false };
    let mut s = Sketch::new();
    let (x, w, one) = (s.x(&[32, 64]), s.x(&[16, 64]), s.x(&[1]));
    let zeros = s.e.recorder.graph.filled(0.0, Shape::of(&[16]), DType::F32).unwrap();
    let spread = s.call("expand", &[t(one), ints(&[16])]);
    for bias in [zeros, spread] {
        let y = s.call("linear", &[t(x), t(w), t(bias)]);
        let request = Request { roots: vec![y], ..Request::default() };
        let p = program_on(&s.e.recorder.graph, &request, &gpu).unwrap();
        let row = p.kernels.iter().any(|k| match k {
            Kernel::Library(l) => matches!(&l.inputs[2], Operand::View(_, bias) if bias.strides() == [1]),
            _ => false,
        });
        assert!(row, "{}", text(&p));
    }
}

/// Attention in f32 on the CPU: products write their result, and `cat` the gradient of the packed projection, with heads and
/// rows swapped.
#[test]
fn attention_on_the_cpu_copies_nothing() {
    let mut s = Sketch::new();
    let (x, w, o) = (s.x(&[2, 16, 64]), s.x(&[192, 64]), s.x(&[64, 64]));
    let qkv = s.call("linear", &[t(x), t(w)]);
    let qkv = s.call("reshape", &[t(qkv), ints(&[2, 16, 6, 32])]);
    let qkv = s.call("transpose", &[t(qkv), int(1), int(2)]);
    let heads: Vec<Value> = (0..3).map(|k| t(s.call("narrow", &[t(qkv), int(1), int(2 * k), int(2)]))).collect();
    let a = call(&mut s.e, "scaled_dot_product_attention", &heads, &[("is_causal", Value::Bool(true))]).unwrap();
    let a = s.call("transpose", &[t(a), int(1), int(2)]);
    let a = s.call("reshape", &[t(a), ints(&[2, 16, 64])]);
    let y = s.call("linear", &[t(a), t(o)]);
    let y = s.call("mul", &[t(y), t(y)]);
    let l = s.call("sum", &[t(y)]);
    let roots = s.grads(l, &[x, w, o]);
    let request = Request { roots, ..Request::default() };
    let copies = |backend: &dyn Backend| {
        let p = program_on(&s.e.recorder.graph, &request, backend).unwrap();
        p.kernels.iter().filter(|k| show::name(k) == "copy").count()
    };
    assert!(copies(&Null) >= 2);
    assert_eq!(copies(&Cpu::new(Some(1))), 0);
}

/// Packed documents on a device with a GPU's kernels: their bounds are computed once for forward and backward, and scores are
/// not stored.
#[test]
fn attention_within_documents_on_a_gpu() {
    let gpu = NullWith { has_kernel: attention::has_kernel, can_store_layout: attention::can_store_layout };
    let mut s = Sketch::new();
    let (q, k, v, c) = (s.x(&[2, 4, 96, 32]), s.x(&[2, 2, 96, 32]), s.x(&[2, 2, 96, 32]), s.x(&[2, 4, 96, 32]));
    let tokens = s.ids(&[2, 96]);
    let ends = s.call("eq", &[t(tokens), int(0)]);
    let ends = s.e.recorder.graph.cast(ends, DType::I64).unwrap();
    let ids = s.call("cumsum", &[t(ends), int(1)]);
    let ids = s.call("sub", &[t(ids), t(ends)]);
    let yes = || Value::Bool(true);
    let options = [("is_causal", yes()), ("enable_gqa", yes()), ("documents", t(ids))];
    s.e.recorder.graph.modes.autocast = Some(DType::BF16);
    let y = call(&mut s.e, "scaled_dot_product_attention", &[t(q), t(k), t(v)], &options).unwrap();
    s.e.recorder.graph.modes.autocast = None;
    let l = s.call("mul", &[t(y), t(c)]);
    let l = s.call("sum", &[t(l)]);
    let roots = s.grads(l, &[q, k, v]);
    let p = program_on(&s.e.recorder.graph, &Request { roots, ..Request::default() }, &gpu).unwrap();
    snapshot("attention_documents_gpu", &p);
}

/// A strided bottleneck of a ResNet under autocast, on a device with a GPU's kernels: all images are stored
/// channels last, and no kernel copies, pads or transposes.
#[test]
fn resnet_block_on_a_gpu() {
    let gpu = NullWith {
        has_kernel: |n| conv::has_kernel(n) || pool::has_kernel(n),
        can_store_layout: |n, output, l| conv::can_store_layout(n, output, l) || pool::can_store_layout(n, output, l),
    };
    let mut s = Sketch::new();
    let dims: [&[usize]; 5] = [&[16, 3, 7, 7], &[8, 16, 1, 1], &[8, 8, 3, 3], &[32, 8, 1, 1], &[32, 16, 1, 1]];
    let mut shapes: Vec<&[usize]> = dims.to_vec();
    for d in dims {
        shapes.extend([&d[..1], &d[..1]]);
    }
    let n: Vec<NodeId> = s.states(&shapes).iter().map(|w| s.e.state_node(*w).unwrap()).collect();
    let x = s.x(&[4, 3, 32, 32]);
    s.e.recorder.graph.modes.autocast = Some(DType::BF16);
    // Convolution k with its norm.
    let conv_norm = |s: &mut Sketch, x: NodeId, k: usize, stride: i64| {
        let padding = dims[k][2] as i64 / 2;
        let options = [("stride", ints(&[stride])), ("padding", ints(&[padding]))];
        let y = call(&mut s.e, "conv2d", &[t(x), t(n[k])], &options).unwrap();
        call_all(&mut s.e, "batch_norm_train", &[t(y), t(n[5 + 2 * k]), t(n[6 + 2 * k])], &[]).unwrap()[0]
    };
    let y = conv_norm(&mut s, x, 0, 2);
    let y = s.call("relu", &[t(y)]);
    let options = [("stride", ints(&[2])), ("padding", ints(&[1]))];
    let h = call(&mut s.e, "max_pool2d", &[t(y), ints(&[3])], &options).unwrap();
    let y = conv_norm(&mut s, h, 1, 1);
    let y = s.call("relu", &[t(y)]);
    let y = conv_norm(&mut s, y, 2, 2);
    let y = s.call("relu", &[t(y)]);
    let y = conv_norm(&mut s, y, 3, 1);
    let short = conv_norm(&mut s, h, 4, 2);
    let y = s.call("add", &[t(y), t(short)]);
    let y = s.call("relu", &[t(y)]);
    let l = s.call("mean", &[t(y), ints(&[2, 3])]);
    s.e.recorder.graph.modes.autocast = None;
    let l = s.call("mul", &[t(l), t(l)]);
    let l = s.call("sum", &[t(l)]);
    let roots = s.grads(l, &n);
    let request = Request { roots, ..Request::default() };
    let p = program_on(&s.e.recorder.graph, &request, &gpu).unwrap();
    for k in &p.kernels {
        let name = show::name(k);
        assert!(!["copy", "cat", "strided_pad", "col2im"].contains(&&*name), "{}", text(&p));
        // The operands of convolutions and pooling are stored channels last too, including weights.
        let Kernel::Library(l) = k else { continue };
        for (o, layout) in
            l.inputs.iter().map(|o| (o.shape(), layout_of(o))).chain([(Shape::SCALAR, Some(l.layouts[0]))])
        {
            let last = |l: &Layout| l.permute(&[0, 2, 3, 1]).is_dense();
            assert!(layout.as_ref().is_none_or(last), "{name} reads {o} as {layout:?}\n{}", text(&p));
        }
    }
    // A norm reads its input once for the statistics; a region of columns is not split by the batch.
    let sums = p.kernels.iter().filter(|k| show::name(k).contains("col_sum")).count();
    assert!(sums <= 5 * 3, "{}", text(&p));
    snapshot("resnet_block_gpu", &p);
}

/// Returns the layout of an operand that is a view of an image.
fn layout_of(o: &Operand) -> Option<Layout> {
    match o {
        Operand::View(_, l) if l.shape.rank() == 4 => Some(*l),
        _ => None,
    }
}

/// The plan and its key mark the TF32 products of a step in the forward and the backward pass, and no other node.
#[test]
fn tf32_is_part_of_the_plan() {
    let record = |tf32: bool| {
        let mut s = Sketch::new();
        let (x, w, b) = (s.x(&[8, 16]), s.x(&[4, 16]), s.x(&[4]));
        let (image, filter) = (s.x(&[1, 2, 8, 8]), s.x(&[3, 2, 3, 3]));
        s.e.recorder.graph.modes.tf32 = tf32;
        let y = s.call("linear", &[t(x), t(w), t(b)]);
        let y = s.call("softmax", &[t(y), int(-1)]);
        let z = s.call("conv2d", &[t(image), t(filter)]);
        s.e.recorder.graph.modes.tf32 = false;
        let wt = s.e.recorder.graph.t(w).unwrap();
        let plain = s.call("matmul", &[t(x), t(wt)]);
        let l = ["sum"; 2].iter().zip([y, z]).map(|(f, y)| s.call(f, &[t(y)])).collect::<Vec<_>>();
        let l = s.call("add", &[t(l[0]), t(l[1])]);
        let roots = [s.grads(l, &[x, w, image, filter]), vec![plain, y, z]].concat();
        let request = Request { roots, ..Request::default() };
        let mut tracer = Tracer::default();
        tracer.run(&s.e.recorder.graph, &request, |id| {
            s.e.recorder.graph.node(id).op.eq(&create::LEAF).then(|| s.e.recorder.graph.node(id).payload)
        });
        (program_on(&s.e.recorder.graph, &request, &Null).unwrap(), tracer.trace.key)
    };
    let ((low, low_key), (exact, exact_key)) = (record(true), record(false));
    assert_ne!(low_key, exact_key);
    let products = |p: &Program| {
        let calls = p.kernels.iter().filter_map(|k| if let Kernel::Library(l) = k { Some(l) } else { None });
        calls.filter(|l| l.op.name == "matmul").map(|l| l.tf32).collect::<Vec<_>>()
    };
    let (low, exact) = (products(&low), products(&exact));
    assert_eq!(low.len(), exact.len() + 1, "the product outside of tf32 is another than that inside");
    assert_eq!((low.iter().filter(|t| !**t).count(), exact.iter().filter(|t| **t).count()), (1, 0), "{low:?}");
    assert!(low.len() >= 6, "{low:?}");
}

// ---- growth ----------------------------------------------------------------------------------------------------------

/// Runs `f` on a stack too small for any recursion over a graph.
fn on_small_stack(f: impl FnOnce() + Send + 'static) {
    let thread = std::thread::Builder::new().stack_size(512 << 10).spawn(f).unwrap();
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// Records a chain of `n` ops over one leaf. Every tenth op reduces, so the chain cannot be one kernel.
fn chain(n: usize) -> (Graph, NodeId, NodeId) {
    let mut g = Graph::new();
    let leaf = g.leaf(&create::LEAF, Shape::of(&[8]), DType::F32, &[], 1);
    let mut x = leaf;
    while g.len() < n {
        x = g.tanh(x).unwrap();
        if g.len().is_multiple_of(10) {
            let total = g.sum(x, &[0], true).unwrap();
            x = g.sub(x, total).unwrap();
        }
    }
    (g, leaf, x)
}

/// Records `n` independent ops over one leaf, all of them roots.
fn wide(n: usize) -> (Graph, Vec<NodeId>) {
    let mut g = Graph::new();
    let leaf = g.leaf(&create::LEAF, Shape::of(&[8]), DType::F32, &[], 1);
    let mut roots = Vec::new();
    while g.len() < n {
        let s = g.scalar(Number::Float(g.len() as f64), DType::F32);
        let y = g.mul(leaf, s).unwrap();
        roots.push(g.sum_all(y).unwrap());
    }
    (g, roots)
}

/// Counts words of the key, kernels, values and instructions.
fn sizes(p: &Program) -> [usize; 3] {
    let body = |k: &Kernel| k.regions().iter().map(|r| r.body.len()).sum::<usize>().max(1);
    [p.kernels.len(), p.values.len(), p.kernels.iter().map(body).sum()]
}

#[test]
fn plans_grow_linearly_and_nothing_recurses() {
    on_small_stack(|| {
        let plan_chain = |n: usize| {
            let (g, _, x) = chain(n);
            sizes(&program(&g, &Request { roots: vec![x], ..Request::default() }).unwrap())
        };
        let plan_wide = |n: usize| {
            let (g, roots) = wide(n);
            sizes(&program(&g, &Request { roots, ..Request::default() }).unwrap())
        };
        for (small, large, what) in
            [(plan_chain(20_000), plan_chain(200_000), "chain"), (plan_wide(20_000), plan_wide(200_000), "wide graph")]
        {
            for (a, b) in small.iter().zip(&large) {
                assert!(
                    *b <= 11 * a + 100,
                    "a {what} of ten times the nodes has {small:?} and {large:?} kernels, values, instructions"
                );
            }
        }
    });
}

#[test]
fn gradients_of_long_chains_grow_linearly() {
    on_small_stack(|| {
        let count = |n: usize| {
            let (mut g, leaf, x) = chain(n);
            let y = g.sum_all(x).unwrap();
            let one = g.constant(1.0, DType::F32);
            let d = grad::grad(&mut g, y, one, &[leaf], false).unwrap()[0].unwrap();
            let p = program(&g, &Request { roots: vec![d], ..Request::default() }).unwrap();
            (g.len(), sizes(&p))
        };
        let ((a, small), (b, large)) = (count(10_000), count(100_000));
        assert!(b <= 11 * a, "{a} and {b} nodes");
        assert!(large.iter().zip(&small).all(|(l, s)| *l <= 11 * s + 100), "{small:?} and {large:?}");
    });
}

// ---- the cache -------------------------------------------------------------------------------------------------------

/// Records `tanh(x * k)` over a leaf of `n` elements and looks its plan up.
fn look_up(cache: &mut Cache, n: usize, k: f64, op: &str, leaf: u64) -> bool {
    let mut g = Graph::new();
    let x = g.leaf(&create::LEAF, Shape::of(&[n]), DType::F32, &[], leaf);
    let s = g.scalar(Number::Float(k), DType::F32);
    let y = g.mul(x, s).unwrap();
    let y = if op == "tanh" { g.tanh(y).unwrap() } else { g.exp(y).unwrap() };
    let request = Request { roots: vec![y], ..Request::default() };
    let mut tracer = Tracer::default();
    tracer.run(&g, &request, |_| None);
    cache.get(&g, &tracer, &request, Options::default(), &Null).unwrap().1
}

#[test]
fn numbers_and_buffers_hit_shapes_and_ops_miss() {
    let mut c = Cache::default();
    assert!(!look_up(&mut c, 4, 2.0, "tanh", 1));
    assert!(look_up(&mut c, 4, 2.0, "tanh", 1), "the same graph");
    assert!(look_up(&mut c, 4, 3.5, "tanh", 1), "another number");
    assert!(look_up(&mut c, 4, 2.0, "tanh", 9), "another buffer");
    assert!(!look_up(&mut c, 5, 2.0, "tanh", 1), "another shape");
    assert!(!look_up(&mut c, 4, 2.0, "exp", 1), "another op");
    assert!(look_up(&mut c, 4, 2.0, "tanh", 1), "the first is still there");
    assert_eq!((c.len(), c.counts.hits, c.counts.misses), (3, 4, 3));
}

#[test]
fn aliasing_and_order_of_roots_are_in_the_key() {
    let mut c = Cache::default();
    let mut get = |second: u64, swap: bool| {
        let mut g = Graph::new();
        let x = g.leaf(&create::LEAF, Shape::of(&[4]), DType::F32, &[], 1);
        let y = g.leaf(&create::LEAF, Shape::of(&[4]), DType::F32, &[], second);
        let (a, b) = (g.add_(x, y).unwrap(), g.sub(x, y).unwrap());
        let request = Request { roots: if swap { vec![b, a] } else { vec![a, b] }, ..Request::default() };
        let mut tracer = Tracer::default();
        tracer.run(&g, &request, |_| None);
        c.get(&g, &tracer, &request, Options::default(), &Null).unwrap().1
    };
    assert!(!get(2, false));
    assert!(!get(1, false), "one buffer twice is another plan than two buffers");
    assert!(!get(2, true), "roots in another order");
    assert!(get(7, false));
}

#[test]
fn states_and_other_leaves_have_different_plans() {
    // Found by the fuzzer: a plan that returns its input was reused for a State, whose buffer changes later.
    let mut c = Cache::default();
    let mut get = |op| {
        let mut g = Graph::new();
        let x = g.leaf(op, Shape::of(&[4]), DType::F32, &[], 1);
        let y = perilune_core::ops::movement::detach(&mut g, x).unwrap();
        let request = Request { roots: vec![y], ..Request::default() };
        let mut tracer = Tracer::default();
        tracer.run(&g, &request, |_| None);
        let (plan, hit) = c.get(&g, &tracer, &request, Options::default(), &Null).unwrap();
        (plan.step.program.outputs.len(), hit)
    };
    assert_eq!(get(&create::LEAF), (0, false));
    assert_eq!(get(&create::STATE), (1, false));
}

#[test]
fn the_cache_is_bounded_and_drops_what_was_unused_longest() {
    let mut c = Cache::new(20_000);
    for n in 1..200 {
        look_up(&mut c, n, 1.0, "tanh", 1);
        assert!(look_up(&mut c, 1, 1.0, "tanh", 1), "a plan in use was dropped after {n} others");
    }
    assert!(c.len() < 20, "{} plans", c.len());
    assert_eq!(c.counts.evictions as usize + c.len(), 199);
    assert!(!look_up(&mut c, 2, 1.0, "tanh", 1), "an old plan should be gone");
    // A cache smaller than any plan still works.
    let mut tiny = Cache::new(1);
    assert!(!look_up(&mut tiny, 1, 1.0, "tanh", 1));
    assert!(!look_up(&mut tiny, 2, 1.0, "tanh", 1));
    assert_eq!(tiny.len(), 1);
}

#[test]
fn a_repeated_step_is_a_hit() {
    let mut s = Sketch::new();
    let w = s.states(&[&[16, 8], &[16]]);
    for k in 0..5 {
        s.e.begin_step().unwrap();
        let x = s.x(&[4, 8]);
        let n: Vec<NodeId> = w.iter().map(|w| s.e.state_node(*w).unwrap()).collect();
        let y = s.call("linear", &[t(x), t(n[0]), t(n[1])]);
        let l = s.call("mean", &[t(y)]);
        let g = s.grads(l, &n);
        for (i, g) in g.into_iter().enumerate() {
            let step = s.call("mul", &[t(g), float(0.1 / (k + 1) as f64)]);
            let new = s.call("sub", &[t(n[i]), t(step)]);
            s.e.assign(w[i], new).unwrap();
        }
        s.e.end_step(&[l]).unwrap();
    }
    let stats = s.e.stats();
    // One plan initialized the States, the other is the step.
    assert_eq!((stats.misses, stats.hits), (2, 4));
}
