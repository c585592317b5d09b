//! Compares the memory that a dry run predicts for each device of a mesh with what the devices of a CPU mesh use.
#![allow(clippy::unwrap_used)]

use perilune_cpu::Cpu;
use perilune_dist::MeshOptions;
use perilune_plan::estimate::Estimate;
use perilune_plan::predict::{Calibration, Machine};
use perilune_plan::{Backend, Memory};
use perilune_tests::harness::on_mesh;
use perilune_tests::scripts::script_on;
use std::path::Path;
use std::sync::Arc;

/// Sizes are powers of two, which the CPU's allocator does not round.
const RECIPE: &str = r#"
local pl = require "perilune"
local nn = pl.nn
local recipe = pl.recipe { name = "sizes", params = { layers = 3 } }
function recipe.data(p)
  return { train = pl.data.sequence(pl.randint(0, 256, { 4096 }, { dtype = "i32" })):windows { length = 64, batch = 8, seed = 1 } }
end
function recipe.model(p)
  local m = { embed = nn.Embedding(256, 128), head = nn.Linear(128, 256), blocks = {} }
  for k = 1, p.layers do m.blocks[k] = nn.TransformerBlock(128, 4, { causal = true }) end
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

/// Takes three steps. Returns the memory of a device, and bytes of States and intermediate values.
fn train(backend: Arc<dyn Backend>, zero: Option<u8>, file: &Path) -> (Memory, [usize; 2]) {
    let s = script_on(backend, &[]).unwrap();
    s.runtime.host().engine.borrow_mut().zero = zero;
    let run = s.recipe(file).and_then(|recipe| recipe.start(None, None, None)).unwrap_or_else(|e| panic!("{e}"));
    for _ in 0..3 {
        run.step().and_then(|step| run.read(&step)).unwrap_or_else(|e| panic!("{e}"));
    }
    let engine = s.runtime.host().engine.borrow();
    let stats = engine.stats();
    let machine = Machine::new(Calibration::of("h200").unwrap(), engine.mesh(), None).unwrap();
    assert!(engine.predict(&machine).is_some_and(|p| p.serial > 0.0));
    (engine.memory().device, [stats.state_bytes, stats.arena_bytes])
}

#[test]
fn bytes_of_a_device_are_those_that_it_uses() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("sizes.lua");
    std::fs::write(&file, RECIPE).unwrap();
    let mut states = Vec::new();
    for mode in ["dp=2", "dp=2,zero=1", "dp=4,zero=3", "tp=2", "dp=2,tp=2,zero=1"] {
        let MeshOptions { mesh, zero } = MeshOptions::parse(mode).unwrap();
        let estimate = Estimate::new(Arc::new(Cpu::new(Some(1))), usize::MAX).of_mesh(mesh);
        let (predicted, parts) = train(Arc::new(estimate), zero, &file);
        let (used, own) = train(on_mesh(mesh, 1), zero, &file);
        assert_eq!(parts, own, "{mode}: States and intermediate values");
        for (name, a, b) in [("allocated", predicted.allocated, used.allocated), ("peak", predicted.peak, used.peak)] {
            let ratio = a as f64 / b as f64;
            assert!((0.95..1.05).contains(&ratio), "{mode}: {name} {a} predicted, {b} used");
        }
        states.push(parts[0]);
    }
    // The optimizer's States are divided, then the weights too.
    assert!(states[1] < states[0] && states[2] < states[1] && states[3] < states[0], "{states:?}");
}
