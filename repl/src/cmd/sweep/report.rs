//! Compares the runs of a sweep: ranks points at a rung, and prints means over seeds with confidence intervals.

use crate::console_out::{ConsoleOut, Mode, color};
use crate::failure::Failure;
use crate::format::{grouped, short};
use crate::table::{Cell, Table, width};
use perilune_core::error::did_you_mean;
use perilune_train::numbers;
use perilune_train::runs::{Goal, Metrics, RunSummary, Status};
use perilune_train::sweep::{Estimate, Plan, Rung, SEED, SweepDir, Trial};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::io::IsTerminal;

/// Returns the metric by which runs are compared, and its value at a step, or after the last one.
pub fn value(run: &RunSummary, plan: &Plan, at: Option<u64>) -> Result<Option<(Goal, f64)>, Failure> {
    let Some(goal) = plan.metric.as_deref().map(Goal::parse).or_else(|| run.goal()) else { return Ok(None) };
    let metrics = Metrics::read_up_to(&run.dir, at.unwrap_or(u64::MAX))?;
    Ok(metrics.by_name.get(&goal.metric).map(|extent| (goal, extent.last.value)))
}

/// What became of a trial.
struct Outcome<'a> {
    trial: &'a Trial,
    run: Option<RunSummary>,
    value: Option<(Goal, f64)>,
}

impl Outcome<'_> {
    fn read<'a>(dir: &SweepDir, trial: &'a Trial, at: Option<u64>) -> Result<Outcome<'a>, Failure> {
        let path = dir.run_dir(trial);
        let run = if path.is_dir() { RunSummary::read(&path)? } else { None };
        let value = match &run {
            Some(run) if run.status != Status::Damaged => value(run, &dir.plan, at)?,
            _ => None,
        };
        Ok(Outcome { trial, run, value })
    }

    /// The value of a run that went as far as it was asked to, if it is finite.
    fn sound(&self) -> Option<f64> {
        let ended = self.run.as_ref().is_some_and(|run| matches!(run.status, Status::Finished | Status::Stopped));
        self.value.as_ref().map(|v| v.1).filter(|v| ended && v.is_finite())
    }

    fn error(&self) -> String {
        match &self.run {
            None => "it has no run directory".into(),
            Some(run) if run.status == Status::Failed => {
                run.error.as_deref().and_then(|e| e.lines().next()).unwrap_or("failed").to_string()
            }
            Some(run) if !matches!(run.status, Status::Finished | Status::Stopped) => {
                format!("{}; --resume continues the sweep", run.status.name())
            }
            Some(run) if self.value.is_none() => format!("{}, without the metric", run.status.name()),
            Some(_) => "the metric is not finite".into(),
        }
    }
}

/// Returns the points with the best means at the last rung, in the order of the plan; all at the first one. Points with a failed run
/// come last.
pub fn best(dir: &SweepDir, of: &[usize], count: usize, rung: Option<Rung>) -> Result<Vec<usize>, Failure> {
    let Some(rung) = rung else { return Ok(of.to_vec()) };
    let mut ranked = Vec::new();
    for point in of {
        let (mut sum, mut failed, mut n, mut max) = (0.0, 0, 0, false);
        for trial in dir.plan.trials.iter().filter(|t| t.point == *point) {
            let outcome = Outcome::read(dir, trial, Some(rung.until))?;
            match (outcome.sound(), &outcome.value) {
                (Some(v), Some((goal, _))) => (sum, n, max) = (sum + v, n + 1, goal.max),
                _ => failed += 1,
            }
        }
        let mean = if n > 0 { sum / f64::from(n) } else { f64::INFINITY };
        ranked.push((failed, if max { -mean } else { mean }, *point));
    }
    ranked.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)).then(a.2.cmp(&b.2)));
    let mut out: Vec<usize> = ranked.into_iter().filter(|r| r.1.is_finite()).take(count).map(|r| r.2).collect();
    out.sort_unstable();
    Ok(out)
}

