//! Moves the gradients of weights in a schedule to where a device would wait.
//!
//! The tables of the named schedules suppose that the passes forward, to the inputs and to the weights take equal time. Those of a
//! transformer do not: attention has no weights, so its backward pass is a part of `I` alone. Only the update waits for `W`, so a
//! device may take it at any time after its `I`, as long as it keeps no more activations than the table does. All other cells stay in
//! their order (Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 3, place all cells by measured times).

use super::table::{Action, Cell, Table};
use perilune_core::error::Result;
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::VecDeque;

/// A device takes a `W` if it would wait for more than this share of its time, in quarters.
const QUARTERS: [u64; 5] = [0, 1, 2, 3, 4];

/// Returns the table in which gradients of weights run where devices would wait, given the time of each cell and pair, and when it ends;
/// the table itself if none of those tried ends earlier. Tables without `I` and `W` stay as they are.
pub fn place(table: Table, cost: &dyn Fn(&[Cell]) -> u64) -> Result<(u64, Table)> {
    let end = table.simulate(cost)?.end;
    if !table.lines.iter().flatten().any(|cell| cell.action == Action::Weight) {
        return Ok((end, table));
    }
    let kept = table.kept();
    let mut best = (end, table.clone());
    let divides: &[bool] = if table.seconds.is_empty() { &[true] } else { &[true, false] };
    for quarters in QUARTERS {
        for is_divided in divides {
            let found = fill(&table, cost, &kept, quarters, *is_divided);
            let end = found.simulate(cost)?.end;
            if end < best.0 {
                best = (end, found);
            }
        }
    }
    Ok(best)
}

/// A device while the table runs.
struct Device {
    /// Its cells but `W`, those of a pair together, and how many of them are done. Of whole backward passes they have the first part,
    /// but of one in a pair only if pairs are divided.
    entries: Vec<Vec<Cell>>,
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
    fn new<'a>(entries: impl Iterator<Item = &'a [Cell]>, is_divided: bool) -> Device {
        let first = |cell: &Cell, is_whole: bool| match cell.action {
            Action::Weight => None,
            Action::Backward if !is_whole => Some(Cell { action: Action::Input, ..*cell }),
            _ => Some(*cell),
        };
        let firsts = |entry: &[Cell]| {
            let is_whole = entry.len() > 1 && !is_divided;
            entry.iter().filter_map(|cell| first(cell, is_whole)).collect::<Vec<_>>()
        };
        let entries = entries.map(firsts).filter(|entry| !entry.is_empty());
        Device { entries: entries.collect(), done: 0, open: VecDeque::new(), line: Vec::new(), time: 0, kept: 0 }
    }

    fn take(&mut self, entry: &[Cell], start: u64, cost: u64) {
        self.line.extend(entry);
        self.time = start + cost;
        for cell in entry {
            match cell.action {
                Action::Forward => self.kept += 1,
                Action::Input => self.open.push_back(Cell { action: Action::Weight, ..*cell }),
                Action::Weight | Action::Backward => self.kept = self.kept.saturating_sub(1),
            }
        }
    }
}

