//! `perilune bench`: ours and PyTorch's time for the same work, on the same device, from one call.
//!
//! The cases are `tests/bench/*.lua` and, case by case the same, `tests/bench/rival*.py`; both are embedded and unpacked into a
//! folder that goes away. Ours runs in a process of its own for each figure, so that no case inherits the memory of
//! another. The rival is one Python process that is asked case by case. The two take turns, round by round, so that a
//! drifting machine hits both; a figure is the median over the rounds of the median within one. On a GPU each case also says the
//! most of its memory that either side had: the largest over the rounds.

use crate::device::PlaceArgs;
use crate::failure::{Failure, disk};
use crate::screen::{Mode, Screen};
use serde_json::{Map, Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

#[derive(clap::Args, Debug)]
pub struct BenchArgs {
    /// Cases to run; all of the device by default
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    #[command(flatten)]
    device: PlaceArgs,
    /// The Python that has PyTorch
    #[arg(long, value_name = "PATH", default_value = "python3")]
    python: PathBuf,
    /// Rounds in which the two take turns [default: 5 on the CPU, 1 on a GPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Seconds to measure, each side, in a round
    #[arg(long, value_name = "S", default_value_t = 0.5)]
    seconds: f64,
    /// Do not try torch.compile
    #[arg(long)]
    no_compile: bool,
    /// Measure ours alone
    #[arg(long)]
    no_rival: bool,
    /// Say which cases there are, and run none
    #[arg(long)]
    list: bool,
    /// Print events as JSON, one object a line
    #[arg(long)]
    json: bool,
}

const FILES: [(&str, &str); 6] = [
    ("harness.lua", include_str!("../../tests/bench/harness.lua")),
    ("cpu.lua", include_str!("../../tests/bench/cpu.lua")),
    ("cuda.lua", include_str!("../../tests/bench/cuda.lua")),
    ("rival.py", include_str!("../../tests/bench/rival.py")),
    ("rival_cpu.py", include_str!("../../tests/bench/rival_cpu.py")),
    ("rival_cuda.py", include_str!("../../tests/bench/rival_cuda.py")),
];

/// Cases made of another: seconds until its first step is done, with an empty or a full cache of compiled kernels.
const FIRST: [(&str, &str, bool); 2] = [("first_step_cold", "gpt2_b4", true), ("first_step_warm", "gpt2_b4", false)];

/// A folder that goes away with its owner.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Result<Folder, Failure> {
        let path = std::env::temp_dir().join(format!("perilune-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).map_err(disk("create", &path))?;
        Ok(Folder(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Microseconds of a run, seconds of the first, and the most bytes of the device's memory that the process had.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Figure {
    micros: f64,
    first: f64,
    bytes: u64,
}

struct Ours<'a> {
    folder: &'a Path,
    family: &'static str,
    device: String,
    threads: usize,
}

impl Ours<'_> {
    fn run(&self, case: &str, seconds: f64, cache: Option<&Path>) -> Result<String, String> {
        let me = std::env::current_exe().map_err(|e| format!("cannot find this program: {e}"))?;
        let mut command = Command::new(me);
        command.arg("run").arg(self.folder.join(format!("{}.lua", self.family))).arg("--quiet");
        command.args(["--device", &self.device, "--threads", &self.threads.to_string()]);
        command.args(["--set", &format!("case={case}"), "--set", &format!("seconds={seconds:?}")]);
        if let Some(cache) = cache {
            command.env("PERILUNE_CACHE", cache);
        }
        let out = command.stdin(Stdio::null()).output().map_err(|e| format!("cannot start ours: {e}"))?;
        if out.status.success() {
            return Ok(String::from_utf8_lossy(&out.stdout).into_owned());
        }
        let text = String::from_utf8_lossy(&out.stderr);
        let line = text.lines().find(|l| !l.trim().is_empty()).unwrap_or("it ended without a word");
        Err(format!("ours: {line}"))
    }

    fn cases(&self) -> Result<Vec<String>, Failure> {
        let out = self.run("list", 0.0, None).map_err(Failure::System)?;
        let mut names: Vec<String> = out.lines().map(str::to_string).collect();
        let made = FIRST.iter().filter(|f| names.iter().any(|n| n == f.1)).map(|f| f.0.to_string());
        names.extend(made.collect::<Vec<_>>());
        Ok(names)
    }

    fn measure(&self, case: &str, seconds: f64, cache: Option<&Path>) -> Result<Figure, String> {
        figure(&self.run(case, seconds, cache)?)
    }

    /// Whether peaks of memory are shown: not on the CPU, where PyTorch does not count its own.
    fn counts_memory(&self) -> bool {
        self.family != "cpu"
    }
}

/// Reads the last line of a case: `micros first bytes`.
fn figure(out: &str) -> Result<Figure, String> {
    let line = out.lines().last().unwrap_or("");
    let words: Vec<&str> = line.split_whitespace().collect();
    let read = match words[..] {
        [micros, first, bytes] => micros.parse().ok().zip(first.parse().ok()).zip(bytes.parse().ok()),
        _ => None,
    };
    let figure = read.map(|((micros, first), bytes)| Figure { micros, first, bytes });
    figure.ok_or_else(|| format!("ours printed '{line}' where a time and a memory peak were expected"))
}

struct Rival {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    version: String,
}

impl Rival {
    /// Starts Python; `Err` says why there is no rival.
    fn start(args: &BenchArgs, folder: &Path, family: &str, threads: usize) -> Result<Rival, String> {
        let python = args.python.display();
        let mut command = Command::new(&args.python);
        command.arg(folder.join("rival.py")).args([family, &threads.to_string()]);
        command.env("TORCHINDUCTOR_CACHE_DIR", folder.join("inductor")).env("PYTHONDONTWRITEBYTECODE", "1");
        command.env("OMP_NUM_THREADS", threads.to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().map_err(|e| format!("cannot start {python}: {}", crate::failure::plain(&e)))?;
        let (to, from) = (child.stdin.take(), child.stdout.take());
        let (Some(to), Some(from)) = (to, from) else { return Err(format!("{python} has no pipes")) };
        let mut rival = Rival { child, to, from: BufReader::new(from), version: String::new() };
        let hello = rival.answer()?;
        match (hello["version"].as_str(), hello["error"].as_str()) {
            (Some(version), _) => rival.version = version.to_string(),
            (_, error) => return Err(format!("{python}: {}", error.unwrap_or("no answer"))),
        }
        Ok(rival)
    }

    fn answer(&mut self) -> Result<Value, String> {
        let mut line = String::new();
        match self.from.read_line(&mut line) {
            Ok(n) if n > 0 => {
                serde_json::from_str(&line).map_err(|e| format!("PyTorch's side said '{}': {e}", line.trim()))
            }
            _ => Err("PyTorch's side ended without an answer".into()),
        }
    }

    fn ask(&mut self, case: &str, seconds: f64, compile: bool) -> Result<Value, String> {
        let line = json!({ "case": case, "seconds": seconds, "compile": compile });
        writeln!(self.to, "{line}").and_then(|()| self.to.flush()).map_err(|_| "PyTorch's side is gone".to_string())?;
        self.answer()
    }
}

impl Drop for Rival {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    (n > 0).then(|| (values[(n - 1) / 2] + values[n / 2]) / 2.0)
}

pub fn bench(args: BenchArgs) -> Result<(), Failure> {
    if !(args.seconds > 0.0 && args.seconds.is_finite()) {
        return Err(Failure::Usage(format!("--seconds {}: it must be above 0", args.seconds)));
    }
    let (device, about) = {
        let backend = args.device.open()?; // closed again: its memory is the cases'
        (backend.name().to_string(), backend.describe())
    };
    let family = if device.starts_with("cuda") { "cuda" } else { "cpu" };
    let screen = Screen::new(if args.json { Mode::Json } else { Mode::Human });
    let folder = Folder::new("bench")?;
    for (name, text) in FILES {
        let path = folder.0.join(name);
        std::fs::write(&path, text).map_err(disk("write", &path))?;
    }
    let ours = Ours { folder: &folder.0, family, device: device.clone(), threads: args.device.threads() };
    let all = ours.cases()?;
    if args.list {
        return crate::screen::say(&all.join("\n"));
    }
    for name in &args.names {
        if !all.contains(name) {
            let near = perilune_core::error::did_you_mean(name, all.iter().map(String::as_str));
            let near = near.map(|n| format!(". Did you mean {n}?")).unwrap_or_default();
            return Err(Failure::Usage(format!("there is no case '{name}' on {family}{near} (--list shows them)")));
        }
    }
    let mut rival = match args.no_rival {
        true => Err("--no-rival".to_string()),
        false => Rival::start(&args, &folder.0, family, ours.threads),
    };
    let rounds = args.rounds.unwrap_or(if family == "cpu" { 5 } else { 1 });
    let version = rival.as_ref().map(|r| r.version.clone()).ok();
    screen.event(&json!({
        "event": "start", "device": device, "device_description": about, "threads": ours.threads, "rounds": rounds,
        "seconds": args.seconds, "versions": { "perilune": env!("CARGO_PKG_VERSION"), "torch": version },
        "alone": rival.as_ref().err(),
    }));
    let against = match &rival {
        Ok(r) => format!("PyTorch {}", r.version),
        Err(why) => format!("ours alone ({why})"),
    };
    let plural = if rounds == 1 { "" } else { "s" };
    let memory = if ours.counts_memory() { ", peak memory in GiB" } else { "" };
    screen.line(&format!("{about} · {against} · {rounds} round{plural}; medians in microseconds{memory}"));
    screen.line(&header(ours.counts_memory()));
    let names = if args.names.is_empty() { &all } else { &args.names };
    let mut failed = 0;
    for name in names {
        let case = Case { args: &args, ours: &ours, rounds, folder: &folder.0 };
        let result = case.run(name, rival.as_mut().ok());
        failed += usize::from(result.contains_key("error"));
        screen.line(&row(name, &result, ours.counts_memory()));
        let mut event =
            Map::from_iter([("event".to_string(), Value::from("case")), ("name".to_string(), name.as_str().into())]);
        event.extend(result);
        screen.event(&Value::Object(event));
    }
    screen.event(&json!({ "event": "done", "cases": names.len(), "failed": failed }));
    match failed {
        0 => Ok(()),
        n => Err(Failure::System(format!("{n} of {} cases failed", names.len()))),
    }
}

struct Case<'a> {
    args: &'a BenchArgs,
    ours: &'a Ours<'a>,
    rounds: u32,
    folder: &'a Path,
}

impl Case<'_> {
    /// The figures of a case by name, in microseconds or bytes; `error` says what went wrong on our side, `rival_error` on theirs.
    fn run(&self, name: &str, rival: Option<&mut Rival>) -> Map<String, Value> {
        let mut out = Map::new();
        let result = match FIRST.iter().find(|f| f.0 == name) {
            Some(&(_, case, cold)) => self.first(case, cold, rival, &mut out),
            None => self.steady(name, rival, &mut out),
        };
        if let Err(e) = result {
            out.insert("error".into(), e.into());
        }
        let rivals = ["eager", "compile"].into_iter().filter_map(|k| out.get(k).and_then(Value::as_f64));
        let best = rivals.fold(f64::INFINITY, f64::min);
        if let (Some(ours), true) = (out.get("ours").and_then(Value::as_f64), best.is_finite()) {
            out.insert("ratio".into(), (best / ours).into());
        }
        out
    }

    fn steady(&self, name: &str, mut rival: Option<&mut Rival>, out: &mut Map<String, Value>) -> Result<(), String> {
        let (mut ours, mut firsts) = (Vec::new(), Vec::new());
        let (mut eager, mut compile) = (Vec::new(), Vec::new());
        for _ in 0..self.rounds {
            let figure = self.ours.measure(name, self.args.seconds, None)?;
            ours.push(figure.micros);
            firsts.push(figure.first);
            self.ours_peak(&figure, out);
            let Some(rival) = rival.as_mut() else { continue };
            match rival.ask(name, self.args.seconds, !self.args.no_compile) {
                Ok(answer) => {
                    eager.extend(answer["eager"].as_f64());
                    compile.extend(answer["compile"].as_f64());
                    for key in ["goal", "compile_first"] {
                        answer[key].as_f64().map(|v| out.insert(key.into(), v.into()));
                    }
                    rival_peaks(&answer, out);
                    for (from, to) in [("compile_mode", "compile_mode"), ("error", "rival_error")] {
                        answer[from].as_str().map(|text| out.insert(to.into(), text.into()));
                    }
                }
                Err(e) => {
                    out.insert("rival_error".into(), e.into());
                }
            }
        }
        let figures = [("ours", &mut ours), ("first", &mut firsts), ("eager", &mut eager), ("compile", &mut compile)];
        for (key, values) in figures {
            median(values).map(|v| out.insert(key.into(), v.into()));
        }
        Ok(())
    }

    fn ours_peak(&self, figure: &Figure, out: &mut Map<String, Value>) {
        if self.ours.counts_memory() {
            peak(out, "ours_bytes", figure.bytes);
        }
    }

    /// Until the first step is done: with a cache of kernels made for this case, and on their side with inductor's.
    fn first(
        &self,
        case: &str,
        cold: bool,
        rival: Option<&mut Rival>,
        out: &mut Map<String, Value>,
    ) -> Result<(), String> {
        let cache = self.folder.join("kernels");
        if cold {
            let _ = std::fs::remove_dir_all(&cache);
            let _ = std::fs::remove_dir_all(self.folder.join("inductor"));
        } else {
            self.ours.measure(case, 0.01, Some(&cache))?;
        }
        let figure = self.ours.measure(case, 0.01, Some(&cache))?;
        out.insert("ours".into(), (figure.first * 1e6).into());
        self.ours_peak(&figure, out);
        let Some(rival) = rival else { return Ok(()) };
        let mut ask = || rival.ask(case, 0.01, !self.args.no_compile);
        let answer = if cold { ask() } else { ask().and_then(|_| ask()) };
        match answer {
            Ok(a) => {
                for (from, to) in [("first", "eager"), ("compile_first", "compile")] {
                    a[from].as_f64().map(|s| out.insert(to.into(), (s * 1e6).into()));
                }
                rival_peaks(&a, out);
                a["error"].as_str().map(|e| out.insert("rival_error".into(), e.into()));
            }
            Err(e) => {
                out.insert("rival_error".into(), e.into());
            }
        }
        Ok(())
    }
}

/// Keeps the larger of the peak so far and this one.
fn peak(out: &mut Map<String, Value>, key: &str, bytes: u64) {
    let so_far = out.get(key).and_then(Value::as_u64).unwrap_or(0);
    out.insert(key.into(), bytes.max(so_far).into());
}

fn rival_peaks(answer: &Value, out: &mut Map<String, Value>) {
    for key in ["eager_bytes", "compile_bytes"] {
        if let Some(bytes) = answer[key].as_u64() {
            peak(out, key, bytes);
        }
    }
}

fn header(memory: bool) -> String {
    let line = format!("{:<24}{:>12}{:>12}{:>12}{:>8}{:>7}", "case", "ours", "eager", "compile", "ratio", "goal");
    if memory { format!("{line}{:>11}{:>8}{:>9}", "GiB: ours", "eager", "compile") } else { line }
}

/// A case's line under [`header`].
fn row(name: &str, out: &Map<String, Value>, memory: bool) -> String {
    let cell = |key: &str, digits: usize| match out.get(key).and_then(Value::as_f64) {
        Some(v) => format!("{v:.digits$}"),
        None => String::new(),
    };
    let mut line = format!(
        "{name:<24}{:>12}{:>12}{:>12}{:>8}{:>7}",
        cell("ours", 1),
        cell("eager", 1),
        cell("compile", 1),
        cell("ratio", 2),
        cell("goal", 2),
    );
    if memory {
        let gib = |key: &str| match out.get(key).and_then(Value::as_u64).map(|b| b as f64 / (1u64 << 30) as f64) {
            Some(v) => format!("{v:.*}", if v < 1.0 { 3 } else { 2 }),
            None => String::new(),
        };
        line.push_str(&format!("{:>11}{:>8}{:>9}", gib("ours_bytes"), gib("eager_bytes"), gib("compile_bytes")));
    }
    for key in ["error", "rival_error"] {
        if let Some(text) = out.get(key).and_then(Value::as_str) {
            line.push_str(&format!("   {text}"));
        }
    }
    line.trim_end().to_string()
}

#[cfg(test)]
mod tests {
    use super::{Figure, figure, header, median, peak, rival_peaks, row};
    use serde_json::{Map, Value, json};

    #[test]
    fn the_last_line_is_the_figure() {
        let expected = Figure { micros: 12.5, first: 0.25, bytes: 12 << 30 };
        assert_eq!(figure("a word\n12.5 0.25 12884901888\n").unwrap(), expected);
        for bad in ["12.5", "12.5 0.25", "12.5 0.25 -1", "12.5 0.25 1e9", "12.5 0.25 1 2", ""] {
            assert!(figure(bad).unwrap_err().contains(&format!("'{bad}'")), "{bad}");
        }
    }

    fn result(v: Value) -> Map<String, Value> {
        v.as_object().unwrap().clone()
    }

    #[test]
    fn a_row_stands_under_its_header() {
        let out = result(json!({
            "ours": 59855.04, "eager": 86633.0, "compile": 63673.0, "ratio": 1.0638, "goal": 1.0,
            "ours_bytes": 17072495001u64, "eager_bytes": 48103633715u64, "compile_bytes": 536870912,
        }));
        assert_eq!(header(true).trim_end().len(), 103);
        let expected = "\
case                            ours       eager     compile   ratio   goal  GiB: ours   eager  compile
attention_d128_16k_grad      59855.0     86633.0     63673.0    1.06   1.00      15.90   44.80    0.500";
        assert_eq!(format!("{}\n{}", header(true), row("attention_d128_16k_grad", &out, true)), expected);
        let expected = "\
case                            ours       eager     compile   ratio   goal
attention_d128_16k_grad      59855.0     86633.0     63673.0    1.06   1.00";
        assert_eq!(format!("{}\n{}", header(false), row("attention_d128_16k_grad", &out, false)), expected);
    }

    #[test]
    fn a_row_without_a_rival_ends_early_and_one_with_an_error_says_it() {
        let out = result(json!({ "ours": 2.0, "ours_bytes": 1u64 << 30 }));
        let expected = format!("{:<24}{:>12}{:>50}", "sum", "2.0", "1.00");
        assert_eq!(row("sum", &out, true), expected);
        let out = result(json!({ "ours": 2.0, "ours_bytes": 1u64 << 30, "rival_error": "eager: no room" }));
        assert_eq!(row("sum", &out, true), format!("{expected}{:17}   eager: no room", ""));
        assert_eq!(row("sum", &result(json!({ "error": "ours: no" })), false), format!("{:<75}   ours: no", "sum"));
    }

    #[test]
    fn the_largest_peak_of_the_rounds_counts() {
        let mut out = Map::new();
        for (ours, answer) in [(5, json!({ "eager_bytes": 7, "compile_bytes": 2 })), (4, json!({ "eager_bytes": 9 }))] {
            peak(&mut out, "ours_bytes", ours);
            rival_peaks(&answer, &mut out);
        }
        assert_eq!(Value::from(out), json!({ "ours_bytes": 5, "eager_bytes": 9, "compile_bytes": 2 }));
    }

    #[test]
    fn medians() {
        assert_eq!(median(&mut []), None);
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&mut [4.0, 1.0]), Some(2.5));
    }
}
