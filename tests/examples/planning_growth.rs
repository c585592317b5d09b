//! Measures how planning grows: the first step, and the recording and lookup of later ones, of a chain of linear layers with
//! AdamW on the null device, which plans and runs nothing. From the folder `tests`:
//!
//! `cargo run --release --example planning_growth [LAYERS LAYERS [ROUNDS]]`
//!
//! Steps are measured in CPU time. By the clock on a busy machine a long step would include the time slices of other processes, and
//! a short one, which fits into a slice, would not. The lookup is timed by the engine's clock, so its fastest counts.
#![allow(clippy::unwrap_used)]

use perilune_lua::{Runtime, RuntimeOptions};
use perilune_plan::null::Null;
use perilune_tests::scripts;
use std::cell::{OnceCell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

/// Calls `print` before the first step and after each.
const CHAIN: &str = r#"
local pl = require "perilune"
local nn = pl.nn
local layers = {}
for k = 1, LAYERS do layers[k] = nn.Linear(8, 8) end
local model = nn.Sequential(layers)
local opt = pl.optim.AdamW(model, { lr = 1e-3 })
local x = pl.eval(pl.randn { 4, 8 })
print()
for k = 1, 10 do
  pl.step(function()
    local loss = (model(x) ^ 2):mean()
    loss:backward()
    opt:step()
    return loss
  end)
  print()
end
"#;

/// CPU time of this thread in milliseconds, or the time since `start` on a system that does not report it.
fn cpu_ms(start: Instant) -> f64 {
    // The kernel brings the count up to date when the thread gives up its turn.
    std::thread::yield_now();
    let read = std::fs::read_to_string("/proc/thread-self/schedstat");
    let ns = read.ok().and_then(|text| text.split(' ').next()?.parse::<f64>().ok());
    ns.map_or_else(|| start.elapsed().as_secs_f64() * 1e3, |ns| ns / 1e6)
}

/// The first step, the median of later ones, and the fastest lookup of their plan, in milliseconds.
fn measure(layers: usize) -> [f64; 3] {
    let start = Instant::now();
    // The time of all lookups so far, once there is an engine.
    let lookup_ms: Rc<OnceCell<Box<dyn Fn() -> f64>>> = Rc::default();
    // CPU time, and the time of lookups, at each `print`.
    let marks: Rc<RefCell<Vec<[f64; 2]>>> = Rc::default();
    let (looked_up, sink) = (lookup_ms.clone(), marks.clone());
    let runtime = Runtime::new(RuntimeOptions {
        backend: Arc::new(Null),
        params: Vec::new(),
        policy: scripts::policy(&[]),
        strict: true,
        print: Rc::new(move |_| sink.borrow_mut().push([cpu_ms(start), looked_up.get().unwrap()()])),
    })
    .unwrap();
    let host = runtime.host().clone();
    let _ = lookup_ms.set(Box::new(move || host.engine.borrow().stats().lookup_ms));
    runtime.load_text(&CHAIN.replace("LAYERS", &layers.to_string()), "@chain.lua").unwrap();
    let marks = marks.borrow();
    let [steps, lookups] = [0, 1].map(|k| marks.windows(2).map(|w| w[1][k] - w[0][k]).collect::<Vec<f64>>());
    let fastest = lookups[1..].iter().copied().fold(f64::INFINITY, f64::min);
    [steps[0], median(steps[1..].to_vec()), fastest]
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

fn fastest(all: Vec<f64>) -> f64 {
    all.into_iter().fold(f64::INFINITY, f64::min)
}

fn main() {
    let numbers: Vec<usize> = std::env::args().skip(1).map(|n| n.parse().unwrap()).collect();
    let (few, many) = (numbers.first().copied().unwrap_or(200), numbers.get(1).copied().unwrap_or(1600));
    let rounds = numbers.get(2).copied().unwrap_or(7);
    let all: Vec<[[f64; 3]; 2]> = (0..rounds).map(|_| [measure(few), measure(many)]).collect();
    println!("{:14} {few:>8} {many:>8}  ratio (layers: {:.1})", "ms", many as f64 / few as f64);
    let summaries: [(&str, fn(Vec<f64>) -> f64); 3] =
        [("first step", median), ("later step", median), ("lookup", fastest)];
    for (k, (name, of_rounds)) in summaries.into_iter().enumerate() {
        let [a, b] = [0, 1].map(|size| of_rounds(all.iter().map(|round| round[size][k]).collect()));
        println!("{name:14} {a:8.2} {b:8.2}  {:.1}", b / a);
    }
}
