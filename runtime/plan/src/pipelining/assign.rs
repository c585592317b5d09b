//! Assigns the nodes of a step to pipeline stages and to actions of a schedule.
//!
//! States say on which stage they are ([`Placement::stage`](perilune_core::Placement::stage)); all else follows. A node of the forward pass is
//! on the last stage of its operands, so activations go to where the weights are. A node of a backward pass is on the stage of the
//! forward node that it differentiates. Any other node (the update) is on the stage of its largest operand, so that gradients stay
//! and scalars travel. What depends on no State and no value of a single stage is *free*: each stage that reads it computes it.

use super::table::Action;
use crate::key::Trace;
use crate::lowered::Lowered;
use crate::request::Division;
use perilune_core::Placement;
use perilune_core::graph::{Graph, Node, NodeId};
use perilune_core::mesh::Axis;
use perilune_core::ops::{Class, create};
use rustc_hash::{FxHashMap, FxHashSet};

/// The part of a step to which a node belongs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Part {
    Forward(usize),
    Backward(usize),
    /// Behind the last backward pass.
    Update,
}

impl Part {
    /// The action of a schedule that computes it, and its micro-batch.
    pub fn action(self) -> Option<(Action, usize)> {
        match self {
            Part::Forward(m) => Some((Action::Forward, m)),
            Part::Backward(m) => Some((Action::Backward, m)),
            Part::Update => None,
        }
    }
}

/// Where and when the nodes of a step are computed.
pub(super) struct Assignment {
    /// By node; `None` if it is free.
    pub stage: Vec<Option<usize>>,
    /// The device of each stage, as its coordinate along `pp`.
    pub devices: Vec<usize>,
    pub part: Vec<Part>,
    /// The number of backward passes: the micro-batches of a training step, 0 of a step that does not train.
    pub passes: usize,
}

impl Assignment {
    /// The device of a node's stage; `None` if it is free.
    pub fn device(&self, id: NodeId) -> Option<usize> {
        self.stage[id.index()].map(|stage| self.devices[stage])
    }
}

/// The stage of an input. A schedule with other stages may have put it on its device: then the first stage there.
fn stage_of(placement: &Placement, devices: &[usize]) -> Option<usize> {
    let (stage, device) = placement.stage().zip(placement.stage_device())?;
    let fits = devices.get(stage) == Some(&device);
    if fits { Some(stage) } else { devices.iter().position(|d| *d == device) }
}

/// The recorded node from which each node comes, carried on over nodes without one.
fn recorded(step: &Lowered, trace: &Trace) -> Vec<Option<usize>> {
    let mut last = None;
    let position = |id| {
        let at = (step.graph.loc_of(id).0 as usize).checked_sub(1).filter(|at| *at < trace.order.len());
        last = at.or(last);
        last
    };
    step.graph.ids().map(position).collect()
}

/// Assigns the nodes of a step that all other axes have divided.
pub(super) fn assign(step: &Lowered, division: &Division, g: &Graph, trace: &Trace) -> Assignment {
    let from = recorded(step, trace);
    let devices = division.schedule.devices(division.mesh.size(Axis::Pp));
    let of_input = |input: u32| stage_of(&division.inputs[input as usize], &devices);
    let back_of = |at: usize| g.remat.back_of(trace.order[at]);
    // Backward passes of which the step needs something, by the number of the recording.
    let mut passes: Vec<u32> =
        (0..trace.order.len()).filter(|at| back_of(*at).is_some()).map(|at| g.remat.pass_of(trace.order[at])).collect();
    passes.sort_unstable();
    passes.dedup();
    let part = |at: &Option<usize>| {
        let Some(at) = *at else { return Part::Forward(0) };
        let before = passes.partition_point(|p| *p <= g.remat.pass_of(trace.order[at]));
        match back_of(at) {
            Some(_) => Part::Backward(before.saturating_sub(1)),
            None if before < passes.len() || passes.is_empty() => Part::Forward(before),
            None => Part::Update,
        }
    };
    let part: Vec<Part> = from.iter().map(part).collect();
    let mut own_writes: FxHashMap<NodeId, usize> = FxHashMap::default();
    for (id, input) in step.state_writes.iter().zip(&trace.state_write_inputs) {
        if let Some(stage) = of_input(*input) {
            own_writes.insert(*id, stage);
        }
    }
    let mut stage: Vec<Option<usize>> = Vec::with_capacity(step.graph.len());
    // The stage of the forward nodes at each position of the trace.
    let mut forward: Vec<Option<usize>> = vec![None; trace.order.len()];
    for id in step.graph.ids() {
        let node = step.graph.node(id);
        let found = match step.inputs.get(&id) {
            Some(input) => of_input(*input),
            None => {
                let differentiates = || {
                    let of = back_of(from[id.index()]?)?;
                    forward[trace.order.binary_search(&of).ok()?]
                };
                let largest = |n: &Node| {
                    let pinned =
                        n.inputs.iter().filter_map(|x| Some((step.graph.shape(*x).numel(), stage[x.index()]?)));
                    pinned.max().map(|(_, s)| s)
                };
                let last = |n: &Node| n.inputs.iter().filter_map(|x| stage[x.index()]).max();
                match part[id.index()] {
                    // Nothing that is pinned.
                    _ if last(node).is_none() => None,
                    _ if node.op == &create::OPTIMIZATION_BARRIER => stage[node.inputs[0].index()],
                    _ if matches!(node.op.class, Class::TupleGet) => last(node),
                    _ if own_writes.contains_key(&id) => own_writes.get(&id).copied(),
                    Part::Forward(_) => last(node),
                    Part::Backward(_) => differentiates().or_else(|| largest(node)),
                    Part::Update => largest(node),
                }
            }
        };
        if let (Some(at), Part::Forward(_)) = (from[id.index()], part[id.index()]) {
            forward[at] = forward[at].max(found);
        }
        stage.push(found);
    }
    Assignment { stage, devices, part, passes: passes.len() }
}

