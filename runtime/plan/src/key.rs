//! Traces the needed part of a recording and writes its canonical plan key.
//!
//! It is one linear pass over the arena that rewrites nothing. The key holds ops, attributes, leaf shapes and dtypes,
//! edges by position, aliasing among leaves, roots, State writes and their guard. It holds no pointers, Lua lines, node
//! ids or run-time numbers, so an edited learning rate or a moved line finds the same plan. Shapes of inner nodes
//! follow from the rest and are left out. The key is only compared and hashed, never parsed: what later passes need
//! (the leaves, the words of each node, the recomputation spans) is returned beside it.

use crate::passes::remat::{self, Spans};
use crate::pipelining::Schedule;
use crate::reachability::{self, NEEDED, RECOMPUTED};
use crate::request::{Division, InputBuffer, KeyExchange, Request};
use perilune_core::graph::{Graph, Node, NodeId};
use perilune_core::id_map::IdMap;
use perilune_core::mesh::Start;
use perilune_core::ops::{Class, Generator, Op, create};
use perilune_core::{DType, Mesh, Placement};
use std::sync::atomic::{AtomicU64, Ordering};

/// The needed part of a graph in canonical order.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// Needed nodes, ascending. The key names a node by its position in this list.
    pub order: Vec<NodeId>,
    /// For each node of `order`: its input number, if its value is read from a buffer.
    pub leaves: Vec<Option<u32>>,
    /// Buffers in order of first use.
    pub inputs: Vec<InputBuffer>,
    /// For each input, a node of its shape and dtype: the first that reads or overwrites it.
    pub input_nodes: Vec<NodeId>,
    /// Bits of the run-time numbers, in order of the nodes that hold them.
    pub slots: Vec<u64>,
    pub slot_dtypes: Vec<DType>,
    /// Where the parts of tensors begin on a device: run-time numbers behind `slots`, in order of the nodes that hold them.
    pub starts: Vec<Start>,
    /// The canonical words.
    pub key: Vec<u64>,
    /// For each State write, the input that it overwrites.
    pub state_write_inputs: Vec<u32>,
    /// The recomputation spans that the recording marks.
    pub spans: Spans,
    /// The devices among which the step is divided; `None` for one device. Set by [`Tracer::divide`].
    pub division: Option<Division>,
}

/// Marks in the upper half of a word. The first word of any other node is an op's code, which fits the lower half.
const LEAF: u64 = 1 << 32;
const ROOT: u64 = 2 << 32;
const GUARD: u64 = 3 << 32;
const STATE_WRITE: u64 = 4 << 32;
const GUARDED_STATE_WRITE: u64 = 5 << 32;
const SPANS: u64 = 6 << 32;
const MESH: u64 = 7 << 32;

/// A 128-bit digest of a key: two multiply-and-fold lanes over different constants. Not cryptographic: a hit is confirmed
/// by comparing the words.
pub fn digest(key: &[u64]) -> u128 {
    let fold = |a: u64, b: u64| {
        let p = (a as u128) * (b as u128);
        (p as u64) ^ ((p >> 64) as u64)
    };
    let (mut x, mut y) = (0x9e37_79b9_7f4a_7c15u64, 0xc2b2_ae3d_27d4_eb4fu64);
    for w in key {
        x = fold(x ^ w, 0xa076_1d64_78bd_642f);
        y = fold(y ^ w.rotate_left(29), 0xe703_7ed1_a0b4_28db);
    }
    ((fold(x ^ key.len() as u64, 0x8ebc_6af0_9c88_c6e3) as u128) << 64) | fold(y, 0x5899_65cc_7537_4cc3) as u128
}

impl Trace {
    fn clear(&mut self) {
        self.order.clear();
        self.leaves.clear();
        self.inputs.clear();
        self.input_nodes.clear();
        self.slots.clear();
        self.slot_dtypes.clear();
        self.starts.clear();
        self.key.clear();
        self.state_write_inputs.clear();
        self.spans = Spans::default();
        self.division = None;
    }

    /// The node whose words hold the first difference from `key`, as a position in `order`.
    pub fn first_difference(&self, g: &Graph, key: &[u64]) -> Option<usize> {
        let at = self.key.iter().zip(key).position(|(a, b)| a != b)?;
        let mut end = 0;
        self.order.iter().zip(&self.leaves).position(|(id, leaf)| {
            end += words(g.node(*id), leaf.is_some());
            at < end
        })
    }
}

