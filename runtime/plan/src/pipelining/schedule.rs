//! Names the pipeline schedules, and the device of each stage.

use super::cell_work::CellWork;
use super::generators as generate;
use super::late_weights;
use super::table::{Action, Cell, MOST_STAGES, Table};
use perilune_core::error::{Error, Result, did_you_mean};
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// In which order stages work on the micro-batches of a step.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Schedule {
    /// All forward passes, then all backward passes (Huang et al., GPipe, arXiv:1811.06965). Every stage keeps the activations of all
    /// micro-batches.
    FillDrain,
    /// Backward passes begin as early as they can, and each is followed by one forward pass (Narayanan et al., PipeDream,
    /// arXiv:1806.03377). A stage keeps the activations of as many micro-batches as there are stages from it on.
    #[default]
    OneForwardOneBackward,
    /// As 1F1B, with the gradients of weights computed later, where a device would wait (Qi et al., arXiv:2401.10241). Every stage
    /// keeps the activations of as many micro-batches as there are stages.
    ZeroBubble,
    /// As 1F1B with so many stages (chunks) a device, dealt to the devices in entry (Narayanan et al., Megatron-LM, arXiv:2104.04473).
    Interleaved(usize),
    /// Two stages a device, along a V: device d has stages d and 2P - 1 - d of 2P (Qi et al., arXiv:2405.15362). A device keeps the
    /// activations of as many micro-batches as with 1F1B, and waits only until the first one arrives if all passes take equal time.
    ZeroBubbleV,
    /// The stages of a V; the forward pass of one micro-batch is followed by the backward pass of another, or runs beside it where the
    /// passes exchange tensors along other axes (DeepSeek-AI, DualPipe, arXiv:2412.19437, halved to DualPipeV).
    DualPipeV,
    /// A recipe's own table.
    Own(Arc<Table>),
}

const NAMES: [&str; 6] = ["fill-drain", "1f1b", "zb-h1", "interleaved", "zbv", "dualpipev"];
/// Chunks of the interleaved schedule unless given.
const CHUNKS: usize = 2;
const MOST_CHUNKS: usize = 64;

fn fail<T>(message: String, hint: String) -> Result<T> {
    Err(Error::argument("pipeline", message).hint(hint))
}

impl Schedule {
    /// The schedule with that name, `interleaved,chunks=4`, or the table that a text of several cells writes.
    pub fn parse(text: &str) -> Result<Schedule> {
        let text = text.trim();
        if text.contains(char::is_whitespace) {
            return Ok(Schedule::Own(Arc::new(Table::parse(text)?)));
        }
        let (name, option) = text.split_once(',').map_or((text, None), |(name, option)| (name, Some(option)));
        let schedule = match name {
            "fill-drain" => Schedule::FillDrain,
            "1f1b" => Schedule::OneForwardOneBackward,
            "zb-h1" => Schedule::ZeroBubble,
            "interleaved" => Schedule::Interleaved(CHUNKS),
            "zbv" => Schedule::ZeroBubbleV,
            "dualpipev" => Schedule::DualPipeV,
            _ => {
                let hint = match did_you_mean(name, NAMES) {
                    Some(near) => format!("did you mean {near}?"),
                    None => format!("the schedules are {}, or a table of cells such as 0F0", NAMES.join(", ")),
                };
                return fail(format!("there is no schedule {name:?}"), hint);
            }
        };
        let Some(option) = option else { return Ok(schedule) };
        let (key, value) = option.split_once('=').unwrap_or((option, ""));
        match (key, schedule, value.parse()) {
            ("chunks", Schedule::Interleaved(_), Ok(chunks)) if (2..=MOST_CHUNKS).contains(&chunks) => {
                Ok(Schedule::Interleaved(chunks))
            }
            ("chunks", Schedule::Interleaved(_), _) => fail(
                format!("interleaved has {value:?} chunks a device; it needs a number from 2 to {MOST_CHUNKS}"),
                "write interleaved,chunks=2; with one chunk it would be 1f1b".into(),
            ),
            ("chunks", schedule, _) => fail(
                format!("schedule {} has a fixed number of stages a device, and no chunks", schedule.name()),
                "leave chunks out, or use the schedule interleaved".into(),
            ),
            _ => fail(
                format!("a schedule has no option {key:?}"),
                did_you_mean(key, ["chunks"])
                    .map_or("write interleaved,chunks=2".to_string(), |near| format!("did you mean {near}?")),
            ),
        }
    }

