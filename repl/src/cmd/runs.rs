//! `perilune runs`: lists runs with status, progress, best metric and the params in which they differ; compares two of them.

use super::runs_compare;
use crate::console_out::{color, complain, say};
use crate::failure::Failure;
use crate::format::{grouped, short};
use crate::table::{Cell, Table, width};
use clap::ValueEnum;
use clap::builder::PossibleValue;
use perilune_core::error::did_you_mean;
use perilune_train::runs::{self, Goal, RunSummary, Status};
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::IsTerminal;
use std::path::PathBuf;

#[derive(clap::Args, Debug)]
pub struct RunsArgs {
    /// Run directories, or directories that contain some [default: runs]
    #[arg(value_name = "DIR")]
    dirs: Vec<PathBuf>,
    /// Sort by a metric, the best first (valid/loss, valid/accuracy:max), or by name, step or date, the newest first [default: date]
    #[arg(long, value_name = "METRIC")]
    sort: Option<String>,
    /// List only runs of this recipe
    #[arg(long, value_name = "NAME")]
    recipe: Option<String>,
    /// List only runs with one of these statuses
    #[arg(long, value_name = "STATUS", value_delimiter = ',')]
    status: Vec<StatusArg>,
    /// List only runs whose param has this value; may be given several times
    #[arg(long = "where", value_name = "KEY=VALUE", value_parser = crate::device::key_value)]
    filters: Vec<(String, String)>,
    /// List only the first N, after sorting
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Compare two runs: params, environment, data, recipe, metrics
    #[arg(long, num_args = 2, value_names = ["A", "B"],
          conflicts_with_all = ["dirs", "sort", "recipe", "status", "filters", "limit"])]
    compare: Option<Vec<PathBuf>>,
    /// With --compare: fail if B is slower, needs more memory or uses its devices less than A by more than so many per cent
    #[arg(long, value_name = "PERCENT", requires = "compare", value_parser = positive)]
    alarm: Option<f64>,
    /// Add the hours of devices, the energy and the cost of each run, at this price of a device an hour
    #[arg(long, value_name = "PRICE", conflicts_with = "compare", value_parser = positive)]
    price: Option<f64>,
    /// Print one JSON object for each run
    #[arg(long)]
    json: bool,
}

/// A status on the command line.
#[derive(Clone, Copy, Debug)]
struct StatusArg(Status);

impl ValueEnum for StatusArg {
    fn value_variants<'a>() -> &'a [StatusArg] {
        const ALL: [StatusArg; 6] = [
            StatusArg(Status::Running),
            StatusArg(Status::Finished),
            StatusArg(Status::Stopped),
            StatusArg(Status::Failed),
            StatusArg(Status::Interrupted),
            StatusArg(Status::Damaged),
        ];
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.0.name()))
    }
}

/// Parses a number from 0.
fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|n| n.is_finite() && *n >= 0.0);
    number.ok_or_else(|| "it must be a number from 0".into())
}

