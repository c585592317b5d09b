//! Prints how planning and the host's part of a step grow with the step: a chain of linear layers with AdamW.
//!
//!     cargo run --release -p perilune-lua --example growth [LAYERS]…
//!
//! Runs on the null device, so only recording, planning and lookup are measured. For each number of layers (200, 400, 800
//! and 1,600 by default) it prints medians in milliseconds: the first step, of which planning; a later step, of which the
//! plan lookup. The last line has the ratios of the largest to the smallest model. No limit is checked.

use perilune_lua::{Runtime, RuntimeOptions};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

const RECIPE: &str = r#"
local pl = require "perilune"
local nn = require "perilune.nn"
local optim = require "perilune.optim"
local list = {}
for i = 1, LAYERS do list[i] = nn.Linear(16, 16) end
local model = nn.Sequential(list)
local opt = optim.AdamW(model, { lr = 1e-3 })
local x, y = pl.eval(pl.randn { 8, 16 }, pl.randn { 8, 16 })
return function()
  pl.step(function()
    local loss = pl.mse_loss(model(x), y)
    loss:backward()
    opt:step()
    return loss
  end):free()
end
"#;

/// First steps measured per size, each in a new runtime.
const RUNS: usize = 5;
/// Later steps measured per runtime.
const STEPS: usize = 11;

/// First step, planning in it, later step, lookup in it: medians in milliseconds.
fn measure(layers: usize) -> [f64; 4] {
    let mut columns: [Vec<f64>; 4] = Default::default();
    for _ in 0..RUNS {
        let options = RuntimeOptions {
            backend: Arc::new(perilune_plan::Null),
            params: Vec::new(),
            strict: true,
            print: Rc::new(|s| println!("{s}")),
        };
        let runtime = Runtime::new(options).unwrap_or_else(|e| panic!("{e}"));
        let text = RECIPE.replace("LAYERS", &layers.to_string());
        let f: mlua::Function =
            runtime.lua().load(&text).set_name("@growth.lua").eval().unwrap_or_else(|e| panic!("{e}"));
        let step = || {
            let before = runtime.host().engine.borrow().stats();
            let start = Instant::now();
            f.call::<()>(()).unwrap_or_else(|e| panic!("{e}"));
            let ms = start.elapsed().as_secs_f64() * 1e3;
            let after = runtime.host().engine.borrow().stats();
            (ms, after.compile_ms - before.compile_ms, after.lookup_ms - before.lookup_ms)
        };
        let (first, planning, _) = step();
        columns[0].push(first);
        columns[1].push(planning);
        for _ in 0..STEPS {
            let (ms, _, lookup) = step();
            columns[2].push(ms);
            columns[3].push(lookup);
        }
    }
    columns.map(|mut c| {
        c.sort_by(f64::total_cmp);
        c[c.len() / 2]
    })
}

fn main() {
    let mut sizes: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    if sizes.is_empty() {
        sizes = vec![200, 400, 800, 1600];
    }
    println!("{:>7} {:>12} {:>12} {:>12} {:>12}", "layers", "first ms", "planning ms", "later ms", "lookup ms");
    let rows: Vec<[f64; 4]> = sizes
        .iter()
        .map(|&layers| {
            let row = measure(layers);
            println!("{layers:>7} {:>12.2} {:>12.2} {:>12.2} {:>12.3}", row[0], row[1], row[2], row[3]);
            row
        })
        .collect();
    if let (Some(small), Some(large)) = (rows.first(), rows.last()) {
        let times: Vec<String> = small.iter().zip(large).map(|(s, l)| format!("{:>12.1}", l / s)).collect();
        println!("{:>7} {}", "ratio", times.join(" "));
    }
}
