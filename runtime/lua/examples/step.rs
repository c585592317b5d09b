//! Measures the host's part of a training step of a small model: microseconds of the forward pass, `backward`, the
//! optimizer, and the end of the step (key, lookup and hand-over; the null device runs nothing).
//!
//!     cargo run --release -p perilune-lua --example step [STEPS]
//!
//! The model is that of `perilune bench mlp`. With STEPS it only runs that many steps, for a profiler.

use perilune_lua::{Runtime, RuntimeOptions};
use perilune_plan::NullWith;
use std::rc::Rc;
use std::sync::Arc;

const RECIPE: &str = r#"
local pl = require "perilune"
local nn = require "perilune.nn"
local optim = require "perilune.optim"
local layers = {}
for i = 1, 8 do layers[#layers + 1] = nn.Linear(64, 64); layers[#layers + 1] = nn.ReLU() end
local model = nn.Sequential(layers)
local opt = optim.AdamW(model, { lr = 1e-3 })
local x, y = pl.eval(pl.randn { 32, 64 }, pl.randn { 32, 64 })
local clock = pl.clock
local forward, backward, update, begun, recorded
local function body()
  local a = clock()
  local loss = pl.mse_loss(model(x), y)
  local b = clock()
  loss:backward()
  local c = clock()
  opt:step()
  local d = clock()
  forward, backward, update, begun, recorded = b - a, c - b, d - c, a, d
  return loss
end
return function()
  local start = clock()
  pl.step(body):free()
  local done = clock()
  return forward, backward, update, begun - start + done - recorded, done - start
end
"#;

fn main() {
    // Some fused ops are kept, as on a GPU.
    let has_kernel = |n: &perilune_core::graph::Node| n.op == &perilune_core::ops::matmul::LINEAR;
    let options = RuntimeOptions {
        backend: Arc::new(NullWith { has_kernel, can_store_layout: |_, _, _| false }),
        params: Vec::new(),
        strict: true,
        print: Rc::new(|s| println!("{s}")),
    };
    let runtime = Runtime::new(options).unwrap_or_else(|e| panic!("{e}"));
    let f: mlua::Function = runtime.lua().load(RECIPE).set_name("@step.lua").eval().unwrap_or_else(|e| panic!("{e}"));
    let only: Option<usize> = std::env::args().nth(1).and_then(|n| n.parse().ok());
    let mut times: [Vec<f64>; 5] = Default::default();
    let before = runtime.host().engine.borrow().stats();
    for _ in 0..only.unwrap_or(2000) {
        let t: (f64, f64, f64, f64, f64) = f.call(()).unwrap_or_else(|e| panic!("{e}"));
        for (list, t) in times.iter_mut().zip([t.0, t.1, t.2, t.3, t.4]) {
            list.push(t * 1e6);
        }
    }
    let after = runtime.host().engine.borrow().stats();
    let median = |list: &mut Vec<f64>| {
        list.sort_by(f64::total_cmp);
        list[list.len() / 2]
    };
    for (name, list) in ["forward", "backward", "optimizer", "end", "step"].iter().zip(&mut times) {
        println!("{name:<10} {:>8.1} us", median(list));
    }
    let lookup = (after.lookup_ms - before.lookup_ms) * 1e3 / (after.hits - before.hits).max(1) as f64;
    println!("of the end, key and lookup {lookup:.1} us (mean)");
}
