//! `perilune doctor`: reports devices and libraries, explains how to install missing ones, and runs a self test of about a second.
//!
//! The output is meant for bug reports. A missing GPU is not a failure.

use crate::console_out;
use crate::failure::Failure;
use crate::format::bytes;
use perilune_core::HostTensor;
use perilune_cpu::Cpu;
use perilune_cuda::{Cuda, dylib};
use perilune_lua::{Loaded, Runtime, RuntimeOptions};
use perilune_plan::Backend;
use perilune_policy::Policy;
use std::cell::RefCell;
use std::fmt::Write;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

#[derive(clap::Args, Debug)]
pub struct DoctorArgs {
    /// Skip the self test
    #[arg(long)]
    no_test: bool,
}

/// Prints the report and runs the self test.
pub fn doctor(args: &DoctorArgs) -> Result<(), Failure> {
    let mut out = String::new();
    let mut row = |name: &str, text: String| {
        let _ = writeln!(out, "  {name:<14}{text}");
    };
    row("perilune", format!("{} · Lua 5.4", env!("CARGO_PKG_VERSION")));
    row("system", system());
    row("cpu", format!("{} · {} cores", cpu_model(), std::thread::available_parallelism().map_or(1, usize::from)));
    row("instructions", instructions());
    row("memory", memory());
    let cpu = Arc::new(Cpu::new(None));
    row("device", cpu.describe());
    for wanted in &dylib::WANTED {
        match dylib::find(wanted) {
            Some(path) => row(wanted.name, format!("found: {path}")),
            None => {
                let need = if wanted.needed { "needed" } else { "optional," };
                row(wanted.name, format!("not found ({need} {}): {}", wanted.what_for, wanted.cure))
            }
        }
    }
    let missing = |wanted: &&dylib::Wanted| wanted.needed && dylib::find(wanted).is_none();
    let missing: Vec<&str> = dylib::WANTED.iter().filter(missing).map(|wanted| wanted.name).collect();
    let gpu = Cuda::new(0);
    match &gpu {
        Ok(gpu) => {
            row("gpu", gpu.describe());
            match gpu.probe().and_then(|mut read| read()) {
                Some(r) => row("sensors", sensors(&r)),
                None => row(
                    "sensors",
                    "none: NVML (libnvidia-ml.so.1, of the driver) was not found, or does not respond".into(),
                ),
            }
        }
        Err(e) => row("gpu", format!("none usable: {}", e.message.lines().next().unwrap_or_default())),
    }
    if let Some(folder) = perilune_cuda::nvrtc::folder() {
        let (n, nbytes) = perilune_cuda::nvrtc::size(&folder);
        row("kernel cache", format!("{} · {n} files, {}", folder.display(), bytes(nbytes as usize)));
    }
    console_out::say(&out)?;
    let verdict = verdict(gpu.as_ref().map(|gpu| gpu.describe()).ok(), &missing);
    if args.no_test {
        return console_out::say(&format!("  {:<14}{verdict}", "verdict"));
    }
    let start = Instant::now();
    match self_test(cpu) {
        Ok(speed) => {
            let seconds = start.elapsed().as_secs_f64();
            console_out::say(&format!("  {:<14}passed in {seconds:.1} s · {speed}", "self test"))?;
            console_out::say(&format!("  {:<14}{verdict}", "verdict"))
        }
        Err(why) => Err(Failure::System(format!("the self test failed: {why}"))),
    }
}

/// Says in one sentence what recipes will run on, and what to install for more.
fn verdict(gpu: Option<String>, missing: &[&str]) -> String {
    match gpu {
        Some(gpu) if missing.is_empty() => format!("recipes train on {gpu}"),
        Some(_) => format!("recipes train on the CPU until {} can be found (see above)", missing.join(" and ")),
        None => "recipes train on the CPU; no NVIDIA GPU is usable here".into(),
    }
}

/// Formats sensor readings: `41 % busy · 12.0 of 139.8 GiB · 512 of 700 W · 61 °C · 1980 MHz`
fn sensors(r: &perilune_plan::Readings) -> String {
    let gib = |b: f64| b / (1u64 << 30) as f64;
    let of = |most: Option<f64>, unit: &str| most.map_or(format!(" {unit}"), |m| format!(" of {m:.0} {unit}"));
    let mut parts = Vec::new();
    parts.extend(r.utilization.map(|v| format!("{v:.0} % busy")));
    parts.extend(r.memory_used.map(|v| format!("{:.1}{}", gib(v), of(r.memory_total.map(gib), "GiB"))));
    parts.extend(r.power.map(|v| format!("{v:.0}{}", of(r.power_limit, "W"))));
    parts.extend(r.temperature.map(|v| format!("{v:.0} °C")));
    parts.extend(r.clock_mhz.map(|v| format!("{v:.0} MHz")));
    if !r.throttled.is_empty() {
        parts.push(format!("slowed by {}", r.throttled.join(", ")));
    }
    parts.join(" · ")
}