/// Which nodes each device along `pp` computes, and what it receives.
pub(super) struct Needs {
    /// For each node, the devices that compute it: bit k is device k.
    pub computed: Vec<u64>,
    /// For each node, the devices that receive it from the one that computes it.
    pub received: Vec<u64>,
}

impl Needs {
    /// Walks back from what each device has to store.
    pub fn find(step: &Lowered, a: &Assignment, division: &Division, trace: &Trace) -> Needs {
        let g = &step.graph;
        let devices = division.mesh.size(Axis::Pp);
        let all = if devices == 64 { u64::MAX } else { (1 << devices) - 1 };
        let mut needed = vec![0u64; g.len()];
        for id in &step.roots {
            needed[id.index()] |= a.device(*id).map_or(all, |d| 1 << d);
        }
        for (id, input) in step.state_writes.iter().zip(&trace.state_write_inputs) {
            needed[id.index()] |= division.inputs[*input as usize].stage_device().map_or(all, |d| 1 << d);
        }
        let (mut computed, mut received) = (vec![0u64; g.len()], vec![0u64; g.len()]);
        for id in g.ids().rev() {
            let want = needed[id.index()];
            if want == 0 {
                continue;
            }
            let node = g.node(id);
            // A view that is not smaller than its value is made where it is read, so that the value is sent once for all views.
            let (here, others) = match a.device(id).filter(|_| !is_cheap_view(g, node)) {
                None => (want, 0),
                Some(d) => (1 << d, want & !(1 << d)),
            };
            (computed[id.index()], received[id.index()]) = (here, others);
            for x in &node.inputs {
                needed[x.index()] |= here;
            }
        }
        Needs { computed, received }
    }
}

/// Whether a node is a view that has at least as many elements as what it reads.
fn is_cheap_view(g: &Graph, node: &Node) -> bool {
    matches!(node.op.class, Class::View(_))
        && node.op != &create::OPTIMIZATION_BARRIER
        && node.inputs.len() == 1
        && g.shape(node.inputs[0]).numel() <= node.shape.numel()
}

/// The nodes of backward passes that other stages wait for: those that what is sent depends on, within its stage, and what is free.
pub(super) fn sent_gradients(step: &Lowered, a: &Assignment, needs: &Needs) -> FxHashSet<NodeId> {
    let mut out: FxHashSet<NodeId> = FxHashSet::default();
    // Gradients of tied weights go to another stage too, but only the update waits for them: a stage before it reads the others.
    let mut read_back: Vec<bool> = vec![false; step.graph.len()];
    for id in step.graph.ids() {
        for x in &step.graph.node(id).inputs {
            let earlier = a.stage[id.index()].zip(a.stage[x.index()]).is_some_and(|(at, from)| at < from);
            let is_needed = needs.computed[id.index()] != 0;
            read_back[x.index()] |= earlier && is_needed && matches!(a.part[id.index()], Part::Backward(_));
        }
    }
    for id in step.graph.ids().rev() {
        let is_sent = read_back[id.index()];
        if !matches!(a.part[id.index()], Part::Backward(_)) || !(is_sent || out.contains(&id)) {
            continue;
        }
        out.insert(id);
        let same = |x: &&NodeId| a.stage[x.index()].is_none_or(|stage| a.stage[id.index()] == Some(stage));
        let back = |x: &&NodeId| matches!(a.part[x.index()], Part::Backward(_));
        out.extend(step.graph.node(id).inputs.iter().filter(same).filter(back));
    }
    out
}
