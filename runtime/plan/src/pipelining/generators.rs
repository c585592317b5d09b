//! Generates the tables of the named pipeline schedules.

use super::table::{Action, Cell, Table};
use rustc_hash::FxHashSet;
use std::collections::VecDeque;

/// The table of stages that only compute forward. `devices`: the device of each stage.
pub fn forward_only(devices: &[usize], micros: usize) -> Table {
    let mut lines = vec![Vec::new(); devices.iter().max().map_or(0, |d| d + 1)];
    for micro in 0..micros {
        for (stage, device) in devices.iter().enumerate() {
            lines[*device].push(Cell::new(stage, Action::Forward, micro));
        }
    }
    Table::of(lines)
}

pub fn fill_drain(stages: usize, micros: usize) -> Table {
    let line = |s| {
        let forward = (0..micros).map(move |m| Cell::new(s, Action::Forward, m));
        forward.chain((0..micros).map(move |m| Cell::new(s, Action::Backward, m))).collect()
    };
    Table::of((0..stages).map(line).collect())
}

pub fn one_forward_one_backward(stages: usize, micros: usize) -> Table {
    let line = |s: usize| {
        let ahead = (stages - s - 1).min(micros);
        let mut line: Vec<Cell> = (0..ahead).map(|m| Cell::new(s, Action::Forward, m)).collect();
        for m in 0..micros {
            if ahead + m < micros {
                line.push(Cell::new(s, Action::Forward, ahead + m));
            }
            line.push(Cell::new(s, Action::Backward, m));
        }
        line
    };
    Table::of((0..stages).map(line).collect())
}

/// Fills the table of ZB-H1 step by step with actions of equal duration. A device takes forward passes until as many are ahead as with 1F1B, then
/// the gradient of inputs, for which the stage before waits; gradients of weights where neither can be taken.
pub fn zero_bubble(stages: usize, micros: usize) -> Table {
    #[derive(Clone, Copy, Default)]
    struct Done {
        forward: usize,
        input: usize,
        weight: usize,
    }
    let mut lines: Vec<Vec<Cell>> = vec![Vec::new(); stages];
    let mut done = vec![Done::default(); stages];
    while done.iter().any(|d| d.weight < micros) {
        // All devices choose by what was done before this step.
        let before = done.clone();
        for s in 0..stages {
            let own = before[s];
            let arrived = if s == 0 { micros } else { before[s - 1].forward };
            let returned = before.get(s + 1).map_or(own.forward, |next| next.input);
            let ahead = own.forward - own.input < stages - s && own.forward - own.weight < stages;
            if ahead && own.forward < arrived.min(micros) {
                lines[s].push(Cell::new(s, Action::Forward, own.forward));
                done[s].forward += 1;
            } else if own.input < own.forward.min(returned) {
                lines[s].push(Cell::new(s, Action::Input, own.input));
                done[s].input += 1;
            } else if own.weight < own.input {
                lines[s].push(Cell::new(s, Action::Weight, own.weight));
                done[s].weight += 1;
            }
        }
    }
    Table::of(lines)
}

/// Deals groups of as many micro-batches as devices to the chunks of a device in turn; backward passes go to the chunks in reverse. A
/// device runs ahead by as many forward passes as the first gradient takes to reach it.
pub fn interleaved(devices: usize, chunks: usize, micros: usize) -> Table {
    let line = |device: usize| {
        let total = micros * chunks;
        let cell = |k: usize, action: Action| {
            let (group, within) = (k / (devices * chunks), k % (devices * chunks));
            let chunk = within / devices;
            let chunk = if action == Action::Forward { chunk } else { chunks - 1 - chunk };
            Cell::new(chunk * devices + device, action, group * devices + k % devices)
        };
        let ahead = ((devices - device - 1) * 2 + (chunks - 1) * devices).min(total);
        let mut line: Vec<Cell> = (0..ahead).map(|k| cell(k, Action::Forward)).collect();
        for k in 0..total {
            line.extend((ahead + k < total).then(|| cell(ahead + k, Action::Forward)));
            line.push(cell(k, Action::Backward));
        }
        line
    };
    Table::of((0..devices).map(line).collect())
}

/// A device with two stages along a V, and what it has taken of each.
struct Pair {
    stages: [usize; 2],
    forward: [usize; 2],
    backward: [usize; 2],
    line: Vec<Cell>,
    /// Gradients of weights that are put off, in the order in which their passes came.
    later: VecDeque<Cell>,
}