fn system() -> String {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let name = read("/etc/os-release").and_then(|t| {
        let line = t.lines().find_map(|l| l.strip_prefix("PRETTY_NAME=").map(|v| v.trim_matches('"').to_string()));
        line.filter(|l| !l.is_empty())
    });
    let kernel = read("/proc/sys/kernel/osrelease").map(|k| format!(" · kernel {}", k.trim())).unwrap_or_default();
    format!("{}{kernel} · {}", name.unwrap_or_else(|| std::env::consts::OS.into()), std::env::consts::ARCH)
}

fn field(path: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    text.lines().find_map(|l| l.split_once(':').filter(|(k, _)| k.trim() == name).map(|(_, v)| v.trim().to_string()))
}

fn cpu_model() -> String {
    field("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown model".into())
}

fn instructions() -> String {
    #[cfg(target_arch = "x86_64")]
    {
        let found = [
            ("SSE4.2", is_x86_feature_detected!("sse4.2")),
            ("AVX", is_x86_feature_detected!("avx")),
            ("AVX2", is_x86_feature_detected!("avx2")),
            ("FMA", is_x86_feature_detected!("fma")),
            ("AVX-512F", is_x86_feature_detected!("avx512f")),
            ("AVX-512BW", is_x86_feature_detected!("avx512bw")),
            ("AVX-512VL", is_x86_feature_detected!("avx512vl")),
        ];
        found.iter().filter(|f| f.1).map(|f| f.0).collect::<Vec<_>>().join(" ")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        "the architecture's baseline".into()
    }
}

fn memory() -> String {
    let kb = |name: &str| -> Option<usize> { field("/proc/meminfo", name)?.split_whitespace().next()?.parse().ok() };
    match (kb("MemTotal"), kb("MemAvailable")) {
        (Some(all), Some(free)) => format!("{}, {} free", bytes(all * 1024), bytes(free * 1024)),
        _ => "unknown".into(),
    }
}

/// Takes one step of gradient descent on two points, with known results: X = [[1,2],[3,4]], y = [1,2], w = 0. The loss is
/// mean(y^2) = 2.5, its gradient X^T(Xw - y) = -[7,10], so w = [0.7,1.0] at rate 0.1 and the next loss (1.7^2 + 4.1^2) / 2.
const TEST: &str = r#"
local pl = require "perilune"
local x, y = pl.tensor { { 1.0, 2.0 }, { 3.0, 4.0 } }, pl.tensor { 1.0, 2.0 }
local w = pl.state(pl.zeros { 2 })
local opt = pl.optim.SGD({ w }, { lr = 0.1 })
for _ = 1, 2 do
  local loss = pl.step(function()
    local loss = ((x:matmul(w) - y) ^ 2):mean()
    loss:backward(); opt:step()
    return loss
  end)
  print(("%.5f"):format(loss:item()))
end
local a = pl.eval(pl.rand { 768, 768 })
print(("%.3f"):format(a:matmul(a):mean():item() / (768 * a:mean():item() ^ 2)))
"#;

fn self_test(cpu: Arc<Cpu>) -> Result<String, String> {
    let lines: Rc<RefCell<Vec<String>>> = Rc::default();
    let heard = lines.clone();
    let print = move |text: &str| heard.borrow_mut().push(text.to_string());
    let options = RuntimeOptions {
        backend: cpu.clone(),
        params: Vec::new(),
        policy: Policy::closed(),
        strict: true,
        print: Rc::new(print),
    };
    let runtime = Runtime::new(options).map_err(|e| e.to_string())?;
    match runtime.load_text(TEST, "=self test").map_err(|e| e.to_string())? {
        Loaded::Script => {}
        Loaded::Recipe(_) => return Err("it was loaded as a recipe".into()),
    }
    let want = ["2.50000", "9.85000", "1.000"];
    let got = lines.borrow().clone();
    let near = |a: &str, b: &str| matches!((a.parse::<f64>(), b.parse::<f64>()), (Ok(a), Ok(b)) if (a - b).abs() <= 0.005 * b.abs());
    if got.len() != want.len() || !got.iter().zip(want).all(|(a, b)| near(a, b)) {
        return Err(format!("expected {want:?}, got {got:?}"));
    }
    matmul_speed(&runtime)
}

/// Measures a matrix product, by the best of a few runs.
fn matmul_speed(runtime: &Runtime) -> Result<String, String> {
    let n = 768usize;
    let values: Vec<f32> = (0..n * n).map(|i| (i % 7) as f32 * 0.1).collect();
    let shape = perilune_core::Shape::new(&[n, n]).map_err(|e| e.to_string())?;
    let t = HostTensor::from_f32(shape, &values);
    let mut best = f64::INFINITY;
    for _ in 0..8 {
        let mut engine = runtime.host().engine.borrow_mut();
        let a = engine.from_host(t.clone());
        // Brings it to the device.
        let moved = engine.recorder.graph.neg(a).map_err(|e| e.to_string())?;
        engine.evaluate(&[moved]).map_err(|f| f.error.to_string())?;
        let c = engine.recorder.graph.matmul(a, a).map_err(|e| e.to_string())?;
        let start = Instant::now();
        engine.evaluate(&[c]).map_err(|f| f.error.to_string())?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(format!("matmul {:.0} GFLOP/s in f32", 2.0 * (n as f64).powi(3) / best / 1e9))
}
