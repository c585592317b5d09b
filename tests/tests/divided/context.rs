//! Splits the sequences of the batch: context parallelism.

use crate::step::{Step, assert_near, collectives_along};
use perilune_core::graph::NodeId;
use perilune_core::mesh::{Along, Axis};
use perilune_core::ops::attention_block::{ATTENTION_BLOCK, merge};
use perilune_core::ops::{self, Value};
use perilune_core::{DType, HostTensor, Mesh, Placement, Shape};
use perilune_plan::KeyExchange;
use perilune_plan::ir::{Kernel, Program};
use perilune_plan::request::InputBuffer;
use perilune_tests::harness::{float, in_soak, int, ints, t};
use perilune_tests::virtual_devices::{self, Spread};

const WIDTH: usize = 16;
const VOCABULARY: usize = 24;

/// A transformer block between an embedding and a head.
#[derive(Clone, Copy)]
struct Model {
    batch: usize,
    /// Positions of a sequence.
    length: usize,
    heads: usize,
    /// Key heads.
    groups: usize,
    rope: bool,
    causal: bool,
    window: Option<i64>,
    documents: bool,
    mask: Mask,
    dropout: f64,
    /// Dropout of attention weights, which the fused op does not have: attention by elementary ops.
    elementary: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Mask {
    None,
    /// Bools for all queries.
    Bool,
    /// A weight for each query and key, which gets a gradient.
    Float,
    /// A weight for each key.
    Keys,
}

const GPT: Model = Model {
    batch: 2,
    length: 16,
    heads: 8,
    groups: 8,
    rope: false,
    causal: true,
    window: None,
    documents: false,
    mask: Mask::None,
    dropout: 0.0,
    elementary: false,
};
const LLAMA: Model = Model { groups: 4, rope: true, ..GPT };

/// A step, and for each weight what devices along tp have of it.
struct Built {
    s: Step,
    along_tp: Vec<Along>,
}

impl Built {
    fn weight(&mut self, dims: &[usize], along: Along) -> NodeId {
        self.along_tp.push(along);
        self.s.weight(dims)
    }

    fn linear(&mut self, x: NodeId, from: usize, to: usize, along: Along) -> NodeId {
        let w = self.weight(&[to, from], along);
        self.s.call("linear", &[t(x), t(w)])
    }

    fn norm(&mut self, x: NodeId) -> NodeId {
        let scale = self.weight(&[WIDTH], Along::Replicated);
        self.s.call("rms_norm", &[t(x), t(scale)])
    }
}

impl Model {
    fn build(self) -> Built {
        let (b, n, heads, groups, d) = (self.batch, self.length, self.heads, self.groups, 4);
        let mut m = Built { s: Step::new(DType::F64), along_tp: Vec::new() };
        let shape = [b, n];
        let ids = m.s.batch_ids(&shape, VOCABULARY);
        // Targets of some tokens are ignored: devices have different numbers of them.
        let targets: Vec<i64> =
            (0..b * n).map(|i| if i % 5 == 0 || i < n / 3 { -100 } else { (i * 7 % VOCABULARY) as i64 }).collect();
        let y = m.s.batch(HostTensor::from_i64(Shape::of(&shape), &targets));
        let table = m.weight(&[VOCABULARY, WIDTH], Along::Replicated);
        let mut x = m.s.call("embedding", &[t(table), t(ids)]);
        if !self.rope {
            // As `wpe(arange(T))`.
            let places = m.weight(&[n, WIDTH], Along::Replicated);
            let at = m.s.call("arange", &[int(n as i64)]);
            let at = m.s.call("embedding", &[t(places), t(at)]);
            x = m.s.call("add", &[t(x), t(at)]);
        }
        let h = m.norm(x);
        let [q, k, v] = [heads, groups, groups].map(|heads| {
            let y = m.linear(h, WIDTH, heads * d, Along::Split(0));
            let y = m.s.call("view", &[t(y), ints(&[b as i64, n as i64, heads as i64, d as i64])]);
            m.s.call("transpose", &[t(y), int(1), int(2)])
        });
        let [q, k] = if self.rope { [q, k].map(|x| m.s.call("rope", &[t(x)])) } else { [q, k] };
        let h = self.attention(&mut m, q, k, v);
        let h = m.s.call("transpose", &[t(h), int(1), int(2)]);
        let h = m.s.call("reshape", &[t(h), ints(&[b as i64, n as i64, (heads * d) as i64])]);
        let h = m.linear(h, heads * d, WIDTH, Along::Split(1));
        let h = if self.dropout > 0.0 { m.s.call("dropout", &[t(h), float(self.dropout)]) } else { h };
        let x = m.s.call("add", &[t(x), t(h)]);
        let h = m.norm(x);
        let h = m.linear(h, WIDTH, 4 * WIDTH, Along::Split(0));
        let h = m.s.call("gelu", &[t(h)]);
        let h = m.linear(h, 4 * WIDTH, WIDTH, Along::Split(1));
        let x = m.s.call("add", &[t(x), t(h)]);
        let h = m.norm(x);
        let logits = m.s.call("linear", &[t(h), t(table)]);
        let logits = m.s.call("flatten", &[t(logits), int(0), int(1)]);
        let y = m.s.call("flatten", &[t(y)]);
        let loss = m.s.call("cross_entropy", &[t(logits), t(y)]);
        m.s.train(loss);
        m
    }

