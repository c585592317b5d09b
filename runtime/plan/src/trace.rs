//! Finds the nodes that a request needs and what they read, and writes the canonical plan key.
//!
//! One linear walk over the arena, nothing rewritten. The key holds ops, attributes, leaf shapes and dtypes, edges by
//! position, aliasing among leaves, roots, state_writes and their guard. It does not hold pointers, Lua lines, ids or run-time numbers, so
//! an edited learning rate or a moved line finds the same plan. Shapes of inner nodes follow from the rest and are left
//! out.

use crate::passes::remat;
use perilune_core::graph::{Graph, NodeId};
use perilune_core::ops::{Class, Generator, create};
use perilune_core::{DType, Shape};
use rustc_hash::FxHashMap;

/// What the engine wants done: values, and States to overwrite.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Nodes whose values are handed out.
    pub roots: Vec<NodeId>,
    /// (payload of the State, its new value): written when everything else has run. Values have the State's numel and
    /// dtype.
    pub state_writes: Vec<(u64, NodeId)>,
    /// Whether the state_writes are done at all, which the device knows.
    pub guard: Option<Guard>,
    /// (a node, payload of a State whose value it is): nothing computes the node. In order of the nodes.
    pub copies: Vec<(NodeId, u64)>,
}

/// Lets a bool decide on the device whether state_writes are done.
#[derive(Clone, Debug)]
pub struct Guard {
    /// A scalar. Where it is false the guarded States keep what they hold.
    pub ok: NodeId,
    /// Which of the state_writes it guards.
    pub state_writes: Vec<bool>,
}

/// A buffer the program reads: `LEAF` and `STATE` payloads live in different spaces.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Source {
    Leaf(u64),
    State(u64),
}

/// The wanted part of a graph in canonical order.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// Wanted nodes, ascending. Position in this list is the node's name in the key.
    pub order: Vec<NodeId>,
    /// Buffers in order of first use.
    pub inputs: Vec<Source>,
    /// Shape and dtype of each input.
    pub metas: Vec<(Shape, DType)>,
    /// Bits of the run-time numbers, in order of the nodes that hold them.
    pub slots: Vec<u64>,
    pub slot_dtypes: Vec<DType>,
    /// The canonical words.
    pub key: Vec<u32>,
    /// Which input each commit overwrites.
    pub state_write_inputs: Vec<u32>,
}

/// A 128-bit digest of the key: two multiply-and-fold lanes over different constants. Not cryptographic: a hit is
/// confirmed by comparing the words.
pub fn digest(key: &[u32]) -> u128 {
    let fold = |a: u64, b: u64| {
        let p = (a as u128) * (b as u128);
        (p as u64) ^ ((p >> 64) as u64)
    };
    let (mut x, mut y) = (0x9e37_79b9_7f4a_7c15u64, 0xc2b2_ae3d_27d4_eb4fu64);
    for pair in key.chunks(2) {
        let w = pair[0] as u64 | (pair.get(1).copied().unwrap_or(0) as u64) << 32;
        x = fold(x ^ w, 0xa076_1d64_78bd_642f);
        y = fold(y ^ w.rotate_left(29), 0xe703_7ed1_a0b4_28db);
    }
    ((fold(x ^ key.len() as u64, 0x8ebc_6af0_9c88_c6e3) as u128) << 64) | fold(y, 0x5899_65cc_7537_4cc3) as u128
}

/// Scratch and result of tracing, reused from step to step.
#[derive(Debug, Default)]
pub struct Tracer {
    /// Position of a node in `trace.order` plus 1; 0 is "not wanted"; `WANTED` and `AGAIN` "wanted, not yet placed".
    position: Vec<u32>,
    pub trace: Trace,
    /// Whether the planner may recompute unasked (there is a memory budget): the key then holds what it goes by.
    pub budgeted: bool,
    by_leaf: FxHashMap<(bool, u64), u32>,
}

const WANTED: u32 = u32::MAX;
/// Wanted, and computed even if it has been: one of its other outputs is wanted, which that did not keep.
const AGAIN: u32 = u32::MAX - 1;