/// Returns the event `trial` of `--json`.
pub fn trial_json(dir: &SweepDir, trial: &Trial, at: Option<u64>) -> Result<Value, Failure> {
    let outcome = Outcome::read(dir, trial, at)?;
    let run = outcome.run.as_ref();
    let params: Map<String, Value> = trial.values.iter().map(|(k, v)| (k.clone(), v.as_str().into())).collect();
    Ok(json!({
        "event": "trial", "name": trial.name, "run_dir": dir.run_dir(trial).display().to_string(), "params": params,
        "point": trial.point, "status": run.map(|r| r.status.name()), "step": run.map(RunSummary::step),
        "metric": outcome.value.as_ref().map(|v| v.0.metric.as_str()),
        "value": outcome.value.as_ref().map(|v| numbers::json(v.1)),
        "seconds": run.and_then(|r| r.metrics.seconds), "error": run.and_then(|r| r.error.as_deref()),
    }))
}

/// One row of the table.
struct Group<'a> {
    trials: Vec<Outcome<'a>>,
    estimate: Option<Estimate>,
    failed: usize,
    step: u64,
}

/// Prints the table, or the event `summary`. `last` are the points of the last rung. Returns the number of failed trials.
pub fn print(dir: &SweepDir, last: &[usize], rung: Option<Rung>, out: &ConsoleOut) -> Result<usize, Failure> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    for point in 0..dir.plan.points() {
        let trials = dir.plan.trials.iter().filter(|t| t.point == point);
        let trials = trials.map(|t| Outcome::read(dir, t, None)).collect::<Result<Vec<_>, _>>()?;
        let values: Vec<f64> = trials.iter().filter_map(Outcome::sound).collect();
        let step = trials.iter().filter_map(|t| t.run.as_ref()).map(RunSummary::step).max().unwrap_or(0);
        groups.push(Group { failed: trials.len() - values.len(), estimate: Estimate::of(&values), trials, step });
    }
    let outcomes = || groups.iter().flat_map(|g| &g.trials);
    let goal = outcomes().find_map(|o| o.value.as_ref()).map(|v| v.0.clone());
    if goal.is_none()
        && let Some(metric) = &dir.plan.metric
    {
        no_metric(metric, outcomes())?;
    }
    let max = goal.as_ref().is_some_and(|g| g.max);
    let rank = |point: &usize| groups[*point].estimate.map_or(f64::INFINITY, |e| if max { -e.mean } else { e.mean });
    let best = last.iter().copied().filter(|p| rank(p).is_finite()).min_by(|a, b| rank(a).total_cmp(&rank(b)));
    let failed: usize = groups.iter().map(|g| g.failed).sum();
    let names: Vec<&str> =
        dir.plan.trials.first().map_or(Vec::new(), |t| {
            t.values.iter().map(|(name, _)| name.as_str()).filter(|name| *name != SEED).collect()
        });
    if out.mode == Mode::Json {
        let group = |(k, g): (usize, &Group<'_>)| {
            let params: Map<String, Value> = point_of(g).map(|(k, v)| (k.clone(), v.as_str().into())).collect();
            json!({
                "params": params, "mean": g.estimate.map(|e| numbers::json(e.mean)),
                "half_width": g.estimate.and_then(|e| e.half_width).map(numbers::json),
                "runs": g.trials.len(), "failed": g.failed, "step": g.step, "best": best == Some(k),
            })
        };
        out.event(&json!({
            "event": "summary", "run_dir": dir.path.display().to_string(), "metric": goal.as_ref().map(|g| &g.metric),
            "max": max, "confidence": 0.95, "groups": groups.iter().enumerate().map(group).collect::<Vec<_>>(),
            "trials": dir.plan.trials.len(), "failed": failed,
        }));
        return Ok(failed);
    }
    let table = table(&groups, &names, goal.as_ref(), best, rung.is_some());
    out.without_bar(|| crate::console_out::say(&table.text(width(), color(std::io::stdout().is_terminal()))))?;
    if groups.iter().any(|g| g.estimate.is_some_and(|e| e.half_width.is_some())) {
        out.line("±: half the width of the confidence interval of 95 % of the mean (Student's t)");
    }
    for failure in outcomes().filter(|o| o.sound().is_none()) {
        out.warn(&format!("{}: {}", failure.trial.name, failure.error()));
    }
    Ok(failed)
}

