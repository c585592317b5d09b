//! `perilune plot RUN_DIR…`: draws the curves of one or several runs, in the terminal or as an SVG or PNG file.
//!
//! They are read from metrics.jsonl, also of a run in progress: incomplete or damaged lines are skipped. Edits of a run
//! (ledger.jsonl) are marks on the x axis. Several runs are named by the params that differ (run.json).

use crate::console_out;
use crate::failure::{Failure, disk};
use crate::plot::{Figure, Look, Mark, Series};
use crate::terminal::drawn;
use perilune_core::error::did_you_mean;
use perilune_train::record_of;
use perilune_train::runs::{self, labels};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::ErrorKind::{NotADirectory, NotFound};
use std::io::IsTerminal;
use std::io::Read;
use std::path::{Path, PathBuf};

#[derive(clap::Args, Debug)]
pub struct PlotArgs {
    /// Run directories, such as runs/NAME-DATE-TIME
    #[arg(required = true, value_name = "RUN_DIR")]
    runs: Vec<PathBuf>,
    /// A metric to plot; may be given several times [default: loss and valid/loss]
    #[arg(long, value_name = "NAME")]
    metric: Vec<String>,
    /// Write FILE.svg or FILE.png instead of plotting in the terminal
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Smooth with an exponential moving average of this decay, from 0 to below 1
    #[arg(long, value_name = "SHARE", value_parser = share, default_value = "0")]
    smooth: f64,
    /// The unit of the x axis
    #[arg(long, value_name = "step|time", value_parser = ["step", "time"], default_value = "step")]
    x: String,
    /// Use a logarithmic y axis
    #[arg(long)]
    log_y: bool,
    /// Plot with ASCII characters only
    #[arg(long)]
    ascii: bool,
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(v) if (0.0..1.0).contains(&v) => Ok(v),
        _ => Err("it must be a number from 0 to below 1, as in 0.9".into()),
    }
}

/// A logged number.
#[derive(Clone, Copy)]
struct Point {
    step: u64,
    /// Seconds since the start of the run; files of older releases lack it.
    seconds: Option<f64>,
    value: f64,
}

/// The curves and edits of a run directory.
struct Curves {
    name: String,
    metrics: BTreeMap<String, Vec<Point>>,
    edits: Vec<(u64, String)>,
}

/// Returns a number, or NaN for a null: NaN and infinities have no JSON form.
fn value(v: &Value) -> Option<f64> {
    if v.is_null() { Some(f64::NAN) } else { v.as_f64() }
}

/// Parses the lines of a file, and skips those that are not objects.
fn objects(text: &str) -> impl Iterator<Item = Value> {
    text.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok()).filter(Value::is_object)
}

/// Reads a text file that a run may still be writing: it may end within a character.
fn read(path: &Path) -> Result<Option<String>, Failure> {
    let mut bytes = Vec::new();
    let read = match perilune_policy::open_named(path) {
        Ok(mut file) => file.read_to_end(&mut bytes),
        Err(perilune_policy::Error::Io { source, .. }) => Err(source),
        Err(e) => return Err(Failure::Refused(e.to_string())),
    };
    match read {
        Ok(_) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        Err(e) if matches!(e.kind(), NotFound | NotADirectory) => Ok(None),
        Err(e) => Err(disk("read", path)(e).into()),
    }
}

