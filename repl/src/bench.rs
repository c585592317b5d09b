//! `perilune bench`: ours and PyTorch's time for the same work, on the same device, from one call.
//!
//! The cases are `tests/bench/*.lua` and, case by case the same, `tests/bench/rival*.py`; both are embedded and unpacked into a
//! folder that goes away. Ours runs in a process of its own for each figure, so that no case inherits the memory of
//! another. The rival is one Python process that is asked case by case. The two take turns, round by round, so that a
//! drifting machine hits both; a figure is the median over the rounds of the median within one.

use crate::device::DeviceArgs;
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
    device: DeviceArgs,
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

/// Microseconds of a run, and seconds of the first.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Figure {
    micros: f64,
    first: f64,
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
}

/// Reads the last line of a case: `micros first`.
fn figure(out: &str) -> Result<Figure, String> {
    let line = out.lines().last().unwrap_or("");
    let mut words = line.split_whitespace().map(str::parse::<f64>);
    match (words.next(), words.next()) {
        (Some(Ok(micros)), Some(Ok(first))) => Ok(Figure { micros, first }),
        _ => Err(format!("ours printed '{line}' where a time was expected")),
    }
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
    if args.device.precision.is_some() {
        return Err(Failure::Usage("--precision has no effect here: each case says what it computes in".into()));
    }
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
    screen.line(&format!("{about} · {against} · {rounds} round{plural}; medians in microseconds"));
    screen.line(&format!("{:<24}{:>12}{:>12}{:>12}{:>8}{:>7}", "case", "ours", "eager", "compile", "ratio", "goal"));
    let names = if args.names.is_empty() { &all } else { &args.names };
    let mut failed = 0;
    for name in names {
        let case = Case { args: &args, ours: &ours, rounds, folder: &folder.0 };
        let result = case.run(name, rival.as_mut().ok());
        failed += usize::from(result.contains_key("error"));
        screen.line(&row(name, &result));
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
    /// The figures of a case by name, in microseconds; `error` says what went wrong on our side, `rival_error` on theirs.
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
            let Some(rival) = rival.as_mut() else { continue };
            match rival.ask(name, self.args.seconds, !self.args.no_compile) {
                Ok(answer) => {
                    eager.extend(answer["eager"].as_f64());
                    compile.extend(answer["compile"].as_f64());
                    for key in ["goal", "compile_first"] {
                        answer[key].as_f64().map(|v| out.insert(key.into(), v.into()));
                    }
                    answer["error"].as_str().map(|e| out.insert("rival_error".into(), e.into()));
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
        let Some(rival) = rival else { return Ok(()) };
        let mut ask = || rival.ask(case, 0.01, !self.args.no_compile);
        let answer = if cold { ask() } else { ask().and_then(|_| ask()) };
        match answer {
            Ok(a) => {
                for (from, to) in [("first", "eager"), ("compile_first", "compile")] {
                    a[from].as_f64().map(|s| out.insert(to.into(), (s * 1e6).into()));
                }
                a["error"].as_str().map(|e| out.insert("rival_error".into(), e.into()));
            }
            Err(e) => {
                out.insert("rival_error".into(), e.into());
            }
        }
        Ok(())
    }
}

fn row(name: &str, out: &Map<String, Value>) -> String {
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
    for key in ["error", "rival_error"] {
        if let Some(text) = out.get(key).and_then(Value::as_str) {
            line.push_str(&format!("   {text}"));
        }
    }
    line.trim_end().to_string()
}

#[cfg(test)]
mod tests {
    use super::{Figure, figure, median};

    #[test]
    fn the_last_line_is_the_figure() {
        assert_eq!(figure("a word\n12.5 0.25\n").unwrap(), Figure { micros: 12.5, first: 0.25 });
        assert!(figure("12.5\n").unwrap_err().contains("'12.5'"));
    }

    #[test]
    fn medians() {
        assert_eq!(median(&mut []), None);
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&mut [4.0, 1.0]), Some(2.5));
    }
}
