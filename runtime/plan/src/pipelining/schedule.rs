//! Names the pipeline schedules and generates their tables.

use super::table::{Action, Cell, Table};
use perilune_core::error::{Error, Result, did_you_mean};
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
    /// A recipe's own table.
    Own(Arc<Table>),
}

/// Schedules that are known by name and do not run: a device has one stage.
const SEVERAL_STAGES: [&str; 3] = ["interleaved", "zbv", "dualpipev"];
const NAMES: [&str; 3] = ["fill-drain", "1f1b", "zb-h1"];

impl Schedule {
    /// The schedule with that name, or the table that a text of several cells writes.
    pub fn parse(text: &str) -> Result<Schedule> {
        let name = text.trim();
        if SEVERAL_STAGES.contains(&name) {
            let message =
                format!("schedule {name:?} gives each device several stages, which this version does not run");
            return Err(Error::argument("pipeline", message).hint(format!("use one of {}", NAMES.join(", "))));
        }
        match name {
            "fill-drain" => Ok(Schedule::FillDrain),
            "1f1b" => Ok(Schedule::OneForwardOneBackward),
            "zb-h1" => Ok(Schedule::ZeroBubble),
            _ if name.contains(char::is_whitespace) => Ok(Schedule::Own(Arc::new(Table::parse(text)?))),
            _ => {
                let hint = match did_you_mean(name, NAMES) {
                    Some(near) => format!("did you mean {near}?"),
                    None => format!("the schedules are {}, or a table of cells such as 0F0", NAMES.join(", ")),
                };
                Err(Error::argument("pipeline", format!("there is no schedule {name:?}")).hint(hint))
            }
        }
    }

    pub fn name(&self) -> &'static str {
        match self {
            Schedule::FillDrain => NAMES[0],
            Schedule::OneForwardOneBackward => NAMES[1],
            Schedule::ZeroBubble => NAMES[2],
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
        }
    }

    /// The table for so many stages and micro-batches. A recipe's own is checked.
    pub fn table(&self, stages: usize, micros: usize) -> Result<Table> {
        Ok(match self {
            Schedule::FillDrain => fill_drain(stages, micros),
            Schedule::OneForwardOneBackward => one_forward_one_backward(stages, micros),
            Schedule::ZeroBubble => zero_bubble(stages, micros),
            Schedule::Own(table) => {
                table.check(stages, micros, micros)?;
                (**table).clone()
            }
        })
    }
}

/// The table of stages that only compute forward.
pub fn forward_only(stages: usize, micros: usize) -> Table {
    let line = |s| (0..micros).map(|m| Cell::new(s, Action::Forward, m)).collect();
    Table { lines: (0..stages).map(line).collect() }
}

fn fill_drain(stages: usize, micros: usize) -> Table {
    let line = |s| {
        let forward = (0..micros).map(move |m| Cell::new(s, Action::Forward, m));
        forward.chain((0..micros).map(move |m| Cell::new(s, Action::Backward, m))).collect()
    };
    Table { lines: (0..stages).map(line).collect() }
}

fn one_forward_one_backward(stages: usize, micros: usize) -> Table {
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
    Table { lines: (0..stages).map(line).collect() }
}

/// Fills the table step by step with actions of equal duration. A device takes forward passes until as many are ahead as with 1F1B, then
/// the gradient of inputs, for which the stage before waits; gradients of weights where neither can be taken.
fn zero_bubble(stages: usize, micros: usize) -> Table {
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
    Table { lines }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMED: [Schedule; 3] = [Schedule::FillDrain, Schedule::OneForwardOneBackward, Schedule::ZeroBubble];

    /// Costs of F, I, W; a whole backward pass is both parts.
    fn end(table: &Table, [f, i, w]: [u64; 3]) -> u64 {
        let cost = |c: Cell| match c.action {
            Action::Forward => f,
            Action::Input => i,
            Action::Weight => w,
            Action::Backward => i + w,
        };
        table.simulate(&cost).unwrap().end
    }

    #[test]
    fn generated_tables_are_complete_and_keep_no_more_than_they_promise() {
        for (stages, micros) in (1..7).flat_map(|p| [1, 2, 3, 4, 5, 8, 13].map(|m| (p, m))) {
            for schedule in &NAMED {
                let table = schedule.table(stages, micros).unwrap();
                let stash = if *schedule == Schedule::FillDrain { micros } else { stages };
                let time =
                    table.check(stages, micros, stash).unwrap_or_else(|e| panic!("{}: {}", schedule.name(), e.message));
                let cells: usize = table.lines.iter().map(Vec::len).sum();
                assert_eq!(time.order.len(), cells);
                assert_eq!(Table::parse(&table.to_string()).unwrap(), table);
                // The order is one in which every stage can run.
                for line in &table.lines {
                    let own: Vec<Cell> = time.order.iter().copied().filter(|c| c.stage == line[0].stage).collect();
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
            ("0F0 0F1 0B0 0B1\n1F0 0B0 1F1 1B1", "0B0 is in line 1, but device 1 has stage 1"),
            ("0F0 0F1 0B0 0B1\n1F0 1B0 1I0 1F1 1B1", "1I0: this backward pass is in the schedule whole and in parts"),
            ("0F0 x", "\"x\" is no cell of a schedule"),
            ("0F0 0G0", "\"0G0\" is no cell of a schedule"),
        ] {
            let e = Table::parse(text).and_then(|t| t.check(2, 2, 2)).map(|_| ()).unwrap_err();
            assert_eq!((e.message.as_str(), e.hint.is_some()), (message, true), "{text}");
        }
        let table = Schedule::FillDrain.table(2, 4).unwrap();
        let e = table.check(2, 4, 2).unwrap_err();
        assert_eq!(e.message, "at 0F2 stage 0 keeps the activations of 3 micro-batches, more than 2");
    }

    #[test]
    fn schedules_have_names() {
        for schedule in NAMED {
            assert_eq!(Schedule::parse(schedule.name()).unwrap(), schedule);
        }
        let e = Schedule::parse("1f1").unwrap_err();
        assert_eq!(
            (e.message.as_str(), e.hint.as_deref()),
            ("there is no schedule \"1f1\"", Some("did you mean 1f1b?"))
        );
        let e = Schedule::parse("zbv").unwrap_err();
        assert_eq!(e.message, "schedule \"zbv\" gives each device several stages, which this version does not run");
        assert!(matches!(Schedule::parse("0F0 0B0").unwrap(), Schedule::Own(_)));
    }
}
