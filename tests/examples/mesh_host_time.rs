//! Measures the thread that records and looks up a step, on meshes of null devices, which plan and run nothing. From the folder
//! `tests`:
//!
//! `cargo run --release --example mesh_host_time [ROUNDS]`
//!
//! The CPU time of that thread for a step must not grow with the number of devices, since it records the step once. The meshes take
//! turns; the figures are the fastest of the rounds.
#![allow(clippy::unwrap_used)]

use perilune_core::Mesh;
use perilune_dist::MeshBackend;
use perilune_lua::{Runtime, RuntimeOptions};
use perilune_plan::{Backend, null::Null};
use perilune_tests::scripts;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

/// A transformer that trains on batches of host data; calls `print` after each step.
const RECIPE: &str = r#"
local pl = require "perilune"
local nn = pl.nn
local recipe = pl.recipe { name = "host", params = { steps = 100 } }
function recipe.data()
  return { train = pl.data.sequence(pl.randint(0, 64, { 4096 }, { dtype = "i32" })):windows { length = 16, batch = 32, seed = 1 } }
end
function recipe.model()
  local m = { embed = nn.Embedding(64, 32), head = nn.Linear(32, 64), blocks = {} }
  for k = 1, 12 do m.blocks[k] = nn.TransformerBlock(32, 4, { causal = true }) end
  function m:forward(x)
    x = self.embed(x)
    for _, block in ipairs(self.blocks) do x = block(x) end
    return self.head(x)
  end
  return nn.module(m)
end
function recipe.optimizer(_, model) return pl.optim.AdamW(model, { lr = 1e-3, clip_norm = 1 }) end
function recipe.loss(model, batch) return pl.cross_entropy(model(batch.x):flatten(0, 1), batch.y:flatten()) end
local run = require("perilune.train").new(recipe)
run:step(10)
print()
for _ = 1, 30 do run:step() print() end
"#;

/// CPU time of this thread in microseconds, or the time since `start` on a system that does not report it.
fn cpu_us(start: Instant) -> f64 {
    std::thread::yield_now();
    let read = std::fs::read_to_string("/proc/thread-self/schedstat");
    let ns = read.ok().and_then(|text| text.split(' ').next()?.parse::<f64>().ok());
    ns.map_or_else(|| start.elapsed().as_secs_f64() * 1e6, |ns| ns / 1e3)
}

/// Microseconds of a step: the median of 30.
fn measure(devices: usize) -> f64 {
    let mesh = Mesh::parse(&format!("dp={devices}")).unwrap();
    let nulls = (0..devices).map(|_| Arc::new(Null) as Arc<dyn Backend>).collect();
    let backend: Arc<dyn Backend> =
        if devices == 1 { Arc::new(Null) } else { Arc::new(MeshBackend::new(mesh, nulls).unwrap()) };
    let (start, marks): (Instant, Rc<RefCell<Vec<f64>>>) = (Instant::now(), Rc::default());
    let sink = marks.clone();
    let options = RuntimeOptions {
        backend,
        params: Vec::new(),
        policy: scripts::policy(&[]),
        strict: true,
        print: Rc::new(move |_| sink.borrow_mut().push(cpu_us(start))),
    };
    let runtime = Runtime::new(options).unwrap();
    runtime.load_text(RECIPE, "@host.lua").unwrap_or_else(|e| panic!("{e}"));
    let mut steps: Vec<f64> = marks.borrow().windows(2).map(|w| w[1] - w[0]).collect();
    steps.sort_by(f64::total_cmp);
    steps[steps.len() / 2]
}

fn main() {
    let rounds = std::env::args().nth(1).map_or(5, |n| n.parse().expect("a number of rounds"));
    let sizes = [1, 2, 4, 8];
    let mut best = [f64::INFINITY; 4];
    for _ in 0..rounds {
        for (best, devices) in best.iter_mut().zip(sizes) {
            *best = best.min(measure(devices));
        }
    }
    println!("devices  us a step  ratio");
    for (us, devices) in best.iter().zip(sizes) {
        println!("{devices:>7}  {us:>9.0}  {:.2}", us / best[0]);
    }
}
