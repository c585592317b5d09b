//! Measures how planning grows: the first step, and the recording and lookup of later ones, of a chain of linear layers with
//! AdamW on the null device, which plans and runs nothing. From the folder `tests`:
//!
//! `cargo run --release --example planning_growth [LAYERS LAYERS [ROUNDS]]`
#![allow(clippy::unwrap_used)]

use perilune_lua::{Runtime, RuntimeOptions};
use perilune_plan::null::Null;
use perilune_tests::scripts;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// Prints the time of the first step and the median of later ones, in milliseconds.
const CHAIN: &str = r#"
local pl = require "perilune"
local nn = pl.nn
local layers = {}
for k = 1, LAYERS do layers[k] = nn.Linear(8, 8) end
local model = nn.Sequential(layers)
local opt = pl.optim.AdamW(model, { lr = 1e-3 })
local x = pl.eval(pl.randn { 4, 8 })
local function step()
  local begun = pl.clock()
  pl.step(function()
    local loss = (model(x) ^ 2):mean()
    loss:backward()
    opt:step()
    return loss
  end)
  return (pl.clock() - begun) * 1e3
end
local first = step()
local later = {}
for k = 1, 9 do later[k] = step() end
table.sort(later)
print(first) print(later[5])
"#;

/// The first step, a later one, and the lookup of its plan, in milliseconds.
fn measure(layers: usize) -> [f64; 3] {
    let printed: Rc<RefCell<Vec<f64>>> = Rc::default();
    let sink = printed.clone();
    let runtime = Runtime::new(RuntimeOptions {
        backend: Arc::new(Null),
        params: Vec::new(),
        policy: scripts::policy(&[]),
        strict: true,
        print: Rc::new(move |line| sink.borrow_mut().push(line.parse().unwrap())),
    })
    .unwrap();
    runtime.load_text(&CHAIN.replace("LAYERS", &layers.to_string()), "@chain.lua").unwrap();
    let (all, stats) = (printed.borrow(), runtime.host().engine.borrow().stats());
    [all[0], all[1], stats.lookup_ms / stats.hits as f64]
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

fn main() {
    let numbers: Vec<usize> = std::env::args().skip(1).map(|n| n.parse().unwrap()).collect();
    let (few, many) = (numbers.first().copied().unwrap_or(200), numbers.get(1).copied().unwrap_or(1600));
    let rounds = numbers.get(2).copied().unwrap_or(7);
    let all: Vec<[[f64; 3]; 2]> = (0..rounds).map(|_| [measure(few), measure(many)]).collect();
    println!("{:14} {few:>8} {many:>8}  ratio (layers: {:.1})", "ms, median", many as f64 / few as f64);
    for (k, name) in ["first step", "later step", "lookup"].iter().enumerate() {
        let [a, b] = [0, 1].map(|size| median(all.iter().map(|round| round[size][k]).collect()));
        println!("{name:14} {a:8.2} {b:8.2}  {:.1}", b / a);
    }
}
