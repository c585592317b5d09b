//! Splits a step into the steps of the devices along `pp`, each with its pipeline stages, in the order of a schedule.
//!
//! All stages together are put in one order: a node comes when its cell of the schedule does, and after what it reads. Each device gets
//! the nodes of its stages of that order. A value that another device reads is sent as soon as it is computed, and received before its
//! first use. As each device's transfers keep that order and sending does not wait, no devices can wait for each other in a circle.

use super::assign::{self, Assignment, Needs};
use super::cell_work::{self, CellWork};
use super::generators::forward_only;
use super::regroup;
use super::table::{Action, Cell};
use crate::key::Trace;
use crate::lowered::Lowered;
use crate::request::Division;
use perilune_core::error::{Error, Result};
use perilune_core::graph::{Graph, Node, NodeId};
use perilune_core::mesh::Axis;
use perilune_core::ops::collective;
use perilune_core::{DType, Shape};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::smallvec;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The most devices along `pp`: sets of them are the bits of a word.
pub const MOST_DEVICES: usize = 64;

/// The step of the stages of one device.
pub struct DeviceStep {
    pub step: Lowered,
    /// Which roots of the whole step it computes, and the stage of each.
    pub roots: Vec<(usize, usize)>,
    /// The input that each of its State writes overwrites.
    pub state_write_inputs: Vec<u32>,
}

/// A node on one of the devices that compute it.
type Instance = (NodeId, usize);

/// Splits a step along `pp`.
pub fn apply(step: &Lowered, division: &Division, g: &Graph, trace: &Trace) -> Result<Vec<DeviceStep>> {
    let devices = division.mesh.size(Axis::Pp);
    if devices > MOST_DEVICES {
        let message = format!("pp={devices}: at most {MOST_DEVICES} devices are supported along pp");
        return Err(Error::argument("mesh", message).hint("use a smaller pp"));
    }
    let a = assign::assign(step, division, g, trace);
    let (step, a) = regroup::apply(step, a, division.strict.is_some());
    let step = &step;
    let needs = Needs::find(step, &a, division, trace);
    let order = order(step, &a, &needs, division, devices)?;
    let mut out: Vec<Emitter> = (0..devices).map(|device| Emitter::new(step, device)).collect();
    let mut numbers: FxHashMap<(NodeId, usize), i64> = FxHashMap::default();
    for (id, device) in order {
        for x in &step.graph.node(id).inputs {
            if needs.received[x.index()] & 1 << device != 0 {
                out[device].receive(*x, &a, &numbers);
            }
        }
        out[device].copy(id);
        let to = needs.received[id.index()];
        for other in (0..devices).filter(|other| to & 1 << other != 0) {
            let number = numbers.len() as i64;
            numbers.insert((id, other), number);
            out[device].send(id, other, number);
        }
    }
    for (k, id) in step.roots.iter().enumerate() {
        // What is free is on every device.
        let at = a.device(*id);
        for own in out.iter_mut().filter(|own| at.is_none_or(|at| at == own.device)) {
            if let Some(desc) = step.placed_roots.get(&k) {
                own.out.placed_roots.insert(own.roots.len(), *desc);
            }
            own.roots.push((k, a.stage[id.index()].unwrap_or(0)));
            own.out.roots.push(own.map[id]);
        }
    }
    for (id, input) in step.state_writes.iter().zip(&trace.state_write_inputs) {
        let home = division.inputs[*input as usize].stage_device();
        for own in out.iter_mut().filter(|own| home.is_none_or(|home| home == own.device)) {
            if needs.received[id.index()] & 1 << own.device != 0 {
                own.receive(*id, &a, &numbers);
            }
            own.out.state_writes.push(own.map[id]);
            own.state_write_inputs.push(*input);
        }
    }
    let finish = |e: Emitter| DeviceStep { step: e.out, roots: e.roots, state_write_inputs: e.state_write_inputs };
    Ok(out.into_iter().map(finish).collect())
}