    pub fn name(&self) -> &'static str {
        match self {
            Schedule::FillDrain => NAMES[0],
            Schedule::OneForwardOneBackward => NAMES[1],
            Schedule::ZeroBubble => NAMES[2],
            Schedule::Interleaved(_) => NAMES[3],
            Schedule::ZeroBubbleV => NAMES[4],
            Schedule::DualPipeV => NAMES[5],
            Schedule::Own(_) => "the recipe's own",
        }
    }

    /// Words that differ for different schedules, for plan keys.
    pub fn words(&self) -> Vec<u64> {
        match self {
            Schedule::FillDrain => vec![0],
            Schedule::OneForwardOneBackward => vec![1],
            Schedule::ZeroBubble => vec![2],
            Schedule::Own(table) => std::iter::once(3).chain(table.words()).collect(),
            Schedule::Interleaved(chunks) => vec![4, *chunks as u64],
            Schedule::ZeroBubbleV => vec![5],
            Schedule::DualPipeV => vec![6],
        }
    }

    /// The device of each stage, for so many devices along `pp`.
    pub fn devices(&self, devices: usize) -> Vec<usize> {
        match self {
            Schedule::FillDrain | Schedule::OneForwardOneBackward | Schedule::ZeroBubble => (0..devices).collect(),
            Schedule::Interleaved(chunks) => (0..devices * chunks).map(|stage| stage % devices).collect(),
            Schedule::ZeroBubbleV | Schedule::DualPipeV => (0..devices).chain((0..devices).rev()).collect(),
            Schedule::Own(table) => table.devices(),
        }
    }

    /// The table for so many devices and micro-batches. A recipe's own is checked. An error if the schedule does not fit the numbers.
    pub fn table(&self, devices: usize, micros: usize) -> Result<Table> {
        let stages = self.devices(devices).len();
        if stages > MOST_STAGES {
            let message = format!("{}: pp={devices} has {stages} stages, more than {MOST_STAGES}", self.name());
            return fail(message, "use a smaller pp, or fewer chunks".into());
        }
        Ok(match self {
            Schedule::FillDrain => generate::fill_drain(devices, micros),
            Schedule::OneForwardOneBackward => generate::one_forward_one_backward(devices, micros),
            Schedule::ZeroBubble => generate::zero_bubble(devices, micros),
            Schedule::Interleaved(chunks) => {
                if !micros.is_multiple_of(devices) {
                    let near = micros.next_multiple_of(devices);
                    return fail(
                        format!("interleaved: {micros} micro-batches are no multiple of pp={devices}"),
                        format!("accumulate {near} micro-batches, or use another schedule"),
                    );
                }
                generate::interleaved(devices, *chunks, micros)
            }
            Schedule::ZeroBubbleV => generate::zero_bubble_v(devices, micros),
            Schedule::DualPipeV => {
                if micros < 2 * devices {
                    return fail(
                        format!("dualpipev: {micros} micro-batches are fewer than the {} stages", 2 * devices),
                        format!("accumulate at least {} micro-batches, or use zbv", 2 * devices),
                    );
                }
                generate::dual_pipe_v(devices, micros, false)
            }
            Schedule::Own(table) => {
                table.check(devices, micros, micros.saturating_mul(table.stages()))?;
                (**table).clone()
            }
        })
    }

    /// The table, with gradients of weights where devices would wait. `dualpipev` has pairs if it ends earlier with them. A recipe's own
    /// table stays as it is.
    pub(super) fn timed(&self, devices: usize, micros: usize, work: &CellWork) -> Result<Table> {
        let table = self.table(devices, micros)?;
        // The sum of all cells, and four times it, stays within 64 bits, however large the model is.
        let most = u64::MAX / (32 * table.lines.iter().map(Vec::len).sum::<usize>().max(1) as u64);
        let of = |all: &FxHashMap<Cell, u64>, cell: Cell| {
            let part = |action| all.get(&Cell { action, ..cell }).map_or(0, |own| (*own).min(most));
            match cell.action {
                Action::Backward => part(Action::Input) + part(Action::Weight),
                action => part(action),
            }
        };
        let sum = |of_cell: &dyn Fn(Cell) -> u64, entry: &[Cell]| entry.iter().map(|cell| of_cell(*cell)).sum::<u64>();
        let (computes, exchanges) = (|cell| of(&work.computes, cell), |cell| of(&work.exchanges, cell));
        // In a pair one cell computes while the other exchanges.
        let cost = |entry: &[Cell]| match entry {
            [_, _] => sum(&computes, entry).max(sum(&exchanges, entry)),
            _ => sum(&computes, entry) + sum(&exchanges, entry),
        };
        match self {
            Schedule::Own(_) => Ok(table),
            Schedule::DualPipeV if !work.exchanges.is_empty() => {
                let paired = late_weights::place(generate::dual_pipe_v(devices, micros, true), &cost)?;
                let placed = late_weights::place(table, &cost)?;
                Ok(if paired.0 < placed.0 { paired.1 } else { placed.1 })
            }
            _ => Ok(late_weights::place(table, &cost)?.1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMED: [Schedule; 7] = [
        Schedule::FillDrain,
        Schedule::OneForwardOneBackward,
        Schedule::ZeroBubble,
        Schedule::Interleaved(2),
        Schedule::Interleaved(3),
        Schedule::ZeroBubbleV,
        Schedule::DualPipeV,
    ];

    /// The most pairs of a stage and a micro-batch whose activations a device keeps.
    fn stash(schedule: &Schedule, devices: usize, micros: usize) -> usize {
        match schedule {
            Schedule::FillDrain => micros,
            Schedule::Interleaved(chunks) => 2 * (devices - 1) + (chunks - 1) * devices + 1,
            Schedule::ZeroBubbleV => 2 * devices,
            Schedule::DualPipeV => 2 * devices + 1,
            _ => devices,
        }
    }

    /// Costs of F, I, W; a whole backward pass is both parts.
    fn end(table: &Table, [f, i, w]: [u64; 3]) -> u64 {
        let of = |c: &Cell| match c.action {
            Action::Forward => f,
            Action::Input => i,
            Action::Weight => w,
            Action::Backward => i + w,
        };
        table.simulate(&|entry| entry.iter().map(of).sum()).unwrap().end
    }

    #[test]
    fn generated_tables_are_complete_and_keep_no_more_than_they_promise() {
        for (stages, micros) in (1..7usize).flat_map(|p| [1usize, 2, 3, 4, 5, 8, 13].map(|m| (p, m))) {
            for schedule in &NAMED {
                let fits = match schedule {
                    Schedule::Interleaved(_) => micros.is_multiple_of(stages),
                    Schedule::DualPipeV => micros >= 2 * stages,
                    _ => true,
                };
                let table = match schedule.table(stages, micros) {
                    Ok(table) => table,
                    Err(e) => {
                        assert!(!fits && e.hint.is_some(), "{}: {}", schedule.name(), e.message);
                        continue;
                    }
                };
                assert!(fits, "{} of {micros} micro-batches on {stages} devices", schedule.name());
                assert_eq!(table.devices(), schedule.devices(stages));
                let time = table.check(stages, micros, stash(schedule, stages, micros)).unwrap_or_else(|e| {
                    panic!("{} of {micros} micro-batches on {stages} devices: {}\n{table}", schedule.name(), e.message)
                });
                assert!(table.kept().iter().all(|kept| *kept <= stash(schedule, stages, micros)), "{table}");
                let cells: usize = table.lines.iter().map(Vec::len).sum();
                assert_eq!(time.order.len(), cells);
                assert_eq!(Table::parse(&table.to_string()).unwrap(), table);
                // The order is one in which every stage can run.
                let home = table.devices();
                for (device, line) in table.lines.iter().enumerate() {
                    let own: Vec<Cell> = time.order.iter().copied().filter(|c| home[c.stage] == device).collect();
                    assert_eq!(own, *line);
                }
            }
        }
    }

    #[test]
    fn bubbles_are_those_of_the_formulas() {
        for p in [2u64, 3, 4, 8] {
            for m in [p, 2 * p, 4 * p] {
                for [f, i, w] in [[1, 1, 1], [10, 10, 10], [10, 11, 9], [7, 8, 7]] {
                    let bubble =
                        |s: &Schedule| end(&s.table(p as usize, m as usize).unwrap(), [f, i, w]) - m * (f + i + w);
                    // (P - 1)(F + B) for both, (P - 1)(F + B - 2W) without the bubbles that gradients of weights fill.
                    assert_eq!(bubble(&Schedule::FillDrain), (p - 1) * (f + i + w), "P={p} M={m}");
                    assert_eq!(bubble(&Schedule::OneForwardOneBackward), (p - 1) * (f + i + w), "P={p} M={m}");
                    if f == i && i == w {
                        assert_eq!(bubble(&Schedule::ZeroBubble), (p - 1) * (f + i - w), "P={p} M={m}");
                    }
                }
            }
        }
    }

    /// Costs are those of a stage, of which a device has several.
    #[test]
    fn bubbles_of_several_stages_a_device_are_those_of_the_formulas() {
        for p in [2u64, 3, 4, 8] {
            for m in [2 * p, 3 * p, 4 * p] {
                for [f, i, w] in [[1, 1, 1], [10, 10, 10], [10, 11, 9], [7, 8, 7]] {
                    let case = format!("P={p} M={m} {f} {i} {w}");
                    let bubble = |s: &Schedule, stages: u64| {
                        end(&s.table(p as usize, m as usize).unwrap(), [f, i, w]) - m * stages * (f + i + w)
                    };
                    // (P - 1)(F + B) / v, with the costs of a device's v stages together.
                    for chunks in 2..5 {
                        let s = Schedule::Interleaved(chunks);
                        assert_eq!(bubble(&s, chunks as u64), (p - 1) * (f + i + w), "{chunks} chunks, {case}");
                    }
                    if f == i && i == w {
                        // No bubble but the first forward pass on its way to the last device.
                        assert_eq!(bubble(&Schedule::ZeroBubbleV, 2), (p - 1) * f, "{case}");
                        // Published: (PP / 2 - 1)(F&B + B - 3W), with PP = 2P stages, where the results of F&B come together. Here
                        // F and B are two actions, and the next stage begins an F earlier.
                        let published = (p - 1) * ((f + i + w) + (i + w) - 3 * w);
                        assert_eq!(bubble(&Schedule::DualPipeV, 2), published - (p - 1) * f, "{case}");
                        let paired = generate::dual_pipe_v(p as usize, m as usize, true);
                        assert_eq!(end(&paired, [f, i, w]) - m * 2 * (f + i + w), published, "{case}");
                    }
                }
            }
        }
    }

    #[test]
    fn any_work_is_placed() {
        for own in [0, u64::MAX] {
            for schedule in &NAMED {
                let table = schedule.table(4, 12).unwrap();
                let parts = |cell: &Cell| {
                    [Action::Forward, Action::Input, Action::Weight].map(|action| (Cell { action, ..*cell }, own))
                };
                let all: FxHashMap<Cell, u64> = table.lines.iter().flatten().flat_map(parts).collect();
                for exchanges in [FxHashMap::default(), all.clone()] {
                    let placed = schedule.timed(4, 12, &CellWork { computes: all.clone(), exchanges }).unwrap();
                    assert!(placed.check(4, 12, stash(schedule, 4, 12)).is_ok(), "{}, {own}", schedule.name());
                }
            }
        }
    }

    #[test]
    fn passes_run_in_pairs_where_they_exchange() {
        let all = |[f, i, w]: [u64; 3]| -> FxHashMap<Cell, u64> {
            let parts = [(Action::Forward, f), (Action::Input, i), (Action::Weight, w)];
            let cells = (0..8).flat_map(|stage| (0..12).map(move |micro| (stage, micro)));
            let cell = |(stage, micro)| parts.map(|(action, own)| (Cell::new(stage, action, micro), own));
            cells.flat_map(cell).collect()
        };
        let is_paired = |schedule: &Schedule, exchanges| {
            let work = CellWork { computes: all([299, 386, 237]), exchanges };
            !schedule.timed(4, 12, &work).unwrap().seconds.is_empty()
        };
        assert!(is_paired(&Schedule::DualPipeV, all([200, 200, 0])));
        // Two passes that wait for each other's first results wait longer than they save.
        assert!(!is_paired(&Schedule::DualPipeV, all([1, 1, 0])));
        assert!(!is_paired(&Schedule::DualPipeV, FxHashMap::default()));
        assert!(!is_paired(&Schedule::ZeroBubbleV, all([200, 200, 0])));
    }

    #[test]
    fn pairs_begin_and_end_together() {
        let text = "0F0 (0F1;0B0) 0B1\n1F0 1B0 1F1 1B1\n";
        let table = Table::parse(text).unwrap();
        assert_eq!(table.to_string(), text);
        assert_eq!(table.kept(), [2, 1]);
        assert_eq!(table.check(2, 2, 2).unwrap().end, 8);
        // Without the pair 0F1 ends before 1B0, and the second device does not wait for it.
        assert_eq!(Table::parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1").unwrap().check(2, 2, 2).unwrap().end, 6);
        assert_ne!(table.words().collect::<Vec<_>>(), Table::of(table.lines.clone()).words().collect::<Vec<_>>());
        // The activations of both passes are kept, whichever is written first.
        let table = Table::parse("0F0 (0B0;0F1) 0B1\n1F0 1B0 1F1 1B1").unwrap();
        let e = table.check(2, 2, 1).unwrap_err();
        assert_eq!(e.message, "at 0B0 device 0 keeps the activations of 2 passes, more than 1");
        let e = Table::parse("(0F0;0B0) 0F1 0B1\n1F0 1B0 1F1 1B1").unwrap().check(2, 2, 2).unwrap_err();
        assert_eq!(e.message, "the schedule is a deadlock: 0B0 waits for 0F0, which is beside 0B0");
        let e = Table::parse("0F0 (0F1;0B0) 0B1\n1F0 (1F1;1B0) 1B1").unwrap().check(2, 2, 2).unwrap_err();
        assert_eq!(
            e.message,
            "the schedule is a deadlock: 0B0 waits for 1B0, which is beside 1F1; 1F1 waits for 0F1, which is beside 0B0"
        );
        for word in ["(0F0;0B0", "0F0;0B0)", "(0F0)", "0F0;0B0", "(0F0,0B0)", "((0F0;0B0))", "(0F0;0B0;0F1)", "(0F0;)"]
        {
            let e = Table::parse(&format!("{word} 0F1 0B1\n1F0 1B0 1F1 1B1")).unwrap_err();
            assert!(e.hint.is_some_and(|hint| hint.contains("0F3")), "{word}: {}", e.message);
        }
    }

    #[test]
    fn tables_show_their_cells() {
        let lines = |s: &Schedule| s.table(2, 3).unwrap().to_string();
        assert_eq!(lines(&Schedule::FillDrain), "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2\n");
        assert_eq!(lines(&Schedule::OneForwardOneBackward), "0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2\n");
    }

    #[test]
    fn planted_cycles_are_named() {
        let error = |text: &str| Table::parse(text).and_then(|t| t.check(2, 2, 2)).map(|_| ()).unwrap_err();
        // Stage 0 wants the gradient of micro-batch 0 before it has sent what stage 1 needs first.
        let e = error("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1");
        assert_eq!(
            e.message,
            "the schedule is a deadlock: 0B0 waits for 1B0, which is behind 1F1; 1F1 waits for 0F1, which is behind 0B0"
        );
        // A stage that runs a backward pass before its forward pass waits for itself.
        let e = error("0B0 0F0 0F1 0B1\n1F0 1B0 1F1 1B1");
        assert_eq!(e.message, "the schedule is a deadlock: 0B0 waits for 0F0, which is behind 0B0");
        let e = error("0F0 0F1 0B0 0B1\n1F0 1W0 1I0 1F1 1B1");
        assert_eq!(e.message, "the schedule is a deadlock: 1W0 waits for 1I0, which is behind 1W0");
        // Backward passes may be in another order than forward passes.
        assert!(Table::parse("0F0 0F1 0B1 0B0\n1F0 1F1 1B1 1B0").unwrap().check(2, 2, 2).is_ok());
    }

    #[test]
    fn incomplete_tables_are_refused_with_the_cell() {
        for (text, message) in [
            ("0F0 0B0 0F1 0B1", "the schedule has 1 lines, and pp=2"),
            ("0F0 0F1 0B0 0B1\n1F0 1B0 1F1", "1B1 is missing in the schedule"),
            ("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1I1", "1W1 is missing in the schedule"),
            ("0F0 0F1 0B0 0B1\n1F0 1B0 1F0 1B1", "1F0 is in the schedule twice"),
            ("0F0 0F1 0B0 0B1\n1F0 1B0 1F2 1B1", "1F2: a step has 2 micro-batches"),
            ("0F0 0F1 0B0 0B1\n1F0 0B0 1F1 1B1", "0B0 is in line 1, but stage 0 begins in line 0"),
            ("0F0 0F1 0B0 0B1 1F0 1B0 1F1 1B1\n3F0 3F1 3B0 3B1", "2F0 is missing in the schedule"),
            ("0F0 0F1 0B0 0B1 1F0 1B0 1F1 1B1\n256F0", "256F0: a model has at most 256 stages"),
            ("0F0 0F1 0B0 0B1\n1F0 1B0 1I0 1F1 1B1", "1I0: this backward pass is in the schedule whole and in parts"),
            ("0F0 x", "\"x\" is no cell of a schedule"),
            ("0F0 0G0", "\"0G0\" is no cell of a schedule"),
        ] {
            let e = Table::parse(text).and_then(|t| t.check(2, 2, 2)).map(|_| ()).unwrap_err();
            assert_eq!((e.message.as_str(), e.hint.is_some()), (message, true), "{text}");
        }
        let table = Schedule::FillDrain.table(2, 4).unwrap();
        let e = table.check(2, 4, 2).unwrap_err();
        assert_eq!(e.message, "at 0F2 device 0 keeps the activations of 3 passes, more than 2");
    }

    #[test]
    fn schedules_have_names() {
        for schedule in NAMED.into_iter().filter(|s| *s != Schedule::Interleaved(3)) {
            assert_eq!(Schedule::parse(schedule.name()).unwrap(), schedule);
        }
        assert_eq!(Schedule::parse("interleaved,chunks=3").unwrap(), Schedule::Interleaved(3));
        for (text, message, hint) in [
            ("1f1", "there is no schedule \"1f1\"", "did you mean 1f1b?"),
            ("zbv,chunks=2", "schedule zbv has a fixed number of stages a device, and no chunks", "leave chunks out"),
            ("interleaved,chunks=1", "interleaved has \"1\" chunks a device; it needs a number from 2 to 64", "1f1b"),
            ("interleaved,chunk=2", "a schedule has no option \"chunk\"", "did you mean chunks?"),
        ] {
            let e = Schedule::parse(text).unwrap_err();
            assert_eq!(e.message, message);
            assert!(e.hint.as_ref().is_some_and(|h| h.contains(hint)), "{:?}", e.hint);
        }
        assert!(matches!(Schedule::parse("0F0 0B0").unwrap(), Schedule::Own(_)));
        let words: Vec<Vec<u64>> = NAMED.iter().map(Schedule::words).collect();
        assert!((1..words.len()).all(|k| !words[..k].contains(&words[k])), "{words:?}");
        let e = Schedule::Interleaved(8).table(64, 64).unwrap_err();
        assert_eq!(e.message, "interleaved: pp=64 has 512 stages, more than 256");
    }
}
