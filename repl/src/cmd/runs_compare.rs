//! `perilune runs --compare A B`: prints what differs between two runs, the metrics of both side by side, and what they have taken.

use super::runs::{print_json, status_cell};
use crate::console_out::{color, say};
use crate::failure::Failure;
use crate::format::{clock, grouped, short};
use crate::table::{Cell, Table, width};
use crate::terminal::{one_line, styled};
use perilune_train::runs::{self, At, Comparison, Difference, RunSummary};
use std::io::IsTerminal;
use std::path::Path;

/// Compares two runs that the command line names, and prints the result.
///
/// # Errors
/// With `alarm`, that B is worse than A by more than so many per cent in a measurement.
pub fn print(a: &Path, b: &Path, json: bool, alarm: Option<f64>) -> Result<(), Failure> {
    let found = &runs::compare(read(a)?, read(b)?)?;
    match json {
        true => print_json(&found.json())?,
        false => say(&text(found, alarm))?,
    }
    let Some(percent) = alarm else { return Ok(()) };
    let worse = found.measured.iter().filter(|m| m.is_alarm(percent));
    let list: Vec<String> =
        worse.map(|m| format!("{} by {:.1} %", m.name, m.loss_percent.unwrap_or_default())).collect();
    if list.is_empty() {
        return Ok(());
    }
    let [a, b] = found.runs.each_ref().map(|run| run.dir.display().to_string());
    Err(Failure::System(format!("{b} is worse than {a} in {}; --alarm {percent} allows less", list.join(", "))))
}

/// The loss in per cent from which on a measurement is marked.
const MARKED: f64 = 5.0;

fn read(named: &Path) -> Result<RunSummary, Failure> {
    let dir = runs::find(named)?;
    RunSummary::read(&dir)?.ok_or_else(|| {
        let rule = "it contains no run.json of a run (runs/NAME-DATE-TIME)";
        Failure::Usage(format!("--compare: {} is not a run directory: {rule}", dir.display()))
    })
}

/// Formats a comparison for the terminal. From `alarm` per cent on a loss is marked.
pub fn text(found: &Comparison, alarm: Option<f64>) -> String {
    let (width, color, alarm) = (width(), color(std::io::stdout().is_terminal()), alarm.unwrap_or(MARKED));
    let bold = |text: String| if color { styled("1", &text) } else { text };
    let mut out = head(found).text(width, color);
    let mut section = |title: &str, body: String| out += &format!("\n{}\n{body}", bold(title.into()));
    section("params", differences(&found.params, found.equal_params, "equal", width, color));
    if !found.environment.is_empty() {
        section("environment", differences(&found.environment, 0, "", width, color));
    }
    section("data", differences(&found.data, found.equal_data, "unchanged", width, color));
    section("recipe", code(found, color));
    section("metrics", metrics(found).text(width, color));
    if !found.measured.is_empty() {
        section("performance", measured(found, alarm).text(width, color));
    }
    out
}

fn head(found: &Comparison) -> Table {
    let mut table = Table::default();
    for title in ["", "run", "started"] {
        table.text_column(title);
    }
    table.text_column("status");
    table.number_column("steps");
    table.number_column("time");
    for (letter, run) in ["A", "B"].into_iter().zip(&found.runs) {
        table.row(vec![
            Cell::styled(letter, "1"),
            Cell::from(run.dir.display().to_string()),
            Cell::from(run.started_text()),
            status_cell(run.status),
            Cell::from(grouped(run.step())),
            Cell::from(run.metrics.seconds.map(clock)),
        ]);
    }
    table
}

fn differences(list: &[Difference], equal: usize, word: &str, width: Option<usize>, color: bool) -> String {
    let mut table = Table::default();
    for title in ["", "A", "B"] {
        table.text_column(title);
    }
    for d in list {
        let value = |k: usize| match &d.values[k] {
            Some(text) => Cell::from(text.clone()),
            None => Cell::styled("none", "2"),
        };
        table.row(vec![Cell::from(d.name.clone()), value(0), value(1)]);
    }
    let rest = match (equal, list.is_empty()) {
        (0, true) => "none\n".to_string(),
        (0, false) => String::new(),
        (n, true) => format!("no difference ({n} {word})\n"),
        (n, false) => format!("{n} {word}\n"),
    };
    if list.is_empty() { rest } else { table.text(width, color) + &rest }
}

fn code(found: &Comparison, color: bool) -> String {
    if found.code.is_empty() {
        return "no difference\n".into();
    }
    let mut out = String::new();
    for file in &found.code {
        out += &format!("{}\n", one_line(&file.path.display().to_string()));
        for line in &file.lines {
            let code = match line.as_bytes().first() {
                Some(b'+') => "32",
                Some(b'-') => "31",
                Some(b'@') => "36",
                _ => "",
            };
            let shown = one_line(line).replace("\\t", "\t");
            out += &if color && !code.is_empty() { styled(code, &shown) } else { shown };
            out.push('\n');
        }
    }
    out
}

fn measured(found: &Comparison, alarm: f64) -> Table {
    let mut table = Table::default();
    table.text_column("");
    table.number_column("A");
    table.number_column("B");
    table.text_column("");
    for m in &found.measured {
        let value = |run: usize| m.values[run].map(|v| format!("{} {}", short(v), m.unit));
        let change = m.loss_percent.map(|loss| match loss {
            loss if loss > 0.05 => format!("{loss:.1} % worse"),
            loss if loss < -0.05 => format!("{:.1} % better", -loss),
            _ => "equal".into(),
        });
        let change = match change {
            Some(text) if m.is_alarm(alarm) => Cell::styled(format!("{text} !"), "31"),
            text => Cell::from(text),
        };
        table.row(vec![Cell::from(m.name.to_string()), Cell::from(value(0)), Cell::from(value(1)), change]);
    }
    table
}

fn metrics(found: &Comparison) -> Table {
    let mut table = Table::default();
    table.text_column("");
    for title in ["A last", "B last", "A best", "B best"] {
        table.text_column(title);
    }
    let cell = |at: Option<At>| Cell::from(at.map(|at| format!("{} at {}", short(at.value), grouped(at.step))));
    for pair in &found.metrics {
        let last = |run: usize| cell(pair.values[run].map(|extent| extent.last));
        let best = [0, 1].map(|run| pair.best(run));
        let wins = |run: usize| match best {
            [Some(a), Some(b)] if a.value != b.value => ((a.value > b.value) == pair.goal.max) == (run == 0),
            _ => false,
        };
        let best = |run: usize| match best[run] {
            Some(at) if wins(run) => Cell::styled(format!("{} at {}", short(at.value), grouped(at.step)), "1"),
            at => cell(at),
        };
        table.row(vec![Cell::from(pair.goal.metric.clone()), last(0), last(1), best(0), best(1)]);
    }
    table
}