/// Lists or compares runs.
pub fn runs(args: &RunsArgs) -> Result<(), Failure> {
    if let Some([a, b]) = args.compare.as_deref() {
        return runs_compare::print(a, b, args.json, args.alarm);
    }
    let dirs = if args.dirs.is_empty() { vec![PathBuf::from(runs::RUNS)] } else { args.dirs.clone() };
    if args.dirs.is_empty() && !dirs[0].is_dir() {
        let cure = "`perilune run RECIPE` makes it; give another directory with `perilune runs DIR`";
        return Err(Failure::Usage(format!("there is no directory runs/ here\n  hint: {cure}")));
    }
    let mut all = runs::list(&dirs)?;
    check_filters(args, &all)?;
    all.retain(|run| is_chosen(args, run));
    let goal = sort(args.sort.as_deref().unwrap_or("date"), &mut all)?;
    all.truncate(args.limit.unwrap_or(usize::MAX));
    let varying = runs::varying(&all.iter().map(|run| &run.record).collect::<Vec<_>>());
    let goal_of = |run: &RunSummary| goal.clone().or_else(|| run.goal());
    if args.json {
        return all.iter().try_for_each(|run| print_json(&run.json(goal_of(run).as_ref(), &varying)));
    }
    if all.is_empty() {
        let filtered = args.recipe.is_some() || !args.status.is_empty() || !args.filters.is_empty();
        let names: Vec<String> = dirs.iter().map(|dir| dir.display().to_string()).collect();
        let rest = if filtered { " that the options select" } else { "" };
        return say(&format!("no runs in {}{rest}", names.join(", ")));
    }
    let goals: Vec<Option<Goal>> = all.iter().map(goal_of).collect();
    say(&table(&all, &goals, &varying, args.price).text(width(), color(std::io::stdout().is_terminal())))?;
    for run in &all {
        if let Some(error) = run.error.as_ref().filter(|_| run.status == Status::Damaged) {
            complain("warning", error);
        }
    }
    Ok(())
}

/// Prints an event of `--json`.
pub fn print_json(event: &Value) -> Result<(), Failure> {
    say(&crate::terminal::json(&event.to_string()))
}

/// Refuses a recipe or a param that no run has.
fn check_filters(args: &RunsArgs, all: &[RunSummary]) -> Result<(), Failure> {
    let check = |option: &str, what: &str, name: &str, known: BTreeSet<&str>| {
        if all.is_empty() || known.contains(name) {
            return Ok(());
        }
        let near = did_you_mean(name, known.iter().copied()).map(|n| format!(". Did you mean '{n}'?"));
        let list = known.into_iter().collect::<Vec<_>>().join(", ");
        let near = near.unwrap_or_default();
        Err(Failure::Usage(format!("{option}: no run has the {what} '{name}' (there are {list}){near}")))
    };
    if let Some(name) = &args.recipe {
        check(&format!("--recipe {name}"), "recipe", name, all.iter().filter_map(RunSummary::recipe).collect())?;
    }
    for (key, value) in &args.filters {
        let params =
            |run: &'_ RunSummary| run.record.get("params").and_then(Value::as_object).cloned().unwrap_or_default();
        let params: BTreeSet<String> =
            all.iter().flat_map(|run| params(run).into_iter().map(|(name, _)| name)).collect();
        let options = ["seed", "steps", "precision", "device", "mesh"];
        let known = params.iter().map(String::as_str).chain(options).collect();
        check(&format!("--where {key}={value}"), "param", key, known)?;
    }
    Ok(())
}

fn is_chosen(args: &RunsArgs, run: &RunSummary) -> bool {
    let same = |a: &str, b: &str| match (a.parse::<f64>(), b.parse::<f64>()) {
        // 1e-3 is 0.001.
        (Ok(a), Ok(b)) => a == b,
        _ => a == b,
    };
    args.recipe.as_deref().is_none_or(|name| run.recipe() == Some(name))
        && (args.status.is_empty() || args.status.iter().any(|status| status.0 == run.status))
        && args.filters.iter().all(|(key, value)| runs::value(&run.record, key).is_some_and(|v| same(&v, value)))
}

/// Sorts the runs. Returns the metric that they are sorted by, if it is one.
fn sort(by: &str, all: &mut [RunSummary]) -> Result<Option<Goal>, Failure> {
    match by {
        "date" => all.sort_by(|a, b| b.started().cmp(&a.started()).then(b.name().cmp(&a.name()))),
        "name" => all.sort_by_key(RunSummary::name),
        "step" => all.sort_by(|a, b| b.step().cmp(&a.step()).then(a.name().cmp(&b.name()))),
        _ => return sort_by_metric(by, all).map(Some),
    }
    Ok(None)
}

