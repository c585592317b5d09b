//! Compares predicted with measured times of a step, on the device at hand. From the folder `tests`:
//!
//! `cargo run --release --example predicted [DEVICE [RECIPE[:PRECISION[:KEY=VALUE...]]...]]`
//!
//! DEVICE is `cpu` or a GPU, `cuda:0`; the rates are those of its name. Without recipes it takes gpt2, llama and resnet50, in sizes
//! that fit the device. The measured time is the median of steps after the first ones, in which plans are made and graphs captured.
#![allow(clippy::unwrap_used)]

use perilune_cpu::Cpu;
use perilune_cuda::Cuda;
use perilune_plan::Backend;
use perilune_plan::predict::{Calibration, Machine};
use perilune_tests::scripts::script_on;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Recipes for a GPU, and for a CPU.
const ON_GPU: [&str; 3] = ["gpt2:bf16", "llama:bf16", "resnet50:bf16"];
const ON_CPU: [&str; 3] = [
    "gpt2:f32:size=tiny:context=128:batch=8:vocab=1024",
    "llama:f32:size=tiny:context=128:batch=8:vocab=1024",
    "resnet50:f32:size=tiny:batch=16",
];
/// Steps before the measured ones, and those.
const WARM: usize = 6;
const MEASURED: usize = 15;

fn open(device: &str) -> (Arc<dyn Backend>, Calibration) {
    if device == "cpu" {
        return (Arc::new(Cpu::new(None)), Calibration::of("cpu").unwrap());
    }
    let backend = Arc::new(Cuda::named(device).unwrap_or_else(|e| panic!("{device}: {e}")));
    let name = backend.describe().to_lowercase();
    let gpu = ["h200", "h100"].into_iter().find(|gpu| name.contains(gpu));
    let gpu = gpu.unwrap_or_else(|| panic!("there are no rates of {name}"));
    (backend, Calibration::of(gpu).unwrap())
}

/// Seconds of a step, predicted and measured.
fn compare(what: &str, device: &str) -> Result<(f64, f64), String> {
    let mut words = what.split(':');
    let (name, precision) = (words.next().unwrap_or_default(), words.next().unwrap_or("f32"));
    let params: Vec<(&str, &str)> = words.filter_map(|word| word.split_once('=')).collect();
    let (backend, rates) = open(device);
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../recipes")).join(format!("{name}.lua"));
    let text = |e: &dyn std::fmt::Display| e.to_string();
    let s = script_on(backend, &params).map_err(|e| text(&e))?;
    let run = s.recipe(&path).and_then(|recipe| recipe.start(None, Some(precision), None)).map_err(|e| text(&e))?;
    let step = || run.step().and_then(|step| run.read(&step)).map(|_| ()).map_err(|e| text(&e));
    for _ in 0..WARM {
        step()?;
    }
    let engine = s.runtime.host().engine.borrow();
    let machine = Machine::new(rates, engine.mesh(), None).map_err(|e| text(&e))?;
    let predicted = engine.predict(&machine).ok_or("nothing was planned")?.serial;
    drop(engine);
    let mut times = Vec::with_capacity(MEASURED);
    for _ in 0..MEASURED {
        let begun = Instant::now();
        step()?;
        times.push(begun.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok((predicted, times[MEASURED / 2]))
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let device = args.first().map_or("cpu", String::as_str);
    let default = if device == "cpu" { ON_CPU } else { ON_GPU };
    let given: Vec<&str> = args.iter().skip(1).map(String::as_str).collect();
    println!("{:<60} {:>12} {:>12} {:>8}", format!("on {device}"), "predicted ms", "measured ms", "ratio");
    for what in if given.is_empty() { default.to_vec() } else { given } {
        match compare(what, device) {
            Ok((p, m)) => println!("{what:<60} {:>12.2} {:>12.2} {:>8.2}", p * 1e3, m * 1e3, p / m),
            Err(e) => println!("{what:<60} {}", e.lines().next().unwrap_or_default()),
        }
    }
}