impl Pair {
    fn new(devices: usize, device: usize) -> Pair {
        let stages = [device, 2 * devices - 1 - device];
        Pair { stages, forward: [0; 2], backward: [0; 2], line: Vec::new(), later: VecDeque::new() }
    }

    fn forward(&mut self, chunk: usize) {
        self.line.push(Cell::new(self.stages[chunk], Action::Forward, self.forward[chunk]));
        self.forward[chunk] += 1;
    }

    fn backward(&mut self, chunk: usize) {
        self.line.push(Cell::new(self.stages[chunk], Action::Backward, self.backward[chunk]));
        self.backward[chunk] += 1;
    }

    /// The first part of a backward pass; the second one is put off.
    fn input(&mut self, chunk: usize) {
        let (stage, micro) = (self.stages[chunk], self.backward[chunk]);
        self.line.push(Cell::new(stage, Action::Input, micro));
        self.later.push_back(Cell::new(stage, Action::Weight, micro));
        self.backward[chunk] += 1;
    }

    /// The gradients of weights that were put off first.
    fn weight(&mut self) {
        self.line.extend(self.later.pop_front());
    }
}

/// In its steady state a device takes F, I and W of one chunk, then of the other (Qi et al., arXiv:2405.15362). The table is that of as
/// many micro-batches as fill it at least, without the cells of those that a step does not have.
pub fn zero_bubble_v(devices: usize, micros: usize) -> Table {
    let line = |device: usize| {
        let (mut p, filled, after) = (Pair::new(devices, device), micros.max(2 * devices - 1), devices - device);
        (0..2 * after - 1).for_each(|_| p.forward(0));
        for _ in 0..device {
            p.forward(1);
            p.forward(0);
        }
        for _ in 0..after {
            p.forward(1);
            p.input(1);
            p.weight();
        }
        while p.forward[1] < p.forward[0] || p.forward[0] < filled {
            if p.forward[0] < filled {
                p.forward(0);
            }
            for chunk in [0, 1] {
                if chunk == 1 {
                    p.forward(1);
                }
                p.input(chunk);
                p.weight();
            }
        }
        for _ in 0..device {
            p.input(0);
            p.input(1);
        }
        for _ in 0..after {
            p.input(0);
            p.weight();
        }
        p.line.extend(&p.later);
        p.line.retain(|cell| cell.micro < micros);
        p.line
    };
    Table::of((0..devices).map(line).collect())
}

/// The phases of DualPipeV as DeepSeek publishes them. Where they overlap the forward pass of a chunk and the backward pass of the other,
/// the table has a pair with `is_paired`, and two cells in a row without. Needs two micro-batches a device.
pub fn dual_pipe_v(devices: usize, micros: usize, is_paired: bool) -> Table {
    let mut seconds = FxHashSet::default();
    let mut line = |device: usize| {
        let (mut p, behind, upto) = (Pair::new(devices, device), devices - device - 1, device + 1);
        let mut overlap = |p: &mut Pair, forward: usize, backward: usize, may: bool| {
            p.forward(forward);
            p.backward(backward);
            seconds.extend(p.line.last().filter(|_| is_paired && may));
        };
        (0..2 * behind).for_each(|_| p.forward(0));
        for _ in 0..upto {
            p.forward(0);
            p.forward(1);
        }
        for _ in 0..behind {
            p.input(1);
            p.weight();
            p.forward(1);
        }
        for k in 0..micros + upto - 2 * devices {
            // The first gradient of the last device is that of the pass before it: the bubble is smaller if it comes alone.
            overlap(&mut p, 0, 1, k > 0 || device + 1 < devices);
            overlap(&mut p, 1, 0, true);
        }
        for _ in 0..behind {
            p.backward(1);
            overlap(&mut p, 1, 0, true);
        }
        for (k, chunk) in (0..upto).flat_map(|k| [(k, 1), (k, 0)]) {
            // From the middle on, gradients of weights are put off.
            let is_late = k > upto / 2 || k == upto / 2 && (device % 2 == 1 || chunk == 0);
            if is_late { p.input(chunk) } else { p.backward(chunk) }
        }
        for _ in 0..behind {
            p.weight();
            p.input(0);
        }
        p.line.extend(&p.later);
        p.line
    };
    let lines = (0..devices).map(&mut line).collect();
    Table { lines, seconds }
}