/// All nodes of all devices in one order.
fn order(step: &Lowered, a: &Assignment, needs: &Needs, division: &Division, devices: usize) -> Result<Vec<Instance>> {
    let sent = assign::sent_gradients(step, a, needs);
    let table = match a.passes {
        0 => forward_only(&a.devices, 1),
        passes => division.schedule.timed(devices, passes, &CellWork::of(step, &division.mesh, a, needs, &sent))?,
    };
    // The nodes of both cells of a pair have one rank, and alternate.
    let mut rank: FxHashMap<Cell, usize> = FxHashMap::default();
    for cell in table.simulate(&|entry| entry.len() as u64)?.order {
        let last = rank.len();
        rank.insert(cell, if table.seconds.contains(&cell) { last.saturating_sub(1) } else { last });
    }
    let within = match table.seconds.is_empty() {
        true => FxHashMap::default(),
        false => cell_work::pair_order(step, &division.mesh, a, needs, &sent, &table),
    };
    let paired: FxHashSet<usize> = table.seconds.iter().map(|cell| rank[cell]).collect();
    let stages = |device: usize| (0..a.devices.len()).filter(move |stage| a.devices[*stage] == device);
    let rank_of = |(id, device): Instance| {
        let Some((action, micro)) = a.part[id.index()].action() else { return rank.len() };
        let cell = |stage, action| rank.get(&Cell::new(stage, action, micro)).copied();
        // What is no part of a stage of the device comes with the first that may read it.
        let at = |action| match a.stage[id.index()].filter(|stage| a.devices[*stage] == device) {
            Some(stage) => cell(stage, action),
            None => stages(device).filter_map(|stage| cell(stage, action)).min(),
        };
        // Of the stages of a device some may have whole backward passes, and others parts.
        let part = match action {
            Action::Backward if sent.contains(&id) => at(Action::Input),
            Action::Backward => at(Action::Weight),
            _ => None,
        };
        at(action).into_iter().chain(part).min().unwrap_or(rank.len())
    };
    let priority = |instance: Instance| {
        let rank = rank_of(instance);
        let place = within.get(&instance.0).filter(|_| paired.contains(&rank));
        (rank, place.copied().unwrap_or(0))
    };
    // How many operands of an instance have yet to come, and who reads it.
    let mut waits: FxHashMap<Instance, usize> = FxHashMap::default();
    let mut readers: FxHashMap<Instance, Vec<Instance>> = FxHashMap::default();
    let mut ready: BinaryHeap<Reverse<((usize, u32), NodeId, usize)>> = BinaryHeap::new();
    let bits = |set: u64| (0..devices).filter(move |d| set & 1 << d != 0);
    for id in step.graph.ids() {
        for device in bits(needs.computed[id.index()]) {
            let inputs = &step.graph.node(id).inputs;
            for x in inputs {
                let from = if needs.received[x.index()] & 1 << device != 0 { a.device(*x) } else { None };
                readers.entry((*x, from.unwrap_or(device))).or_default().push((id, device));
            }
            if inputs.is_empty() {
                ready.push(Reverse((priority((id, device)), id, device)));
            } else {
                waits.insert((id, device), inputs.len());
            }
        }
    }
    let mut out = Vec::new();
    while let Some(Reverse((_, id, device))) = ready.pop() {
        out.push((id, device));
        for reader in readers.remove(&(id, device)).into_iter().flatten() {
            let Some(open) = waits.get_mut(&reader) else { continue };
            *open -= 1;
            if *open == 0 {
                ready.push(Reverse((priority(reader), reader.0, reader.1)));
            }
        }
    }
    match waits.values().all(|open| *open == 0) {
        true => Ok(out),
        false => Err(Error::system("mesh", "this is a bug: nodes of pipeline stages wait for what no stage computes")),
    }
}

/// Makes the step of one device.
struct Emitter<'a> {
    from: &'a Lowered,
    device: usize,
    out: Lowered,
    map: FxHashMap<NodeId, NodeId>,
    roots: Vec<(usize, usize)>,
    state_write_inputs: Vec<u32>,
}

impl<'a> Emitter<'a> {
    fn new(from: &'a Lowered, device: usize) -> Emitter<'a> {
        let mut out = Lowered::empty(from.states.clone(), Graph::with_capacity(from.graph.len()));
        (out.starts, out.first_start) = (from.starts.clone(), from.first_start);
        out.exchanges.clone_from(&from.exchanges);
        Emitter { from, device, out, map: FxHashMap::default(), roots: Vec::new(), state_write_inputs: Vec::new() }
    }

    /// Appends a copy of a node of the whole step.
    fn copy(&mut self, id: NodeId) {
        let mut node = self.from.graph.node(id).clone();
        node.inputs = node.inputs.iter().map(|x| self.map[x]).collect();
        self.out.graph.modes.loc = self.from.graph.loc_of(id);
        let new = self.out.graph.add(node);
        self.out.set_number(new, self.from.number(id));
        self.map.insert(id, new);
    }

    /// Appends the transfer of a value that this device has.
    fn send(&mut self, id: NodeId, to: usize, number: i64) {
        let attrs = smallvec![Axis::Pp as i64, to as i64, number];
        let (op, inputs) = (&collective::SEND, smallvec![self.map[&id]]);
        let (shape, dtype) = (Shape::SCALAR, DType::I32);
        self.out.graph.modes.loc = self.from.graph.loc_of(id);
        let node = Node { op, dtype, detached: true, tf32: false, shape, inputs, attrs, payload: 0 };
        let new = self.out.graph.add(node);
        self.out.effects.push(new);
    }

    /// Appends the transfer of a value that another device has sent, unless it has come already.
    fn receive(&mut self, id: NodeId, a: &Assignment, numbers: &FxHashMap<(NodeId, usize), i64>) {
        let (Some(from), Some(number)) = (a.device(id), numbers.get(&(id, self.device))) else { return };
        if self.map.contains_key(&id) {
            return;
        }
        let Node { shape, dtype, .. } = *self.from.graph.node(id);
        let attrs = smallvec![Axis::Pp as i64, from as i64, *number];
        let (op, inputs) = (&collective::RECV, smallvec![]);
        self.out.graph.modes.loc = self.from.graph.loc_of(id);
        let new = self.out.graph.add(Node { op, dtype, detached: true, tf32: false, shape, inputs, attrs, payload: 0 });
        self.map.insert(id, new);
    }
}