/// The number of words of a node in the key.
fn words(node: &Node, is_leaf: bool) -> usize {
    match (is_leaf, node.op.class) {
        (true, _) => 2 + node.shape.rank(),
        (false, Class::Generator(_)) => 3 + node.shape.rank() + node.attrs.len() + node.inputs.len().div_ceil(2),
        (false, _) => 2 + node.attrs.len() + node.inputs.len().div_ceil(2),
    }
}

/// The codes of the ops met last. A code is a hash of the op's name, and a step repeats few ops.
#[derive(Debug)]
struct Codes([(Option<&'static Op>, u32); 64]);

impl Default for Codes {
    fn default() -> Codes {
        Codes([(None, 0); 64])
    }
}

impl Codes {
    fn of(&mut self, op: &'static Op) -> u32 {
        // Ops are statics of several hundred bytes, of which the lower bits of the address tell nothing.
        let place = &mut self.0[(std::ptr::from_ref(op).addr() >> 5) % 64];
        if !place.0.is_some_and(|known| std::ptr::eq(known, op)) {
            *place = (Some(op), op.code());
        }
        place.1
    }
}

/// What was traced last, if the next trace may find that it repeats it: a step that records what the step before recorded has its
/// key, and neither the recording nor the key need be read for that.
#[derive(Debug, Default)]
struct Traced {
    edition: (u64, usize),
    request: Request,
    /// The length of its key; a longer one has words of another pass.
    words: usize,
    /// The nodes of the numbers in `Trace::slots`.
    slots: Vec<NodeId>,
    /// The leaves that are no States, with their inputs.
    leaves: Vec<(NodeId, u32)>,
}

/// Scratch and result of tracing, reused from step to step.
#[derive(Debug, Default)]
pub struct Tracer {
    /// For each node of the graph: 1 + its position in `trace.order`, or 0 if it is not in there.
    position: Vec<u32>,
    pub trace: Trace,
    /// Whether the planner may recompute values by itself, because there is a memory budget. The key then includes what
    /// that choice depends on.
    pub budgeted: bool,
    /// How pipeline stages take turns: see [`Division::schedule`].
    pub schedule: Schedule,
    /// How attention whose queries a mesh splits gets its keys.
    pub keys: KeyExchange,
    /// Whether whole weights are kept to the end of a step: see [`Division::keeps_weights`].
    pub keeps_weights: bool,
    by_buffer: IdMap<InputBuffer, u32>,
    codes: Codes,
    last: Option<Traced>,
    version: u64,
}

impl Tracer {
    /// Traces `request` over `g`. `leaf(id)` returns the buffer of a node that has already been evaluated.
    pub fn run(&mut self, g: &Graph, request: &Request, leaf: impl Fn(NodeId) -> Option<u64>) {
        if self.repeats(g, request, &leaf) {
            return;
        }
        static LAST: AtomicU64 = AtomicU64::new(0);
        self.version = 1 + LAST.fetch_add(1, Ordering::Relaxed);
        let Traced { mut slots, mut leaves, .. } = self.last.take().unwrap_or_default();
        slots.clear();
        leaves.clear();
        let mut evaluated = false;
        let t = &mut self.trace;
        t.clear();
        self.by_buffer.clear();
        let copy = |i: usize| {
            let found = request.copies.binary_search_by_key(&i, |c| c.0.index()).ok()?;
            Some(request.copies[found].1)
        };
        let available = |id: NodeId| leaf(id).is_some() || copy(id.index()).is_some();
        let top = reachability::mark(g, request, available, &mut self.position);
        for i in 0..top {
            let recomputed = self.position[i] == RECOMPUTED;
            if self.position[i] != NEEDED && !recomputed {
                continue;
            }
            let id = NodeId(i as u32);
            t.order.push(id);
            self.position[i] = t.order.len() as u32;
            let node = &g.nodes()[i];
            let value = leaf(id);
            evaluated |= value.is_some();
            let buffer = match value.filter(|_| !recomputed) {
                Some(payload) => Some(InputBuffer::Leaf(payload)),
                None if node.op == &create::LEAF => Some(InputBuffer::Leaf(node.payload)),
                None if node.op == &create::STATE => Some(InputBuffer::State(node.payload)),
                None => copy(i).map(InputBuffer::State),
            };
            if let Some(buffer) = buffer {
                let k = input(t, &mut self.by_buffer, buffer, id);
                if matches!(buffer, InputBuffer::Leaf(_)) {
                    leaves.push((id, k));
                }
                // A State's buffer will change, so it is copied if it is returned; the buffer of any other leaf is
                // returned itself.
                let state = u64::from(matches!(buffer, InputBuffer::State(_)));
                let dtype = node.dtype as u64;
                t.key.extend([LEAF | u64::from(k), dtype | state << 8 | (node.shape.rank() as u64) << 16]);
                t.key.extend(node.shape.dims().iter().map(|&d| d as u64));
                t.leaves.push(Some(k));
                continue;
            }
            let counts = (node.attrs.len() as u64) << 16 | (node.inputs.len() as u64) << 32;
            t.key.extend([u64::from(self.codes.of(node.op)), node.dtype as u64 | u64::from(node.tf32) << 8 | counts]);
            if let Class::Generator(kind) = node.op.class {
                match kind {
                    Generator::Scalar => {
                        slots.push(id);
                        t.slots.push(node.payload);
                        t.slot_dtypes.push(node.dtype);
                    }
                    Generator::Shard => t.starts.push(Start::from_attrs(&node.attrs)),
                    Generator::Constant | Generator::Iota | Generator::Uniform => {}
                }
                t.key.push(node.shape.rank() as u64);
                t.key.extend(node.shape.dims().iter().map(|&d| d as u64));
            }
            t.key.extend(node.attrs.iter().map(|&a| a as u64));
            let position = |x: &NodeId| u64::from(self.position[x.index()]);
            // Two positions a word.
            t.key.extend(node.inputs.chunks(2).map(|pair| match pair {
                [a, b] => position(a) | position(b) << 32,
                rest => rest.iter().map(position).sum(),
            }));
            t.leaves.push(None);
        }
        for r in &request.roots {
            t.key.push(ROOT | u64::from(self.position[r.index()]));
        }
        t.key.extend(request.guard.iter().map(|guard| GUARD | u64::from(self.position[guard.ok.index()])));
        for (i, (state, v)) in request.state_writes.iter().enumerate() {
            let guarded = request.guard.as_ref().is_some_and(|guard| guard.state_writes[i]);
            let k = input(t, &mut self.by_buffer, InputBuffer::State(*state), *v);
            t.state_write_inputs.push(k);
            let mark = if guarded { GUARDED_STATE_WRITE } else { STATE_WRITE };
            t.key.extend([mark | u64::from(self.position[v.index()]), u64::from(k)]);
        }
        if self.budgeted || !g.remat.spans.is_empty() {
            t.spans = Spans::new(g, &[]);
            t.key.push(SPANS);
            remat::words(g, &t.spans, &t.order, &self.position, &mut t.key);
        } else if !evaluated {
            self.last =
                Some(Traced { edition: g.edition(), request: request.clone(), words: t.key.len(), slots, leaves });
        }
    }

    /// Divides the traced step among the devices of `mesh`; follows [`Tracer::run`]. `placement` returns what each device
    /// has of a buffer that the step reads or writes, `strict` the number of logical shards, if sums must not depend on the
    /// number of devices. One device without them leaves the step and its key as they are.
    pub fn divide(&mut self, mesh: &Mesh, strict: Option<usize>, placement: impl Fn(InputBuffer) -> Placement) {
        if mesh.devices() == 1 && strict.is_none() {
            return;
        }
        let (t, schedule) = (&mut self.trace, self.schedule.clone());
        let inputs = t.inputs.iter().map(|b| placement(*b)).collect();
        let (keys, keeps_weights) = (self.keys, self.keeps_weights);
        let division = Division { mesh: *mesh, inputs, strict, keys, keeps_weights, schedule };
        t.key.push(MESH);
        t.key.extend(division.words());
        t.division = Some(division);
        self.last = None;
    }

    /// Whether the recording and the request repeat those traced last, so that the trace is right but for numbers and leaves,
    /// which are brought up to date.
    fn repeats(&mut self, g: &Graph, request: &Request, leaf: impl Fn(NodeId) -> Option<u64>) -> bool {
        let (Some(last), t) = (&self.last, &mut self.trace) else { return false };
        let same = last.edition == g.edition()
            && last.words == t.key.len()
            && last.request.repeats(request)
            && !self.budgeted
            && g.remat.spans.is_empty()
            && t.order.iter().all(|id| leaf(*id).is_none());
        if !same {
            return false;
        }
        for (slot, id) in t.slots.iter_mut().zip(&last.slots) {
            *slot = g.node(*id).payload;
        }
        // Two leaves share a buffer exactly if they did before.
        self.by_buffer.clear();
        last.leaves.iter().all(|(id, k)| {
            let buffer = InputBuffer::Leaf(g.node(*id).payload);
            let known = *self.by_buffer.entry(buffer).or_insert(*k);
            let first = t.input_nodes[*k as usize] == *id;
            if first {
                t.inputs[*k as usize] = buffer;
            }
            known == *k && t.inputs[*k as usize] == buffer
        })
    }

    /// The number of the last trace, equal for traces with one key whose second repeats the first.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// The position of a needed node in `trace.order`.
    pub fn position(&self, id: NodeId) -> usize {
        self.position[id.index()] as usize - 1
    }
}

fn input(t: &mut Trace, seen: &mut IdMap<InputBuffer, u32>, buffer: InputBuffer, node: NodeId) -> u32 {
    *seen.entry(buffer).or_insert_with(|| {
        t.inputs.push(buffer);
        t.input_nodes.push(node);
        t.inputs.len() as u32 - 1
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use perilune_core::Shape;
    use perilune_core::graph::Number;

    /// Records w + rate and the product of two leaves; returns the request that writes the sum and returns the product.
    fn record(g: &mut Graph, rate: f64, leaves: [u64; 2]) -> Request {
        g.clear();
        let w = g.leaf(&create::STATE, Shape::SCALAR, DType::F32, &[], 9);
        let rate = g.scalar(Number::Float(rate), DType::F32);
        let sum = g.add_(w, rate).expect("recorded");
        let [a, b] = leaves.map(|uid| g.leaf(&create::LEAF, Shape::of(&[2]), DType::F32, &[], uid));
        let product = g.mul(a, b).expect("recorded");
        Request { roots: vec![product], state_writes: vec![(9, sum)], ..Request::default() }
    }

    /// The trace by a tracer that has traced before is that of a new one; returns whether it had the version of the last.
    fn traces(tracer: &mut Tracer, g: &Graph, request: &Request, leaf: impl Fn(NodeId) -> Option<u64>) -> bool {
        let before = tracer.version();
        tracer.run(g, request, &leaf);
        let mut new = Tracer { budgeted: tracer.budgeted, ..Tracer::default() };
        new.run(g, request, &leaf);
        let of = |t: &Trace| {
            (t.key.clone(), t.order.clone(), t.inputs.clone(), t.slots.clone(), t.state_write_inputs.clone())
        };
        assert_eq!(of(&tracer.trace), of(&new.trace));
        tracer.version() == before
    }

    #[test]
    fn a_repeated_step_keeps_its_trace_but_for_numbers_and_leaves() {
        let (g, t) = (&mut Graph::new(), &mut Tracer::default());
        let none = |_: NodeId| None;
        let request = record(g, 0.5, [1, 2]);
        assert!(!traces(t, g, &request, none));
        let request = record(g, 0.25, [3, 4]);
        assert!(traces(t, g, &request, none), "another rate and batch");
        // The buffers of the first batch in another order, and one buffer for both, which is another key.
        let request = record(g, 0.25, [4, 3]);
        assert!(traces(t, g, &request, none));
        let request = record(g, 0.25, [5, 5]);
        assert!(!traces(t, g, &request, none));
        let request = record(g, 0.5, [6, 6]);
        assert!(traces(t, g, &request, none));
        let request = record(g, 0.5, [6, 7]);
        assert!(!traces(t, g, &request, none));
        // Another request, evaluated nodes and a budget.
        let request = record(g, 0.5, [6, 7]);
        assert!(traces(t, g, &request, none));
        let fewer = Request { roots: Vec::new(), ..request.clone() };
        assert!(!traces(t, g, &fewer, none));
        let sum = request.state_writes[0].1;
        assert!(!traces(t, g, &request, |id| (id == sum).then_some(8)));
        assert!(!traces(t, g, &request, |id| (id == sum).then_some(8)), "values of nodes are not compared");
        assert!(!traces(t, g, &request, none));
        assert!(traces(t, g, &request, none));
        t.budgeted = true;
        assert!(!traces(t, g, &request, none));
    }
}
