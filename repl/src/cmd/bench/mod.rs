//! `perilune bench`: measures the same work in Perilune and in PyTorch, on the same device.
//!
//! The cases are `tests/bench/*.lua` and their counterparts `tests/bench/rival*.py`; both are embedded and unpacked into a
//! temporary folder. Perilune runs in a new process for each figure, so that no case inherits the memory of another
//! (`ours.rs`); PyTorch runs in one Python process that measures case by case (`rival.rs`). The two alternate by rounds, so
//! that drift of the machine affects both (`case.rs`). A figure is the median over the rounds of the median within one. On a
//! GPU each case also has the peak memory of both sides: the largest over the rounds.

mod case;
mod ours;
mod rival;
mod table;

use crate::console_out::{self, ConsoleOut, Mode};
use crate::device::PlaceArgs;
use crate::failure::{Failure, disk};
use case::Case;
use ours::Ours;
use rival::Rival;
use serde_json::{Map, Value, json};
use std::path::PathBuf;
use table::{header, row};

#[derive(clap::Args, Debug)]
pub struct BenchArgs {
    /// Cases to run [default: all cases of the device]
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    #[command(flatten)]
    device: PlaceArgs,
    /// The Python interpreter that has PyTorch
    #[arg(long, value_name = "PATH", default_value = "python3")]
    python: PathBuf,
    /// Alternating rounds of Perilune and PyTorch [default: 5 on the CPU, 1 on a GPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Seconds of measurement for each side in a round
    #[arg(long, value_name = "S", default_value_t = 0.5)]
    seconds: f64,
    /// Leave out torch.compile
    #[arg(long)]
    no_compile: bool,
    /// Measure Perilune only
    #[arg(long)]
    no_rival: bool,
    /// List the cases and exit
    #[arg(long)]
    list: bool,
    /// Print events as JSON, one object per line
    #[arg(long)]
    json: bool,
}

const FILES: [(&str, &str); 6] = [
    ("harness.lua", include_str!("../../../../tests/bench/harness.lua")),
    ("cpu.lua", include_str!("../../../../tests/bench/cpu.lua")),
    ("cuda.lua", include_str!("../../../../tests/bench/cuda.lua")),
    ("rival.py", include_str!("../../../../tests/bench/rival.py")),
    ("rival_cpu.py", include_str!("../../../../tests/bench/rival_cpu.py")),
    ("rival_cuda.py", include_str!("../../../../tests/bench/rival_cuda.py")),
];

/// Cases derived from another one: seconds until its first step is done, with an empty or a full kernel cache.
const FIRST: [(&str, &str, bool); 2] = [("first_step_cold", "gpt2_b4", true), ("first_step_warm", "gpt2_b4", false)];

/// A temporary folder, removed when it is dropped.
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

/// Measures the cases and prints a row for each.
pub fn bench(args: BenchArgs) -> Result<(), Failure> {
    if !(args.seconds > 0.0 && args.seconds.is_finite()) {
        return Err(Failure::Usage(format!("--seconds {}: it must be above 0", args.seconds)));
    }
    if args.device.mesh().devices() > 1 {
        let mesh = args.device.mesh();
        return Err(Failure::Usage(format!(
            "--mesh {mesh}: the cases measure one device; leave it out, or unset PERILUNE_MESH"
        )));
    }
    if let Some(shards) = args.device.strict_shards {
        return Err(Failure::Usage(format!("--strict-shards {shards}: the cases have no batch to cut; leave it out")));
    }
    let (device, about) = {
        let backend = args.device.open()?; // closed again to free its memory for the cases
        (backend.name().to_string(), backend.describe())
    };
    let family = if device.starts_with("cuda") { "cuda" } else { "cpu" };
    let screen = ConsoleOut::new(if args.json { Mode::Json } else { Mode::Human });
    let folder = Folder::new("bench")?;
    for (name, text) in FILES {
        let path = folder.0.join(name);
        std::fs::write(&path, text).map_err(disk("write", &path))?;
    }
    let ours = Ours { folder: &folder.0, family, device: device.clone(), threads: args.device.threads() };
    let all = ours.cases()?;
    if args.list {
        return console_out::say(&all.join("\n"));
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
        Err(why) => format!("without PyTorch ({why})"),
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
