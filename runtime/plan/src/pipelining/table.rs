//! Defines pipeline schedules as tables: a line for each device, a cell for each action, in the order in which the device takes them.
//!
//! A cell is written `<stage><action><micro-batch>`: `0F3` is the forward pass of micro-batch 3 through stage 0. The actions are `F`
//! (forward), `B` (backward), and the two parts of a backward pass that may be separated: `I` (gradient of the inputs, which the stage
//! before waits for) and `W` (gradients of the weights, which only the update waits for; Qi et al., Zero Bubble Pipeline Parallelism,
//! arXiv:2401.10241). A line may have the cells of several stages, each of which is on one device. Transfers follow from the cells and
//! are not written. Devices do not wait for what they send to be received.
//!
//! A *pair*, `(0F3;1B2)`, is two cells whose kernels alternate, so that one computes while the other exchanges tensors with the devices
//! of another axis (DeepSeek-AI, DualPipe, arXiv:2412.19437). It begins when both may begin, and both end with it.

use perilune_core::error::{Error, Result};
use rustc_hash::{FxHashMap, FxHashSet};
use std::fmt::{self, Display};
use std::hash::{Hash, Hasher};

/// The most stages: a placement keeps the number of one in a byte.
pub const MOST_STAGES: usize = 256;

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Action {
    Forward,
    /// The whole backward pass.
    Backward,
    /// The gradient of the inputs.
    Input,
    /// The gradients of the weights.
    Weight,
}

impl Action {
    const ALL: [(Action, char); 4] =
        [(Action::Forward, 'F'), (Action::Backward, 'B'), (Action::Input, 'I'), (Action::Weight, 'W')];
}

/// One action of a stage on one micro-batch.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Cell {
    pub stage: usize,
    pub action: Action,
    pub micro: usize,
}

impl Cell {
    pub fn new(stage: usize, action: Action, micro: usize) -> Cell {
        Cell { stage, action, micro }
    }

    /// Whether it needs the activations of its micro-batch last.
    fn ends_pass(self) -> bool {
        matches!(self.action, Action::Backward | Action::Weight)
    }
}

impl Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = Action::ALL.iter().find(|a| a.0 == self.action).map_or('?', |a| a.1);
        write!(f, "{}{letter}{}", self.stage, self.micro)
    }
}

/// The actions of each device, in order.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Table {
    pub lines: Vec<Vec<Cell>>,
    /// The second cell of each pair, which is behind the first one in its line.
    pub seconds: FxHashSet<Cell>,
}

/// When the cells of a table run.
#[derive(Clone, Debug)]
pub struct Timeline {
    /// All cells in an order in which each comes after those that it waits for, and those of a device are in their order. The cells
    /// of a pair are neighbours.
    pub order: Vec<Cell>,
    pub end: u64,
    /// For each device, the time in which it waits before `end`.
    pub idle: Vec<u64>,
}

fn fail(message: String, hint: &str) -> Error {
    Error::argument("pipeline", message).hint(hint.to_string())
}

impl Table {
    /// A table without pairs.
    pub fn of(lines: Vec<Vec<Cell>>) -> Table {
        Table { lines, seconds: FxHashSet::default() }
    }

