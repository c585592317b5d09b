//! Measures how planning grows: the first step, and the recording and lookup of later ones, of a chain of linear layers with
//! AdamW on the null device, which plans and runs nothing. From the folder `tests`:
//!
//! `cargo run --release --example planning_growth [LAYERS LAYERS [ROUNDS]]`
//!
//! Steps are measured in CPU time. By the clock on a busy machine a long step would include the time slices of other processes, and
//! a short one, which fits into a slice, would not. The lookup is timed by the engine's clock, so its fastest counts. A processor
//! that shares its core and caches with other work takes up to twice the CPU time: then the fastest of many rounds is comparable.
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

/// Milliseconds of the first step, of each later step, and of each later lookup.
fn measure(layers: usize) -> [Vec<f64>; 3] {
    let start = Instant::now();
    // The time of all lookups so far, once there is an engine.
    let lookup_ms: Rc<OnceCell<Box<dyn Fn() -> f64>>> = Rc::default();
    // CPU time at the begin and at the end of each `print`, and the time of lookups.
    let marks: Rc<RefCell<Vec<[f64; 3]>>> = Rc::default();
    let (looked_up, sink) = (lookup_ms.clone(), marks.clone());
    let runtime = Runtime::new(RuntimeOptions {
        backend: Arc::new(Null),
        params: Vec::new(),
        policy: scripts::policy(&[]),
        strict: true,
        print: Rc::new(move |_| {
            let (begin, lookups) = (cpu_ms(start), looked_up.get().unwrap()());
            sink.borrow_mut().push([begin, cpu_ms(start), lookups]);
        }),
    })
    .unwrap();
    let host = runtime.host().clone();
    let _ = lookup_ms.set(Box::new(move || host.engine.borrow().stats().lookup_ms));
    runtime.load_text(&CHAIN.replace("LAYERS", &layers.to_string()), "@chain.lua").unwrap();
    let marks = marks.borrow();
    let between = |end: usize, begin: usize| marks.windows(2).map(|w| w[1][end] - w[0][begin]).collect::<Vec<f64>>();
    let (steps, lookups) = (between(0, 1), between(2, 2));
    [steps[..1].to_vec(), steps[1..].to_vec(), lookups[1..].to_vec()]
}

fn main() {
    let numbers: Vec<usize> = std::env::args().skip(1).map(|n| n.parse().unwrap()).collect();
    let (few, many) = (numbers.first().copied().unwrap_or(200), numbers.get(1).copied().unwrap_or(1600));
    let rounds = numbers.get(2).copied().unwrap_or(7);
    let mut all: [[Vec<f64>; 3]; 2] = Default::default();
    for _ in 0..rounds {
        for (times, layers) in all.iter_mut().zip([few, many]) {
            times.iter_mut().zip(measure(layers)).for_each(|(all, round)| all.extend(round));
        }
    }
    all.iter_mut().flatten().for_each(|times| times.sort_by(f64::total_cmp));
    println!("layers                  {few:>8} {many:>8}  ratio (layers: {:.1})", many as f64 / few as f64);
    for (k, name) in ["first step", "later step", "lookup"].into_iter().enumerate() {
        let [a, b] = [0, 1].map(|size| &all[size][k]);
        for (statistic, at) in [("fastest", 0), ("median", 2)] {
            let [a, b] = [a, b].map(|times| times[at * times.len() / 4]);
            println!("{name:11} {statistic:8} ms {a:8.3} {b:8.3}  {:.1}", b / a);
        }
    }
}