fn sort_by_metric(by: &str, all: &mut [RunSummary]) -> Result<Goal, Failure> {
    let mut goal = Goal::parse(by);
    let has = |all: &[RunSummary]| all.iter().any(|run| run.metric(&goal.metric).is_some());
    if !has(all) {
        // A metric of steps.
        all.iter_mut().filter(|run| run.status != Status::Damaged).try_for_each(RunSummary::read_steps)?;
    }
    if !has(all) && !all.is_empty() {
        let known: BTreeSet<&str> = all.iter().flat_map(|run| run.metrics.by_name.keys().map(String::as_str)).collect();
        let names = ["date", "name", "step"];
        let near =
            did_you_mean(&goal.metric, known.iter().copied().chain(names)).map(|n| format!(". Did you mean '{n}'?"));
        let list = names.into_iter().chain(known.iter().copied()).collect::<Vec<_>>().join(", ");
        return Err(Failure::Usage(format!(
            "--sort {by}: no such metric was logged (there are {list}){}",
            near.unwrap_or_default()
        )));
    }
    if goal.metric == by {
        // Without a direction, that of a best checkpoint decides.
        let recorded = all.iter().find_map(|run| Goal::of_record(&run.record).filter(|g| g.metric == by));
        goal = recorded.unwrap_or(goal);
    }
    let best = |run: &RunSummary| {
        let value = run.metric(&goal.metric).and_then(|extent| extent.best(&goal)).map(|at| at.value);
        value.map_or(f64::INFINITY, |v| if goal.max { -v } else { v })
    };
    all.sort_by(|a, b| best(a).total_cmp(&best(b)).then(b.started().cmp(&a.started())));
    Ok(goal)
}

/// Returns the style of a status.
pub fn status_cell(status: Status) -> Cell {
    let code = match status {
        Status::Running => "36",
        Status::Finished => "32",
        Status::Stopped => "33",
        Status::Failed | Status::Damaged | Status::Interrupted => "31",
    };
    Cell::styled(status.name(), code)
}

fn table(all: &[RunSummary], goals: &[Option<Goal>], varying: &[String], price: Option<f64>) -> Table {
    let mut metrics: Vec<&Goal> = goals.iter().flatten().collect();
    metrics.dedup();
    let direction = |goal: &Goal| if goal.max { "highest" } else { "lowest" };
    // One metric for all stands in the head of the column.
    let common = match metrics[..] {
        [goal] => Some(format!("{} {}", direction(goal), goal.metric)),
        _ => None,
    };
    let mut out = Table::default();
    out.text_column("run");
    out.text_column("started");
    out.text_column("status");
    out.number_column("step");
    out.text_column(common.as_deref().unwrap_or("best"));
    if price.is_some() {
        ["device h", "energy", "cost"].iter().for_each(|name| out.number_column(name));
    }
    varying.iter().for_each(|name| out.wrapping_column(name));
    for (run, goal) in all.iter().zip(goals) {
        let best = goal.as_ref().and_then(|goal| {
            let at = run.metric(&goal.metric)?.best(goal)?;
            let name = if common.is_some() { String::new() } else { format!("{} ", goal.metric) };
            Some(format!("{name}{} at {}", short(at.value), grouped(at.step)))
        });
        let step = match run.steps() {
            Some(steps) if steps != run.step() => format!("{}/{}", grouped(run.step()), grouped(steps)),
            _ => grouped(run.step()),
        };
        let mut cells = vec![
            Cell::from(run.name()),
            Cell::from(run.started_text()),
            status_cell(run.status),
            Cell::from(step),
            Cell::from(best),
        ];
        if let Some(price) = price {
            let hours = runs::device_hours(&run.record);
            cells.push(Cell::from(hours.map(short)));
            cells.push(Cell::from(runs::watt_hours(&run.record).map(|wh| format!("{} Wh", short(wh)))));
            cells.push(Cell::from(hours.map(|hours| format!("{:.2}", hours * price))));
        }
        cells.extend(varying.iter().map(|name| Cell::from(runs::value(&run.record, name))));
        out.row(cells);
    }
    out
}