/// Runs the table, whose `W` come where a device waits, or may keep no further activations. `kept`: the most of each device.
fn fill(table: &Table, cost: &dyn Fn(&[Cell]) -> u64, kept: &[usize], quarters: u64, is_divided: bool) -> Table {
    let stages = table.stages();
    let mut devices: Vec<Device> =
        (0..table.lines.len()).map(|device| Device::new(table.entries(device), is_divided)).collect();
    let seconds = devices.iter().flat_map(|device| &device.entries).filter_map(|entry| entry.get(1)).copied().collect();
    let has: FxHashSet<Cell> = devices.iter().flat_map(|device| device.entries.iter().flatten()).copied().collect();
    let mut ends: FxHashMap<Cell, u64> = FxHashMap::default();
    // The next cell of a device that begins first. The others begin no earlier, so what they end changes nothing of it.
    let next = |devices: &[Device], ends: &FxHashMap<Cell, u64>| {
        let start = |(k, d): (usize, &Device)| {
            let entry = d.entries.get(d.done)?;
            let waits = entry.iter().flat_map(|cell| Table::waits(*cell, stages));
            let known = waits.filter(|x| has.contains(x));
            let arrival = known.map(|x| ends.get(&x).copied()).try_fold(0, |latest, end| Some(latest.max(end?)))?;
            Some((arrival.max(d.time), k))
        };
        devices.iter().enumerate().filter_map(start).min_by_key(|found| (found.0, found.1))
    };
    while let Some((start, k)) = next(&devices, &ends) {
        let device = &mut devices[k];
        let entry = device.entries[device.done].clone();
        let is_full = entry.iter().any(|cell| cell.action == Action::Forward) && device.kept >= kept[k];
        let fits = |late: &&Cell| is_full || (start - device.time) * 4 > quarters * cost(&[**late]);
        if let Some(late) = device.open.front().filter(fits).copied() {
            device.open.pop_front();
            device.take(&[late], device.time, cost(&[late]));
            continue;
        }
        device.take(&entry, start, cost(&entry));
        device.done += 1;
        ends.extend(entry.into_iter().map(|cell| (cell, device.time)));
    }
    let line = |mut device: Device| {
        device.line.extend(device.open);
        device.line
    };
    Table { lines: devices.into_iter().map(line).collect(), seconds }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipelining::Schedule;
    use crate::pipelining::generators::dual_pipe_v;

    /// F, I and W of a stage of GPT-2 1558M on an H200, in tens of microseconds.
    const TRANSFORMER: [u64; 3] = [299, 386, 237];

    fn costs([f, i, w]: [u64; 3]) -> impl Fn(&[Cell]) -> u64 {
        let of = move |cell: &Cell| match cell.action {
            Action::Forward => f,
            Action::Input => i,
            Action::Weight => w,
            Action::Backward => i + w,
        };
        move |entry| entry.iter().map(of).sum()
    }

    #[test]
    fn tables_end_no_later_and_keep_no_more() {
        for times in [[1, 1, 1], TRANSFORMER, [10, 10, 1], [1, 10, 10], [7, 0, 3]] {
            let cost = costs(times);
            for (p, m) in [(1, 4), (2, 4), (3, 7), (4, 8), (4, 13), (8, 16)] {
                let mut tables: Vec<(&str, Table)> = Vec::new();
                for schedule in [Schedule::ZeroBubble, Schedule::ZeroBubbleV, Schedule::DualPipeV] {
                    tables.extend(schedule.table(p, m).map(|table| (schedule.name(), table)));
                }
                tables.extend((m >= 2 * p).then(|| ("pairs", dual_pipe_v(p, m, true))));
                for (name, table) in tables {
                    let (_, placed) = place(table.clone(), &cost).unwrap();
                    let most = table.kept().into_iter().max().unwrap();
                    placed.check(p, m, most).unwrap_or_else(|e| panic!("{name}, {p} {m}: {}", e.message));
                    assert!(placed.kept().iter().zip(table.kept()).all(|(a, b)| *a <= b), "{placed}\n{table}");
                    let end = |t: &Table| t.simulate(&cost).unwrap().end;
                    assert!(end(&placed) <= end(&table), "{name}, {p} {m} {times:?}");
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
        let (_, placed) = place(table.clone(), &cost).unwrap();
        // The first forward pass on its way to the last device is 0.057 of a step.
        let (before, after) = (bubble(&table), bubble(&placed));
        assert!(before > 0.08 && after < 0.065, "{before} {after}");
    }

    #[test]
    fn tables_without_parts_stay() {
        for schedule in [Schedule::FillDrain, Schedule::OneForwardOneBackward, Schedule::Interleaved(2)] {
            let table = schedule.table(4, 8).unwrap();
            assert_eq!(place(table.clone(), &costs(TRANSFORMER)).unwrap().1, table);
        }
    }
}