impl Curves {
    fn read(dir: &Path) -> Result<Curves, Failure> {
        let Some(text) = read(&dir.join("metrics.jsonl"))? else {
            let why = match std::fs::metadata(dir) {
                Err(_) => "there is no such directory",
                Ok(m) if !m.is_dir() => "it is a file; give the run directory",
                Ok(_) => "it contains no metrics.jsonl, so it is not a run directory (runs/NAME-DATE-TIME)",
            };
            return Err(Failure::Usage(format!("{}: {why}", dir.display())));
        };
        let mut metrics: BTreeMap<String, Vec<Point>> = BTreeMap::new();
        for event in objects(&text) {
            let Some(step) = event["step"].as_u64() else { continue };
            let seconds = event["seconds"].as_f64();
            let named = event["metrics"].as_object().into_iter().flatten();
            let loss = event.get("loss").map(|v| ("loss", v));
            for (name, v) in named.map(|(k, v)| (k.as_str(), v)).chain(loss) {
                let Some(value) = value(v) else { continue };
                metrics.entry(name.to_string()).or_default().push(Point { step, seconds, value });
            }
        }
        let ledger = read(&dir.join("ledger.jsonl"))?.unwrap_or_default();
        let edit = |entry: Value| {
            let changed: Vec<&str> = entry["changed"].as_array()?.iter().filter_map(Value::as_str).collect();
            let step = entry["step"].as_u64()?;
            (entry["ok"] == true && !changed.is_empty()).then(|| (step, format!("step {step}: {}", changed.join(", "))))
        };
        Ok(Curves { name: String::new(), metrics, edits: objects(&ledger).filter_map(edit).collect() })
    }

    /// Returns when a step was logged.
    fn seconds_at(&self, step: u64) -> Option<f64> {
        let points = self.metrics.values().flatten().filter(|p| p.step >= step);
        points.filter_map(|p| p.seconds).min_by(f64::total_cmp)
    }
}

/// Returns the debiased exponential moving average, as TensorBoard does. Gaps stay gaps.
fn smoothed(points: &[(f64, f64)], keep: f64) -> Vec<(f64, f64)> {
    let (mut sum, mut weight) = (0.0, 0.0);
    let mut one = |p: &(f64, f64)| {
        if !p.1.is_finite() {
            return *p;
        }
        sum = keep * sum + (1.0 - keep) * p.1;
        weight = keep * weight + (1.0 - keep);
        (p.0, sum / weight)
    };
    points.iter().map(&mut one).collect()
}

/// Names the runs by the params that differ; where these do not tell a run from another one, by its directory, or by its path where
/// two directories have the same name.
fn name(runs: &mut [Curves], paths: &[PathBuf]) {
    let short = |p: &Path| {
        let full = std::fs::canonicalize(p).unwrap_or_else(|_| p.to_path_buf());
        full.file_name().map_or_else(|| p.display().to_string(), |n| n.to_string_lossy().into_owned())
    };
    let names: Vec<String> = paths.iter().map(|p| short(p)).collect();
    // A directory without a record, or with one that was changed, has no params.
    let records: Vec<_> = paths.iter().map(|p| record_of(p).unwrap_or_default()).collect();
    let labels = labels(&records.iter().collect::<Vec<_>>());
    for (i, run) in runs.iter_mut().enumerate() {
        let alone = names.iter().filter(|n| **n == names[i]).count() == 1;
        run.name = match labels[i].as_str() {
            "" if alone => names[i].clone(),
            "" => paths[i].display().to_string(),
            label => label.to_string(),
        };
    }
}

/// Selects the metrics to draw: those given, each of which some run has, or else the losses.
fn choose(asked: &[String], runs: &[Curves]) -> Result<Vec<String>, Failure> {
    let known: std::collections::BTreeSet<&str> =
        runs.iter().flat_map(|r| r.metrics.keys()).map(String::as_str).collect();
    if known.is_empty() {
        return Err(Failure::Usage("no step is logged yet; try again after the first step of the run".into()));
    }
    for name in asked {
        if !known.contains(name.as_str()) {
            let near = did_you_mean(name, known.iter().copied()).map(|n| format!(" Did you mean '{n}'?"));
            let list = known.iter().copied().collect::<Vec<_>>().join(", ");
            let near = near.unwrap_or_default();
            return Err(Failure::Usage(format!(
                "--metric {name}: no such metric was logged (there are {list}).{near}"
            )));
        }
    }
    if !asked.is_empty() {
        return Ok(asked.to_vec());
    }
    let usual: Vec<String> =
        ["loss", "valid/loss"].iter().filter(|n| known.contains(**n)).map(|n| n.to_string()).collect();
    Ok(if usual.is_empty() { known.iter().take(1).map(|n| n.to_string()).collect() } else { usual })
}

