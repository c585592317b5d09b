//! Measures the price of strict shards on one CPU device. From the folder `tests`:
//!
//! `cargo run --release --example strict_price [ROUNDS]`
//!
//! A step over 64 sequences is taken in 8 strict shards, as 8 accumulated micro-batches of the same 8 sequences each, and whole. The
//! first two have products of the same shapes. The three take turns; the figures are medians of the rounds.
#![allow(clippy::unwrap_used)]

use perilune_lua::{Run, StrictShards};
use perilune_tests::harness::device;
use perilune_tests::scripts::{Script, script_on};
use std::time::Instant;

/// A transformer with dropout.
const RECIPE: &str = r#"
local pl = require "perilune"
local nn = pl.nn
local recipe = pl.recipe { name = "price", params = { steps = 1000, batch = 64, accumulate = 1 } }
function recipe.data(p)
  local text = pl.data.sequence(pl.randint(0, 64, { 65536 }, { dtype = "i32" }))
  return { train = text:windows { length = 64, batch = p.batch, seed = 1 } }
end
function recipe.model()
  local m = { embed = nn.Embedding(64, 128), head = nn.Linear(128, 64), blocks = {} }
  for k = 1, 4 do m.blocks[k] = nn.TransformerBlock(128, 4, { causal = true, dropout = 0.1 }) end
  function m:forward(x)
    x = self.embed(x)
    for _, block in ipairs(self.blocks) do x = block(x) end
    return self.head(x)
  end
  return nn.module(m)
end
function recipe.optimizer(_, model) return pl.optim.AdamW(model, { lr = 1e-3, clip_norm = 1 }) end
function recipe.loss(model, batch) return pl.cross_entropy(model(batch.x):flatten(0, 1), batch.y:flatten()) end
return recipe
"#;

const STEPS: usize = 3;

/// (name, batch, micro-batches, strict shards)
const WAYS: [(&str, &str, &str, Option<usize>); 3] =
    [("strict shards", "64", "1", Some(8)), ("accumulate", "8", "8", None), ("whole batch", "64", "1", None)];

fn open(batch: &str, accumulate: &str, shards: Option<usize>) -> (Script, Run) {
    let s = script_on(device(2), &[("batch", batch), ("accumulate", accumulate)]).unwrap();
    s.runtime.host().engine.borrow_mut().set_strict_shards(shards).unwrap();
    s.runtime.host().strict_shards.set(StrictShards::CommandLine);
    let file = tempfile::Builder::new().suffix(".lua").tempfile().unwrap();
    std::fs::write(file.path(), RECIPE).unwrap();
    let recipe = s.recipe(file.path()).unwrap_or_else(|e| panic!("{e}"));
    let run = recipe.start(None, None, None).unwrap_or_else(|e| panic!("{e}"));
    (s, run)
}

/// Milliseconds of a step.
fn measure(run: &Run) -> f64 {
    let start = Instant::now();
    for _ in 0..STEPS {
        let step = run.step().unwrap_or_else(|e| panic!("{e}"));
        run.read(&step).unwrap_or_else(|e| panic!("{e}"));
    }
    start.elapsed().as_secs_f64() * 1e3 / STEPS as f64
}

fn main() {
    let rounds = std::env::args().nth(1).map_or(5, |n| n.parse().expect("the number of rounds"));
    let ways: Vec<_> =
        WAYS.iter().map(|(name, batch, accumulate, shards)| (name, open(batch, accumulate, *shards))).collect();
    let mut times = vec![Vec::new(); ways.len()];
    for round in 0..=rounds {
        for ((_, (_, run)), times) in ways.iter().zip(&mut times) {
            let ms = measure(run);
            // The first round plans and allocates.
            if round > 0 {
                times.push(ms);
            }
        }
    }
    let median = |all: &mut Vec<f64>| {
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    };
    let medians: Vec<f64> = times.iter_mut().map(median).collect();
    for ((name, (s, _)), ms) in ways.iter().zip(&medians) {
        let stats = s.runtime.host().engine.borrow().stats();
        let (arena, kernels) = (stats.arena_bytes as f64 / 1e6, stats.kernels);
        println!(
            "{name:<14} {ms:8.1} ms a step  {:5.2} of accumulate  arena {arena:7.1} MB  {kernels} kernels",
            ms / medians[1]
        );
    }
}