    /// Parses a line for each device: cells and pairs between spaces. Empty lines are skipped.
    pub fn parse(text: &str) -> Result<Table> {
        let cell = |word: &str| {
            let at = word.find(|c: char| !c.is_ascii_digit());
            let parsed = at.and_then(|at| {
                let (stage, rest) = word.split_at(at);
                let letter = rest.chars().next()?;
                let action = Action::ALL.iter().find(|a| a.1 == letter)?.0;
                Some(Cell::new(stage.parse().ok()?, action, rest[letter.len_utf8()..].parse().ok()?))
            });
            let hint = "write a stage, one of F, B, I, W, and a micro-batch, both counted from 0: 0F3";
            let cell: Cell = parsed.ok_or_else(|| fail(format!("{word:?} is no cell of a schedule"), hint))?;
            match cell.stage < MOST_STAGES {
                true => Ok(cell),
                false => Err(fail(format!("{word}: a model has at most {MOST_STAGES} stages"), "use fewer stages")),
            }
        };
        let mut out = Table::default();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let mut cells = Vec::new();
            for word in line.split_whitespace() {
                if !word.contains(['(', ';', ')']) {
                    cells.push(cell(word)?);
                    continue;
                }
                let inner = word.strip_prefix('(').and_then(|rest| rest.strip_suffix(')'));
                let Some((first, second)) = inner.and_then(|inner| inner.split_once(';')) else {
                    let hint = "write two cells that run beside each other without spaces: (0F3;1B2)";
                    return Err(fail(format!("{word:?} is no pair of cells"), hint));
                };
                let second = cell(second)?;
                out.seconds.insert(second);
                cells.extend([cell(first)?, second]);
            }
            out.lines.push(cells);
        }
        Ok(out)
    }

    /// The pair of a line that begins with the cell at `k`, or this cell alone.
    fn entry(&self, device: usize, k: usize) -> &[Cell] {
        let rest = &self.lines[device][k..];
        let is_pair = rest.get(1).is_some_and(|second| self.seconds.contains(second));
        &rest[..rest.len().min(1 + usize::from(is_pair))]
    }

    /// All pairs.
    pub(super) fn pairs(&self) -> impl Iterator<Item = &[Cell]> {
        (0..self.lines.len()).flat_map(|device| self.entries(device)).filter(|entry| entry.len() == 2)
    }

    /// The pairs and other cells of a line, in order.
    pub(super) fn entries(&self, device: usize) -> impl Iterator<Item = &[Cell]> {
        let mut k = 0;
        std::iter::from_fn(move || {
            let entry = self.entry(device, k);
            k += entry.len();
            (!entry.is_empty()).then_some(entry)
        })
    }

    /// The number of stages: one more than the last that a cell names.
    pub fn stages(&self) -> usize {
        self.lines.iter().flatten().map(|cell| cell.stage + 1).max().unwrap_or(0)
    }

    /// The device of each stage, by its first cell; 0 for a stage without cells.
    pub fn devices(&self) -> Vec<usize> {
        let mut out = vec![None; self.stages()];
        for (device, line) in self.lines.iter().enumerate() {
            for cell in line {
                out[cell.stage].get_or_insert(device);
            }
        }
        out.into_iter().map(|device| device.unwrap_or(0)).collect()
    }

    /// For each device, the most pairs of a stage and a micro-batch whose activations it keeps at once.
    pub fn kept(&self) -> Vec<usize> {
        let most = |device: usize| {
            let (mut open, mut most) = (0usize, 0);
            for entry in self.entries(device) {
                open += entry.iter().filter(|cell| cell.action == Action::Forward).count();
                most = most.max(open);
                open = open.saturating_sub(entry.iter().filter(|cell| cell.ends_pass()).count());
            }
            most
        };
        (0..self.lines.len()).map(most).collect()
    }

    /// Checks that the table is one of `devices` lines and `micros` micro-batches: each stage is on one device and takes every action on
    /// each micro-batch once, no device deadlocks, and none keeps the activations of more than `stash` pairs of a stage and a
    /// micro-batch, from their first to their last action.
    pub fn check(&self, devices: usize, micros: usize, stash: usize) -> Result<Timeline> {
        if self.lines.len() != devices {
            return Err(fail(
                format!("the schedule has {} lines, and pp={devices}", self.lines.len()),
                "write a line for each device along pp",
            ));
        }
        let home = self.devices();
        let mut seen: FxHashSet<Cell> = FxHashSet::default();
        for (device, line) in self.lines.iter().enumerate() {
            for cell in line {
                if home[cell.stage] != device {
                    return Err(fail(
                        format!(
                            "{cell} is in line {device}, but stage {} begins in line {}",
                            cell.stage, home[cell.stage]
                        ),
                        "write all cells of a stage into the line of its device; lines are counted from 0",
                    ));
                }
                if cell.micro >= micros {
                    let hint = "micro-batches are counted from 0; `accumulate` says how many a step has";
                    return Err(fail(format!("{cell}: a step has {micros} micro-batches"), hint));
                }
                if !seen.insert(*cell) {
                    return Err(fail(format!("{cell} is in the schedule twice"), "a stage takes each action once"));
                }
                let other = |action| seen.contains(&Cell { action, ..*cell });
                if cell.action == Action::Backward && (other(Action::Input) || other(Action::Weight))
                    || matches!(cell.action, Action::Input | Action::Weight) && other(Action::Backward)
                {
                    let message = format!("{cell}: this backward pass is in the schedule whole and in parts");
                    return Err(fail(message, "write B, or I and W"));
                }
            }
            let mut open = 0;
            for entry in self.entries(device) {
                open += entry.iter().filter(|cell| cell.action == Action::Forward).count() as i64;
                if open > stash as i64 {
                    let cell = entry[0];
                    return Err(fail(
                        format!("at {cell} device {device} keeps the activations of {open} passes, more than {stash}"),
                        "begin backward passes earlier",
                    ));
                }
                open -= entry.iter().filter(|cell| cell.ends_pass()).count() as i64;
            }
            if line.is_empty() {
                let message = format!("line {device} of the schedule has no cells");
                return Err(fail(message, "give every device along pp a stage"));
            }
        }
        for (stage, micro) in (0..home.len()).flat_map(|stage| (0..micros).map(move |micro| (stage, micro))) {
            let has = |action| seen.contains(&Cell::new(stage, action, micro));
            let missing = match (has(Action::Forward), has(Action::Backward), has(Action::Input), has(Action::Weight)) {
                (false, ..) => "F",
                (_, false, false, _) => "B",
                (_, false, true, false) => "W",
                _ => continue,
            };
            let message = format!("{stage}{missing}{micro} is missing in the schedule");
            return Err(fail(message, "a stage takes every action on each micro-batch"));
        }
        self.simulate(&|entry| entry.len() as u64)
    }

    /// The cells that a cell waits for, apart from those before it in its line. Those of them that the table lacks do not count.
    pub(super) fn waits(cell: Cell, stages: usize) -> impl Iterator<Item = Cell> {
        let Cell { stage, action, micro } = cell;
        let at = move |stage, action| Cell::new(stage, action, micro);
        let list = match action {
            Action::Forward => [stage.checked_sub(1).map(|s| at(s, Action::Forward)), None, None],
            Action::Weight => [Some(at(stage, Action::Input)), None, None],
            Action::Backward | Action::Input => {
                let next = (stage + 1 < stages).then_some(stage + 1);
                [
                    Some(at(stage, Action::Forward)),
                    next.map(|s| at(s, Action::Backward)),
                    next.map(|s| at(s, Action::Input)),
                ]
            }
        };
        list.into_iter().flatten()
    }

    /// Runs the table with a cost for each pair and each other cell; transfers take no time. A deadlock is an error that names its
    /// cycle.
    pub fn simulate(&self, cost: &dyn Fn(&[Cell]) -> u64) -> Result<Timeline> {
        let (devices, stages) = (self.lines.len(), self.stages());
        let place: FxHashMap<Cell, (usize, usize)> = (self.lines.iter().enumerate())
            .flat_map(|(d, line)| line.iter().enumerate().map(move |(k, cell)| (*cell, (d, k))))
            .collect();
        let mut done: FxHashMap<Cell, u64> = FxHashMap::default();
        let mut next = vec![0; devices];
        let mut free = vec![0; devices];
        let mut busy = vec![0; devices];
        let mut starts: Vec<(u64, usize, usize, Cell)> = Vec::new();
        let total = place.len();
        while starts.len() < total {
            let before = starts.len();
            for d in 0..devices {
                loop {
                    let entry = self.entry(d, next[d]);
                    let waits = || entry.iter().flat_map(|cell| Table::waits(*cell, stages));
                    let known = || waits().filter(|x| place.contains_key(x));
                    if entry.is_empty() || !known().all(|x| done.contains_key(&x)) {
                        break;
                    }
                    let start = known().map(|x| done[&x]).max().unwrap_or(0).max(free[d]);
                    free[d] = start + cost(entry);
                    busy[d] += cost(entry);
                    for cell in entry {
                        done.insert(*cell, free[d]);
                        starts.push((start, d, next[d], *cell));
                        next[d] += 1;
                    }
                }
            }
            if starts.len() == before {
                return Err(self.deadlock(&next, &place, &done));
            }
        }
        starts.sort_unstable_by_key(|s| (s.0, s.1, s.2));
        let end = free.iter().copied().max().unwrap_or(0);
        let order = starts.into_iter().map(|s| s.3).collect();
        Ok(Timeline { order, end, idle: busy.into_iter().map(|b| end - b).collect() })
    }

    /// The error of a table in which no device can go on. `next`: the cell of each line that waits.
    fn deadlock(&self, next: &[usize], place: &FxHashMap<Cell, (usize, usize)>, done: &FxHashMap<Cell, u64>) -> Error {
        let waits_for = |d: usize| {
            let missing = |x: &Cell| place.contains_key(x) && !done.contains_key(x);
            let found = |cell: &Cell| Some((*cell, Table::waits(*cell, self.stages()).find(missing)?));
            let (cell, missing) = self.entry(d, next[d]).iter().find_map(found)?;
            Some((cell, missing, place[&missing].0))
        };
        // From any device that waits, following what it waits for ends in the cycle.
        let mut path: Vec<usize> = Vec::new();
        let mut at = (0..self.lines.len()).find(|d| waits_for(*d).is_some()).unwrap_or(0);
        while !path.contains(&at) {
            path.push(at);
            let Some((_, _, other)) = waits_for(at) else { break };
            at = other;
        }
        let first = path.iter().position(|d| *d == at).unwrap_or(0);
        let step = |d: &usize| {
            waits_for(*d).map_or_else(String::new, |(cell, missing, other)| {
                let beside = self.entry(other, next[other]).contains(&missing);
                let behind = waits_for(other).map(|waits| waits.0).filter(|head| *head != missing);
                let word = if beside { "beside" } else { "behind" };
                let behind = behind.map_or_else(String::new, |head| format!(", which is {word} {head}"));
                format!("{cell} waits for {missing}{behind}")
            })
        };
        let cycle = path[first..].iter().map(step).collect::<Vec<_>>().join("; ");
        fail(
            format!("the schedule is a deadlock: {cycle}"),
            "move the last cell of the cycle behind the one that it waits for",
        )
    }

    /// Words that differ for different tables, for plan keys.
    pub fn words(&self) -> impl Iterator<Item = u64> + '_ {
        self.lines.iter().flat_map(|line| {
            let pair = |c: &Cell| u64::from(self.seconds.contains(c)) << 62;
            let cell = move |c: &Cell| pair(c) | (c.stage as u64) << 40 | (c.action as u64) << 32 | c.micro as u64;
            std::iter::once(line.len() as u64 | 1 << 63).chain(line.iter().map(cell))
        })
    }
}

impl Hash for Table {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.words().for_each(|word| state.write_u64(word));
    }
}

impl Display for Table {
    /// As [`Table::parse`] reads it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for device in 0..self.lines.len() {
            let entry = |entry: &[Cell]| match entry {
                [first, second] => format!("({first};{second})"),
                cells => cells.iter().map(Cell::to_string).collect(),
            };
            writeln!(f, "{}", self.entries(device).map(entry).collect::<Vec<_>>().join(" "))?;
        }
        Ok(())
    }
}
