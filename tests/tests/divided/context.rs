//! Splits the sequences of the batch: context parallelism.

use crate::step::{Step, assert_near, collectives_along};
use perilune_core::graph::NodeId;
use perilune_core::mesh::{Along, Axis};
use perilune_core::ops::Value;
use perilune_core::{DType, HostTensor, Mesh, Placement, Shape};
use perilune_plan::KeyExchange;
use perilune_plan::request::InputBuffer;
use perilune_tests::harness::{float, int, ints, t};
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
    Spread { mesh, placements: m.s.batch.iter().map(|b| (*b, batch)).chain(states).collect(), strict: None }
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

/// Trains for 20 steps, each from the States that the one before has written.
#[test]
fn twenty_steps() {
    for model in [GPT, Model { documents: true, ..LLAMA }, Model { groups: 1, length: 13, ..LLAMA }] {
        for mesh in ["cp=2", "dp=2,cp=4", "cp=2,tp=2"] {
            let (mut one, mut many) = (model.build(), model.build());
            let spread = spread(&many, mesh);
            for step in 0..20 {
                let (want, _) = one.s.run("", &[]).unwrap();
                let (got, _) = many.s.run_on(&spread).unwrap_or_else(|e| panic!("{mesh}: {e}"));
                assert_near(&format!("{mesh}, step {step}"), &got, &want, 1e-10);
                for (m, values) in [(&mut one, want), (&mut many, got)] {
                    for ((id, _), value) in m.s.request.state_writes.iter().zip(values.states) {
                        m.s.values.insert(InputBuffer::State(*id), value);
                    }
                }
            }
        }
    }
}

/// Keys and values are passed on once less than there are devices, forward and backward, and their gradients as often as there are.
#[test]
fn keys_are_passed_around() {
    let ring = |model, meshes: &[&str]| compare_with(KeyExchange::Ring, model, meshes, ["shift", "all_gather"]);
    assert_eq!(ring(GPT, &["cp=2", "cp=8", "cp=4"]), [20, 0]);
    let few = Model { groups: 1, ..LLAMA };
    assert_eq!(ring(few, &["dp=2,cp=2", "cp=2,tp=2", "cp=4"]), [20, 0]);
    for model in [few, GPT, LLAMA] {
        for documents in [false, true] {
            for causal in [false, true] {
                // Blocks without a key of a query's document: its row is empty in them.
                ring(Model { documents, causal, ..model }, &["cp=4", "cp=2,tp=2"]);
                ring(Model { documents, causal, window: Some(3), ..model }, &["cp=4"]);
                ring(Model { documents, causal, length: 13, dropout: 0.25, ..model }, &["cp=3", "cp=4", "cp=8"]);
            }
        }
    }
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