fn figure(args: &PlotArgs, runs: &[Curves]) -> Result<Figure, Failure> {
    let metrics = choose(&args.metric, runs)?;
    let by_time = args.x == "time";
    let chosen = || runs.iter().flat_map(|r| metrics.iter().filter_map(move |m| Some((r, m, r.metrics.get(m)?))));
    if by_time && !chosen().any(|(_, _, points)| points.iter().any(|p| p.seconds.is_some())) {
        let why = "these runs have no logged time, because a version of perilune before 0.1 wrote them; omit --x time";
        return Err(Failure::Usage(format!("--x time: {why}")));
    }
    let longest = chosen().flat_map(|(_, _, p)| p.iter().filter_map(|p| p.seconds)).fold(0.0, f64::max);
    let (unit, x_label) = match longest {
        _ if !by_time => (1.0, "step"),
        s if s >= 3.0 * 3600.0 => (3600.0, "hours"),
        s if s >= 180.0 => (60.0, "minutes"),
        _ => (1.0, "seconds"),
    };
    let mut series = Vec::new();
    for (run, metric, points) in chosen() {
        let at = |p: &Point| if by_time { p.seconds.map_or(f64::NAN, |s| s / unit) } else { p.step as f64 };
        let points: Vec<(f64, f64)> = points.iter().map(|p| (at(p), p.value)).collect();
        let name = match (runs.len(), metrics.len()) {
            (1, _) => metric.clone(),
            (_, 1) => run.name.clone(),
            _ => format!("{} {metric}", run.name),
        };
        if args.smooth > 0.0 {
            series.push(Series { faint: true, ..Series::new(&name, points.clone()) });
            series.push(Series::new(&name, smoothed(&points, args.smooth)));
        } else {
            series.push(Series::new(&name, points));
        }
    }
    let mut marks: Vec<Mark> = Vec::new();
    for run in runs {
        for (step, label) in &run.edits {
            let x = if by_time { run.seconds_at(*step).map(|s| s / unit) } else { Some(*step as f64) };
            let Some(x) = x else { continue };
            let label = if runs.len() > 1 { format!("{} {label}", run.name) } else { label.clone() };
            marks.push(Mark { x, label });
        }
    }
    marks.sort_by(|a, b| a.x.total_cmp(&b.x));
    let title = match runs {
        [run] => run.name.clone(),
        _ => metrics.join(", "),
    };
    Ok(Figure::Lines { title, x_label: x_label.into(), series, marks, log_y: args.log_y })
}

/// Returns columns and rows for a drawing: those of the terminal, less the line of the next prompt.
fn size() -> (usize, usize) {
    let told = |name: &str| std::env::var(name).ok()?.parse::<usize>().ok().filter(|n| *n > 0);
    let seen = terminal_size::terminal_size().map(|(w, h)| (usize::from(w.0), usize::from(h.0)));
    let cols = seen.map(|s| s.0).or_else(|| told("COLUMNS")).unwrap_or(80);
    let rows = seen.map(|s| s.1).or_else(|| told("LINES")).unwrap_or(25);
    (cols, rows.saturating_sub(2).clamp(8, 40))
}

/// Draws the curves.
pub fn plot(args: &PlotArgs) -> Result<(), Failure> {
    let mut runs = args.runs.iter().map(|dir| Curves::read(&runs::find(dir)?)).collect::<Result<Vec<_>, _>>()?;
    name(&mut runs, &args.runs);
    let figure = figure(args, &runs)?;
    let Some(out) = &args.out else {
        let color = console_out::color(std::io::stdout().is_terminal());
        let (cols, rows) = size();
        let text = match args.ascii {
            true => figure.text_with(cols, rows, Look { color, unicode: false }),
            false => figure.text(cols, rows, color),
        };
        return console_out::say(&drawn(&text));
    };
    let kind = out.extension().map(|e| e.to_string_lossy().to_lowercase()).unwrap_or_default();
    let bytes = match kind.as_str() {
        "svg" => figure.svg().into_bytes(),
        "png" => figure.png(),
        _ => {
            let name = out.display();
            return Err(Failure::Usage(format!(
                "--out {name}: the name must end in .svg or .png, which selects the format"
            )));
        }
    };
    std::fs::write(out, bytes).map_err(disk("write", out))?;
    console_out::say(&out.display().to_string())
}