    fn attention(&self, m: &mut Built, q: NodeId, k: NodeId, v: NodeId) -> NodeId {
        let (b, n) = (self.batch, self.length);
        // Documents of different lengths, a few of one token.
        let documents = self.documents.then(|| {
            let ids: Vec<i64> =
                (0..b * n).map(|i| [0, 0, 0, 0, 0, 3, 4, 4, 4, 9, 9, 7, 7, 7, 7, 7][(i + 5 * (i / n)) % 16]).collect();
            m.s.batch(HostTensor::from_i64(Shape::of(&[b, n]), &ids))
        });
        if self.elementary {
            let kt = m.s.call("transpose", &[t(k), int(-2), int(-1)]);
            let x = m.s.call("matmul", &[t(q), t(kt)]);
            let (i, j) = (m.s.call("arange", &[int(n as i64)]), m.s.call("arange", &[int(n as i64)]));
            let i = m.s.call("unsqueeze", &[t(i), int(1)]);
            let later = m.s.call("gt", &[t(j), t(i)]);
            let x = m.s.call("masked_fill", &[t(x), t(later), float(f64::NEG_INFINITY)]);
            let p = m.s.call("softmax", &[t(x), int(-1)]);
            let p = m.s.call("dropout", &[t(p), float(0.25)]);
            return m.s.call("matmul", &[t(p), t(v)]);
        }
        let mask = match self.mask {
            Mask::None => None,
            Mask::Bool => {
                // Query 3 sees no key.
                let seen: Vec<f64> = (0..n * n).map(|i| f64::from(i / n != 3 && i % 3 != 1)).collect();
                Some(m.s.leaf(HostTensor::from_f64(DType::Bool, Shape::of(&[n, n]), &seen)))
            }
            Mask::Float => Some(m.weight(&[n, n], Along::Replicated)),
            Mask::Keys => Some(m.weight(&[1, n], Along::Replicated)),
        };
        let mut options = vec![("is_causal", Value::Bool(self.causal)), ("enable_gqa", Value::Bool(true))];
        options.extend(self.window.map(|w| ("window", int(w))));
        options.extend(documents.map(|d| ("documents", t(d))));
        options.extend(mask.map(|mask| ("mask", t(mask))));
        m.s.with("scaled_dot_product_attention", &[t(q), t(k), t(v)], &options)
    }
}

/// Sequences split along cp, samples along dp, layers along tp.
fn spread(m: &Built, mesh: &str) -> Spread {
    let mesh = Mesh::parse(mesh).unwrap();
    let batch = Placement::REPLICATED.with(Axis::Dp, Along::Split(0)).with(Axis::Cp, Along::Split(1));
    let along = |k: usize| {
        Placement::REPLICATED.with(Axis::Tp, if mesh.size(Axis::Tp) > 1 { m.along_tp[k] } else { Along::Replicated })
    };
    // A weight, its first and its second moment.
    let states = m.s.request.state_writes.iter().enumerate().map(|(k, w)| (InputBuffer::State(w.0), along(k / 3)));
    Spread { mesh, placements: m.s.batch.iter().map(|b| (*b, batch)).chain(states).collect(), ..Spread::default() }
}

/// Compares loss, norm, gradients and new States. Returns the number of all-to-alls and of all-gathers along cp on the last mesh.
fn compare(model: Model, meshes: &[&str]) -> [usize; 2] {
    compare_with(KeyExchange::Auto, model, meshes, ["all_to_all", "all_gather"])
}

/// As [`compare`], with another way to get keys, and counts of other collectives.
fn compare_with(keys: KeyExchange, model: Model, meshes: &[&str], counted: [&str; 2]) -> [usize; 2] {
    let m = model.build();
    let (want, _) = m.s.run("", &[]).unwrap();
    let mut found = [0; 2];
    for mesh in meshes {
        let (graph, spread) = (&m.s.e.recorder.graph, spread(&m, mesh));
        let run = virtual_devices::run_with(graph, &m.s.request, &m.s.values, &spread, keys);
        let (got, program) = run.unwrap_or_else(|e| panic!("{mesh}: {e}"));
        assert_near(mesh, &got, &want, 1e-10);
        let counts = collectives_along(&program, &[Axis::Cp]);
        found = counted.map(|name| counts.get(name).copied().unwrap_or(0));
    }
    found
}

/// The collective that passes keys on.
const MOVED: &str = "collective_permute";

const MESHES: [&str; 3] = ["cp=4", "dp=2,cp=2", "cp=2"];

/// Queries, keys, values and their gradients, the result and its gradient: each once, forward and backward.
#[test]
fn heads_are_exchanged_for_positions() {
    assert_eq!(compare(GPT, &MESHES), [8, 0]);
    assert_eq!(compare(LLAMA, &MESHES), [8, 0]);
    assert_eq!(compare(Model { dropout: 0.25, ..GPT }, &MESHES), [8, 0]);
    assert_eq!(compare(Model { documents: true, window: Some(5), ..LLAMA }, &MESHES)[0], 8);
    assert_eq!(compare(LLAMA, &["cp=2,tp=2", "dp=2,cp=2,tp=2"])[0], 8);
    assert_eq!(compare(GPT, &["cp=8", "cp=2,tp=4", "cp=4,tp=2"])[0], 8);
}

/// Fewer key heads than devices, or a mask: keys and values are gathered, once forward and once backward.
#[test]
fn keys_are_gathered() {
    let few = Model { heads: 4, groups: 1, ..LLAMA };
    assert_eq!(compare(few, &["cp=4", "dp=2,cp=4", "cp=8", "cp=2"]), [0, 4]);
    assert_eq!(compare(LLAMA, &["cp=8", "dp=2,cp=8"]), [0, 4]);
    assert_eq!(compare(LLAMA, &["cp=4,tp=2"])[0], 0);
    for model in [few, Model { groups: 2, ..few }] {
        for window in [None, Some(3)] {
            for documents in [false, true] {
                for causal in [false, true] {
                    assert_eq!(compare(Model { window, documents, causal, ..model }, &["cp=4"])[0], 0);
                }
            }
        }
    }
}

#[test]
fn masks_of_a_call_and_their_gradients() {
    for mask in [Mask::Bool, Mask::Float, Mask::Keys] {
        for documents in [false, true] {
            for causal in [false, true] {
                compare(Model { mask, documents, causal, ..LLAMA }, &["cp=2", "dp=2,cp=4"]);
                compare(Model { mask, documents, causal, length: 13, ..LLAMA }, &["cp=4"]);
            }
        }
    }
}

/// Sequences that no number of devices divides, with NaN in the padding; one token a device; devices without a token.
#[test]
fn uneven_lengths() {
    for length in [13, 8, 5] {
        for model in [GPT, LLAMA, Model { groups: 1, ..LLAMA }, Model { documents: true, ..LLAMA }] {
            let model = Model { length, ..model };
            compare(model, &["cp=2", "cp=4", "cp=8", "dp=2,cp=3"]);
            compare(Model { window: Some(4), dropout: 0.25, documents: true, ..model }, &["cp=3", "cp=4"]);
        }
    }
}

#[test]
fn attention_by_elementary_ops() {
    for length in [16, 13] {
        compare(Model { elementary: true, length, ..GPT }, &["cp=2", "cp=4", "dp=2,cp=2", "cp=2,tp=2"]);
    }
}

#[test]
fn many_steps() {
    for model in [GPT, Model { documents: true, ..LLAMA }, Model { groups: 1, length: 13, ..LLAMA }] {
        train(KeyExchange::Auto, model, &["cp=2", "dp=2,cp=4", "cp=2,tp=2"]);
    }
}

/// As above in a zig-zag ring: grouped queries, documents, chunks with padding, blocks that cannot be halved.
#[test]
fn many_steps_in_a_ring() {
    for model in [GPT, Model { documents: true, ..LLAMA }, Model { groups: 1, length: 15, dropout: 0.25, ..LLAMA }] {
        train(KeyExchange::Ring, model, &["cp=4", "dp=2,cp=2", "cp=3"]);
    }
}

/// Trains for 5 steps, or 20, each from the States that the one before has written.
fn train(keys: KeyExchange, model: Model, meshes: &[&str]) {
    for mesh in meshes {
        let (mut one, mut many) = (model.build(), model.build());
        let spread = spread(&many, mesh);
        for step in 0..in_soak(20, 5) {
            let (want, _) = one.s.run("", &[]).unwrap();
            let run =
                virtual_devices::run_with(&many.s.e.recorder.graph, &many.s.request, &many.s.values, &spread, keys);
            let (got, _) = run.unwrap_or_else(|e| panic!("{mesh}: {e}"));
            assert_near(&format!("{mesh}, step {step}"), &got, &want, 1e-10);
            for (m, values) in [(&mut one, want), (&mut many, got)] {
                for ((id, _), value) in m.s.request.state_writes.iter().zip(values.states) {
                    m.s.values.insert(InputBuffer::State(*id), value);
                }
            }
        }
    }
}

/// Without a causal mask blocks are contiguous. Keys and values are passed on once less than there are devices, forward and
/// backward, and their gradients as often as there are.
#[test]
fn keys_are_passed_around() {
    let ring = |model, meshes: &[&str]| compare_with(KeyExchange::Ring, model, meshes, [MOVED, "all_gather"]);
    let all = Model { causal: false, ..GPT };
    assert_eq!(ring(all, &["cp=2", "cp=8", "cp=4"]), [20, 0]);
    let few = Model { groups: 1, causal: false, ..LLAMA };
    assert_eq!(ring(few, &["dp=2,cp=2", "cp=2,tp=2", "cp=4"]), [20, 0]);
    for model in [few, GPT, LLAMA] {
        for documents in [false, true] {
            for causal in [false, true] {
                // Blocks without a key of a query's document: its row is empty in them.
                ring(Model { documents, causal, ..model }, &["cp=4", "cp=2,tp=2"]);
                ring(Model { documents, causal, window: Some(3), ..model }, &["cp=4"]);
                // Blocks of 5 and 2 positions, with padding; of 4, of which the last has one.
                ring(Model { documents, causal, length: 13, dropout: 0.25, ..model }, &["cp=3", "cp=4", "cp=8"]);
            }
        }
    }
}

/// Of one attention node of p devices, each takes 2 p + 1 products of a chunk of queries and one of keys, forward and backward. They are
/// all that a causal mask leaves, half of the 4 p of contiguous blocks.
#[test]
fn causal_work_is_even_in_zigzag() {
    for p in [2, 4, 8] {
        let mesh = format!("cp={p}");
        let mut found = Vec::new();
        for model in [GPT, Model { causal: false, ..GPT }] {
            let model = Model { length: 16 * p, batch: 1, ..model };
            let m = model.build();
            let (graph, spread) = (&m.s.e.recorder.graph, spread(&m, &mesh));
            let run = virtual_devices::run_with(graph, &m.s.request, &m.s.values, &spread, KeyExchange::Ring);
            let (_, program) = run.unwrap_or_else(|e| panic!("{mesh}: {e}"));
            assert!(program.exchanges.iter().all(|x| x.axis == Axis::Cp));
            let forms: Vec<_> = program.exchanges.iter().map(|x| x.form).collect();
            found.push((forms, products_of_scores(&program)));
        }
        // Scores and their products: 2 forward, and in the backward pass 5. A chunk has 8 positions.
        let of_a_chunk = 8 * 8 * 4 * GPT.heads * 2;
        assert_eq!(found[0], (vec!["zig-zag ring"; 2], 7 * of_a_chunk * (2 * p + 1)), "{mesh}");
        assert_eq!(found[1], (vec!["ring"; 2], 7 * of_a_chunk * 4 * p), "{mesh}");
    }
}

/// FLOP of the products of a device that keep heads apart: those of attention.
fn products_of_scores(program: &Program) -> usize {
    let flops = |k: &Kernel| match k {
        Kernel::Library(l) if l.op.name == "matmul" && l.inputs[0].shape().rank() == 4 => {
            2 * program.values[l.outputs[0].0 as usize].shape.numel() * l.inputs[0].shape().dims()[3]
        }
        _ => 0,
    };
    program.kernels.iter().map(flops).sum()
}

#[test]
fn a_named_exchange_that_is_none_is_refused() {
    let refused = |keys, model: Model| {
        let m = model.build();
        let run =
            virtual_devices::run_with(&m.s.e.recorder.graph, &m.s.request, &m.s.values, &spread(&m, "cp=4"), keys);
        run.unwrap_err()
    };
    let e = refused(KeyExchange::Heads, Model { groups: 1, ..LLAMA });
    assert!(e.contains("keys=heads along cp=4: the devices do not divide the key heads"), "{e}");
    let e = refused(KeyExchange::Ring, Model { mask: Mask::Bool, ..LLAMA });
    assert!(e.contains("keys=ring along cp=4: a mask is given"), "{e}");
    let gathered = compare_with(KeyExchange::Gather, LLAMA, &["cp=2"], ["all_to_all", "all_gather"]);
    assert_eq!(gathered, [0, 4]);
}

/// A query that sees no key of a block takes nothing from it; one that sees none at all has 0. With the logarithm 0 for rows without
/// keys, as attention itself has it, the first would be wrong.
#[test]
fn an_empty_row_of_a_block_weighs_nothing() {
    let mut s = Step::new(DType::F64);
    let [q, k, v] = [4, 6, 6].map(|n| s.batch_randn(&[1, 2, n, 4]));
    // Query 1 sees keys of the second block only, query 2 of the first, query 3 none.
    let rows = [[1, 1, 0, 1, 0, 1], [0, 0, 0, 0, 1, 1], [1, 0, 1, 0, 0, 0], [0; 6]];
    let seen: Vec<f64> = rows.into_iter().flatten().map(f64::from).collect();
    let seen = s.leaf(HostTensor::from_f64(DType::Bool, Shape::of(&[4, 6]), &seen));
    let want = s.with("scaled_dot_product_attention", &[t(q), t(k), t(v)], &[("mask", t(seen))]);
    let blocks = [0, 3].map(|first| {
        let [k, v] = [k, v].map(|x| s.call("narrow", &[t(x), int(2), int(first), int(3)]));
        let seen = s.call("narrow", &[t(seen), int(1), int(first), int(3)]);
        let g = &mut s.e.recorder.graph;
        let out = g.push(&ATTENTION_BLOCK, &[q, k, v, seen], &[0, ops::bits(0.5), 0, 4, 4, 0]).unwrap();
        let lse = ops::out_of(g, out, &[(Shape::of(&[1, 2, 4]), DType::F64)])[1];
        [out, lse]
    });
    let g = &mut s.e.recorder.graph;
    let merged = merge(g, blocks[0], blocks[1]).unwrap()[0];
    let wrong = blocks.map(|[out, lse]| {
        let empty = g.map(&ops::elementwise::ISINF, &[lse]).unwrap();
        let zero = g.constant_like(0.0, lse);
        [out, g.where_(empty, zero, lse).unwrap()]
    });
    let wrong = merge(g, wrong[0], wrong[1]).unwrap()[0];
    s.request.roots = vec![want, merged, wrong];
    let (found, _) = s.run("", &[]).unwrap();
    let [want, merged, wrong] = [0, 1, 2].map(|k| found.roots[k].to_f64());
    let apart = |a: &[f64]| a.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(apart(&merged) < 1e-12, "{merged:?} and {want:?}");
    assert!(apart(&wrong) > 1e-2, "the mistake is not seen");
    assert!(merged[12..16].iter().all(|x| *x == 0.0), "{merged:?}");
}