fn no_metric<'a>(metric: &str, outcomes: impl Iterator<Item = &'a Outcome<'a>>) -> Result<(), Failure> {
    let mut known = BTreeSet::new();
    for run in outcomes.filter_map(|o| o.run.as_ref()) {
        known.extend(Metrics::read_up_to(&run.dir, u64::MAX)?.by_name.into_keys());
    }
    if known.is_empty() {
        return Ok(());
    }
    let wanted = Goal::parse(metric).metric;
    let near = did_you_mean(&wanted, known.iter().map(String::as_str)).map(|n| format!(". Did you mean '{n}'?"));
    let list = known.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
    let near = near.unwrap_or_default();
    Err(Failure::Usage(format!("--metric {metric}: no run has logged it (there are {list}){near}")))
}

/// The values of a point, without the seed.
fn point_of<'a>(group: &'a Group<'_>) -> impl Iterator<Item = &'a (String, String)> {
    group.trials.first().into_iter().flat_map(|o| &o.trial.values).filter(|(name, _)| name != SEED)
}

fn table(groups: &[Group<'_>], names: &[&str], goal: Option<&Goal>, best: Option<usize>, halving: bool) -> Table {
    let has_seeds = groups.iter().any(|g| g.trials.iter().any(|o| o.trial.values.iter().any(|(k, _)| k == SEED)));
    let mut table = Table::default();
    names.iter().for_each(|name| table.text_column(name));
    if halving {
        table.number_column("step");
    }
    table.text_column(goal.map_or("metric", |g| g.metric.as_str()));
    table.text_column("");
    table.text_column("");
    for (k, group) in groups.iter().enumerate() {
        let mut cells: Vec<Cell> = point_of(group)
            .map(|(_, v)| Cell::from(if v.is_empty() { "\"\"".to_string() } else { v.clone() }))
            .collect();
        if halving {
            cells.push(Cell::from(grouped(group.step)));
        }
        let text = group.estimate.map_or("-".into(), show);
        cells.push(if best == Some(k) { Cell::styled(text, "1") } else { Cell::from(text) });
        let count = group.trials.len() - group.failed;
        let word = match (has_seeds, count) {
            (true, 1) => "seed",
            (true, _) => "seeds",
            (false, 1) => "run",
            (false, _) => "runs",
        };
        let failed = if group.failed > 0 { format!(", {} failed", group.failed) } else { String::new() };
        cells.push(Cell::from(format!("({count} {word}{failed})")));
        cells.push(if best == Some(k) { Cell::styled("← best", "32") } else { Cell::from(String::new()) });
        table.row(cells);
    }
    table
}

/// Formats a mean to the digits that its interval leaves: `0.981 ± 0.004`.
fn show(e: Estimate) -> String {
    let Some(half) = e.half_width else { return short(e.mean) };
    // One significant digit of the width, two where it begins with 1.
    let scale = half.log10().floor();
    let digits = if half / 10f64.powf(scale) < 1.95 { 1.0 - scale } else { -scale };
    if half <= 0.0 || !(0.0..=6.0).contains(&digits) {
        return format!("{} ± {}", short(e.mean), short(half));
    }
    format!("{:.*} ± {:.*}", digits as usize, e.mean, digits as usize, half)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mean_has_the_digits_of_its_interval() {
        let of = |mean, half_width| show(Estimate { mean, half_width, count: 5 });
        assert_eq!(of(0.98123, Some(0.00412)), "0.981 ± 0.004");
        assert_eq!(of(12.3456, Some(1.7)), "12.3 ± 1.7");
        assert_eq!(of(12.3456, Some(3.2)), "12 ± 3");
        assert!(!of(0.5, None).contains('±') && of(0.5, Some(0.0)).contains("± 0"));
    }
}