impl Tracer {
    /// Traces `request` over `g`. `leaf(id)` names the buffer of a node that has already been evaluated.
    pub fn run(&mut self, g: &Graph, request: &Request, leaf: impl Fn(NodeId) -> Option<u64>) {
        let t = &mut self.trace;
        t.order.clear();
        t.inputs.clear();
        t.metas.clear();
        t.slots.clear();
        t.slot_dtypes.clear();
        t.key.clear();
        t.state_write_inputs.clear();
        self.by_leaf.clear();
        self.position.clear();
        self.position.resize(g.len(), 0);
        let mut top = 0;
        let copy = |i: usize| {
            let found = request.copies.binary_search_by_key(&i, |c| c.0.index()).ok()?;
            Some(request.copies[found].1)
        };
        let ok = request.guard.as_ref().map(|guard| &guard.ok);
        for id in request.roots.iter().chain(request.state_writes.iter().map(|c| &c.1)).chain(ok) {
            self.position[id.index()] = WANTED;
            top = top.max(id.index() + 1);
        }
        for i in (0..top).rev() {
            let at = self.position[i];
            if at == AGAIN || (at == WANTED && leaf(NodeId(i as u32)).is_none() && copy(i).is_none()) {
                let node = &g.nodes()[i];
                for x in &node.inputs {
                    let at = &mut self.position[x.index()];
                    if matches!(node.op.class, Class::TupleGet) {
                        *at = AGAIN;
                    } else if *at != AGAIN {
                        *at = WANTED;
                    }
                }
            }
        }
        for i in 0..top {
            let again = self.position[i] == AGAIN;
            if self.position[i] != WANTED && !again {
                continue;
            }
            let id = NodeId(i as u32);
            t.order.push(id);
            self.position[i] = t.order.len() as u32;
            let node = &g.nodes()[i];
            let source = match leaf(id).filter(|_| !again) {
                Some(payload) => Some(Source::Leaf(payload)),
                None if node.op == &create::LEAF => Some(Source::Leaf(node.payload)),
                None if node.op == &create::STATE => Some(Source::State(node.payload)),
                None => copy(i).map(Source::State),
            };
            if let Some(source) = source {
                let k = input(t, &mut self.by_leaf, source, node.shape, node.dtype);
                // A State's buffer will change and is copied where it is handed out; another leaf's is handed out itself.
                let state = matches!(source, Source::State(_)) as u32;
                t.key.extend_from_slice(&[0x1eaf, k, node.dtype as u32 | state << 8, node.shape.rank() as u32]);
                for &d in node.shape.dims() {
                    t.key.extend_from_slice(&[d as u32, (d as u64 >> 32) as u32]);
                }
                continue;
            }
            t.key.push(node.op.code());
            let kind = (node.dtype as u32) << 24 | u32::from(node.tf32) << 31;
            t.key.push(node.attrs.len() as u32 | (node.inputs.len() as u32) << 8 | kind);
            if let Class::Generator(kind) = node.op.class {
                if kind == Generator::Scalar {
                    t.slots.push(node.payload);
                    t.slot_dtypes.push(node.dtype);
                }
                t.key.push(node.shape.rank() as u32);
                t.key.extend(node.shape.dims().iter().map(|&d| d as u32));
            }
            for &a in &node.attrs {
                t.key.extend_from_slice(&[a as u32, (a as u64 >> 32) as u32]);
            }
            t.key.extend(node.inputs.iter().map(|x| self.position[x.index()]));
        }
        for r in &request.roots {
            t.key.push(0x8000_0000 | self.position[r.index()]);
        }
        t.key.extend(ok.map(|ok| 0xa000_0000 | self.position[ok.index()]));
        for (i, (state, v)) in request.state_writes.iter().enumerate() {
            let guarded = request.guard.as_ref().is_some_and(|guard| guard.state_writes[i]);
            let node = &g.nodes()[v.index()];
            let k = input(t, &mut self.by_leaf, Source::State(*state), node.shape, node.dtype);
            t.state_write_inputs.push(k);
            let mark = if guarded { 0xe000_0000 } else { 0xc000_0000 };
            t.key.extend([mark | self.position[v.index()], k]);
        }
        if self.budgeted || !g.remat.spans.is_empty() {
            remat::words(g, &t.order, &self.position, &mut t.key);
        }
    }

    /// The position of a wanted node in `trace.order`.
    pub fn position(&self, id: NodeId) -> usize {
        self.position[id.index()] as usize - 1
    }
}

fn input(t: &mut Trace, seen: &mut FxHashMap<(bool, u64), u32>, source: Source, shape: Shape, dtype: DType) -> u32 {
    let name = match source {
        Source::Leaf(p) => (false, p),
        Source::State(p) => (true, p),
    };
    *seen.entry(name).or_insert_with(|| {
        t.inputs.push(source);
        t.metas.push((shape, dtype));
        t.inputs.len() as u32 - 1
    })
}
