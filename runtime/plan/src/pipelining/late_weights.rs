//! Moves the gradients of weights in a schedule to where a device would wait.
//!
//! The tables of the named schedules suppose that the passes forward, to the inputs and to the weights take equal time. Those of a
//! transformer do not: attention has no weights, so its backward pass is a part of `I` alone. Only the update waits for `W`, so a
//! device may take it at any time after its `I`, as long as it keeps no more activations than the table does. All other cells stay in
//! their order (Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 3, place all cells by measured times).

use super::table::{Action, Cell, Table};
use perilune_core::error::Result;
use rustc_hash::FxHashMap;
use std::collections::VecDeque;

/// A device takes a `W` if it would wait for more than this share of its time, in quarters.
const QUARTERS: [u64; 5] = [0, 1, 2, 3, 4];

/// Returns the table in which gradients of weights run where devices would wait, given the time of each cell; the table itself if
/// none of those tried ends earlier. Tables without `I` and `W` stay as they are.
pub fn place(table: Table, cost: &dyn Fn(Cell) -> u64) -> Result<Table> {
    if !table.lines.iter().flatten().any(|cell| cell.action == Action::Weight) {
        return Ok(table);
    }
    let kept = table.kept();
    let parted = in_parts(&table);
    let mut best = (table.simulate(cost)?.end, table);
    for quarters in QUARTERS {
        let found = fill(&parted, cost, &kept, quarters);
        let end = found.simulate(cost)?.end;
        if end < best.0 {
            best = (end, found);
        }
    }
    Ok(best.1)
}

/// The table with every backward pass in two parts.
fn in_parts(table: &Table) -> Table {
    let parts = |cell: &Cell| match cell.action {
        Action::Backward => vec![Cell { action: Action::Input, ..*cell }, Cell { action: Action::Weight, ..*cell }],
        _ => vec![*cell],
    };
    Table { lines: table.lines.iter().map(|line| line.iter().flat_map(parts).collect()).collect() }
}

/// A device while the table runs.
struct Device {
    /// Its cells but `W`, and those of them that are done.
    cells: Vec<Cell>,
    done: usize,
    /// The `W` whose `I` is done.
    open: VecDeque<Cell>,
    line: Vec<Cell>,
    /// When it ends what it has taken.
    time: u64,
    /// The pairs of a stage and a micro-batch whose activations it keeps.
    kept: usize,
}

impl Device {
    fn new(line: &[Cell]) -> Device {
        let cells = line.iter().copied().filter(|cell| cell.action != Action::Weight).collect();
        Device { cells, done: 0, open: VecDeque::new(), line: Vec::new(), time: 0, kept: 0 }
    }

    fn take(&mut self, cell: Cell, start: u64, cost: u64) {
        self.line.push(cell);
        self.time = start + cost;
        match cell.action {
            Action::Forward => self.kept += 1,
            Action::Input => self.open.push_back(Cell { action: Action::Weight, ..cell }),
            Action::Weight | Action::Backward => self.kept = self.kept.saturating_sub(1),
        }
    }
}

/// Runs the table, whose `W` come where a device waits, or may keep no further activations. `kept`: the most of each device.
fn fill(table: &Table, cost: &dyn Fn(Cell) -> u64, kept: &[usize], quarters: u64) -> Table {
    let stages = table.stages();
    let mut devices: Vec<Device> = table.lines.iter().map(|line| Device::new(line)).collect();
    let mut ends: FxHashMap<Cell, u64> = FxHashMap::default();
    // The next cell of a device that begins first. The others begin no earlier, so what they end changes nothing of it.
    let next = |devices: &[Device], ends: &FxHashMap<Cell, u64>| {
        let start = |(k, d): (usize, &Device)| {
            let cell = *d.cells.get(d.done)?;
            let known = Table::waits(cell, stages).filter(|x| x.action != Action::Backward);
            let arrival = known.map(|x| ends.get(&x).copied()).try_fold(0, |latest, end| Some(latest.max(end?)))?;
            Some((arrival.max(d.time), k, cell))
        };
        devices.iter().enumerate().filter_map(start).min_by_key(|found| (found.0, found.1))
    };
    while let Some((start, k, cell)) = next(&devices, &ends) {
        let device = &mut devices[k];
        let is_full = cell.action == Action::Forward && device.kept >= kept[k];
        let fits = |late: &&Cell| is_full || (start - device.time) * 4 > quarters * cost(**late);
        if let Some(late) = device.open.front().filter(fits).copied() {
            device.open.pop_front();
            device.take(late, device.time, cost(late));
            continue;
        }
        device.take(cell, start, cost(cell));
        device.done += 1;
        ends.insert(cell, device.time);
    }
    let line = |mut device: Device| {
        device.line.extend(device.open);
        device.line
    };
    Table { lines: devices.into_iter().map(line).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipelining::Schedule;

    /// F, I and W of a stage of GPT-2 1558M on an H200, in tens of microseconds.
    const TRANSFORMER: [u64; 3] = [299, 386, 237];

    fn costs([f, i, w]: [u64; 3]) -> impl Fn(Cell) -> u64 {
        move |cell| match cell.action {
            Action::Forward => f,
            Action::Input => i,
            Action::Weight => w,
            Action::Backward => i + w,
        }
    }

    #[test]
    fn tables_end_no_later_and_keep_no_more() {
        for times in [[1, 1, 1], TRANSFORMER, [10, 10, 1], [1, 10, 10], [7, 0, 3]] {
            let cost = costs(times);
            for (p, m) in [(1, 4), (2, 4), (3, 7), (4, 8), (4, 13), (8, 16)] {
                for schedule in [Schedule::ZeroBubble, Schedule::ZeroBubbleV, Schedule::DualPipeV] {
                    let Ok(table) = schedule.table(p, m) else { continue };
                    let placed = place(table.clone(), &cost).unwrap();
                    let most = table.kept().into_iter().max().unwrap();
                    placed.check(p, m, most).unwrap_or_else(|e| panic!("{}, {p} {m}: {}", schedule.name(), e.message));
                    assert!(placed.kept().iter().zip(table.kept()).all(|(a, b)| *a <= b), "{placed}\n{table}");
                    let end = |t: &Table| t.simulate(&cost).unwrap().end;
                    assert!(end(&placed) <= end(&table), "{}, {p} {m} {times:?}", schedule.name());
                    assert_eq!(placed.devices(), table.devices());
                }
            }
        }
    }

    #[test]
    fn devices_of_transformers_wait_less() {
        let cost = costs(TRANSFORMER);
        let bubble = |table: &Table| {
            let work = 16 * TRANSFORMER.iter().sum::<u64>();
            1.0 - work as f64 / table.simulate(&cost).unwrap().end as f64
        };
        let table = Schedule::DualPipeV.table(4, 8).unwrap();
        let placed = place(table.clone(), &cost).unwrap();
        // The first forward pass on its way to the last device is 0.057 of a step.
        let (before, after) = (bubble(&table), bubble(&placed));
        assert!(before > 0.08 && after < 0.065, "{before} {after}");
    }

    #[test]
    fn tables_without_parts_stay() {
        for schedule in [Schedule::FillDrain, Schedule::OneForwardOneBackward, Schedule::Interleaved(2)] {
            let table = schedule.table(4, 8).unwrap();
            assert_eq!(place(table.clone(), &costs(TRANSFORMER)).unwrap(), table);
        }
    }
}
