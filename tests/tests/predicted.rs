//! Compares the memory that a dry run predicts for each device of a mesh with what the devices of a CPU mesh use.
#![allow(clippy::unwrap_used)]

use perilune_core::mesh::Axis;
use perilune_cpu::Cpu;
use perilune_dist::{MeshBackend, MeshOptions};
use perilune_lua::StateInfo;
use perilune_plan::estimate::Estimate;
use perilune_plan::predict::{Calibration, Machine, Prediction};
use perilune_plan::{Backend, BufferDesc, Memory, Schedule};
use perilune_tests::harness::on_mesh;
use perilune_tests::scripts::script_on;
use std::path::Path;
use std::sync::Arc;

/// Sizes are powers of two, which the CPU's allocator does not round.
const RECIPE: &str = r#"
local pl = require "perilune"
local nn = pl.nn
local recipe = pl.recipe { name = "sizes", params = { layers = 3, width = 128, steps = 10, accumulate = 1, pipeline = "1f1b" } }
function recipe.data(p)
  return { train = pl.data.sequence(pl.randint(0, 256, { 4096 }, { dtype = "i32" })):windows { length = 64, batch = 8, seed = 1 } }
end
function recipe.model(p)
  local m = { embed = nn.Embedding(256, p.width), head = nn.Linear(p.width, 256), blocks = {} }
  for k = 1, p.layers do m.blocks[k] = nn.TransformerBlock(p.width, 4, { causal = true }) end
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

/// Layers of equal work, beside which transfers and the update take little time.
const DEEP: &str = r#"
local pl = require "perilune"
local nn = pl.nn
local recipe = pl.recipe { name = "deep", params = { layers = 16, width = 2048, steps = 10, accumulate = 1, pipeline = "1f1b", gelu = false } }
function recipe.data(p)
  local x = pl.randn { 2 * p.width, p.width }
  return { train = pl.data.tensors { x = x }:batch(p.width) }
end
function recipe.model(p)
  local m = { layers = {} }
  for k = 1, p.layers do m.layers[k] = nn.Linear(p.width, p.width) end
  function m:forward(x)
    for _, layer in ipairs(self.layers) do
      x = layer(x)
      if p.gelu then x = pl.gelu(x) end
    end
    return x
  end
  return nn.module(m)
end
function recipe.optimizer(_, model) return pl.optim.SGD(model, { lr = 1e-3 }) end
function recipe.loss(model, batch) return model(batch.x):mean() end
return recipe
"#;

/// A language model whose head is its embedding, with a gradient norm over all stages.
const TIED: &str = r#"
local pl = require "perilune"
local nn = pl.nn
local recipe = pl.recipe { name = "tied", params = { layers = 4, width = 64, vocab = 512, steps = 10, accumulate = 1, pipeline = "1f1b" } }
function recipe.data(p)
  local x = pl.randint(0, p.vocab, { 64, 16 }, { dtype = "i64" })
  return { train = pl.data.tensors { x = x }:batch(8) }
end
function recipe.model(p)
  local m = { wte = nn.Embedding(p.vocab, p.width), layers = {} }
  for k = 1, p.layers do m.layers[k] = nn.Linear(p.width, p.width) end
  function m:forward(ids)
    local x = self.wte(ids)
    for _, layer in ipairs(self.layers) do x = layer(x):tanh() end
    return pl.linear(x, self.wte.weight)
  end
  return nn.module(m)
end
function recipe.optimizer(_, model) return pl.optim.AdamW(model, { lr = 1e-3, clip_norm = 1 }) end
function recipe.loss(model, batch) return pl.cross_entropy(model(batch.x):flatten(0, 1), batch.x:flatten()) end
return recipe
"#;

/// Images through a convolution and a batch norm.
const NORMED: &str = r#"
local pl = require "perilune"
local nn = pl.nn
local recipe = pl.recipe { name = "normed", params = { pixels = 16, steps = 10 } }
function recipe.data(p)
  return { train = pl.data.tensors { x = pl.randn { 16, 3, p.pixels, p.pixels }, y = pl.arange(16) % 4 }:batch(8) }
end
function recipe.model()
  local m = { conv = nn.Conv2d(3, 16, 3, { padding = 1, bias = false }), norm = nn.BatchNorm2d(16), fc = nn.Linear(16, 4) }
  function m:forward(x) return self.fc(self.norm(self.conv(x)):relu():mean({ 2, 3 })) end
  return nn.module(m)
end
function recipe.optimizer(_, model) return pl.optim.SGD(model, { lr = 1e-3 }) end
function recipe.loss(model, batch) return pl.cross_entropy(model(batch.x), batch.y) end
return recipe
"#;

/// A run of three steps.
struct Trained {
    /// Of the device with the most.
    memory: Memory,
    /// Bytes of States and intermediate values.
    parts: [usize; 2],
    prediction: Prediction,
    /// Bytes of States of each device along pp.
    states: Vec<usize>,
}

fn train(backend: Arc<dyn Backend>, zero: Option<u8>, file: &Path, params: &[(&str, &str)]) -> Trained {
    let s = script_on(backend, params).unwrap();
    s.runtime.host().engine.borrow_mut().zero = zero;
    let run = s.recipe(file).and_then(|recipe| recipe.start(None, None, None)).unwrap_or_else(|e| panic!("{e}"));
    for _ in 0..3 {
        run.step().and_then(|step| run.read(&step)).unwrap_or_else(|e| panic!("{e}"));
    }
    let engine = s.runtime.host().engine.borrow();
    let stats = engine.stats();
    let machine = Machine::new(Calibration::of("h200").unwrap(), engine.mesh(), None).unwrap();
    let prediction = engine.predict(&machine).unwrap();
    assert!(prediction.serial > 0.0 && prediction.overlapped <= prediction.serial);
    let (memory, mesh) = (engine.memory().device, engine.mesh());
    drop(engine);
    let infos = run.state_infos().unwrap();
    let desc = |info: &StateInfo| BufferDesc { shape: info.shape, dtype: info.dtype, placement: info.placement };
    let on = |k| infos.iter().map(|(_, info)| desc(info).bytes_along_pp(&mesh, k)).sum();
    let states = (0..mesh.size(Axis::Pp)).map(on).collect();
    Trained { memory, parts: [stats.state_bytes, stats.arena_bytes], prediction, states }
}

#[test]
fn bytes_of_a_device_are_those_that_it_uses() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("sizes.lua");
    std::fs::write(&file, RECIPE).unwrap();
    let mut states = Vec::new();
    for mode in ["dp=2", "dp=2,zero=1", "dp=4,zero=3", "tp=2", "dp=2,tp=2,zero=1"] {
        let MeshOptions { mesh, zero, .. } = MeshOptions::parse(mode).unwrap();
        let estimate = Estimate::new(Arc::new(Cpu::new(Some(1))), usize::MAX).of_mesh(mesh);
        let Trained { memory: predicted, parts, .. } = train(Arc::new(estimate), zero, &file, &[]);
        let Trained { memory: used, parts: own, .. } = train(on_mesh(mesh, 1), zero, &file, &[]);
        assert_eq!(parts, own, "{mode}: States and intermediate values");
        let ratio = predicted.peak as f64 / used.peak as f64;
        assert!((0.95..1.05).contains(&ratio), "{mode}: a peak of {} predicted, {} used", predicted.peak, used.peak);
        states.push(parts[0]);
    }
    // The optimizer's States are divided, then the weights too.
    assert!(states[1] < states[0] && states[2] < states[1] && states[3] < states[0], "{states:?}");
}

/// The devices along pp have different stages: each one's memory is compared with what a device of a CPU mesh has used.
#[test]
fn bytes_of_stages_are_those_that_their_devices_use() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("sizes.lua");
    std::fs::write(&file, RECIPE).unwrap();
    let mut arenas = Vec::new();
    for (mode, schedule) in
        [("pp=2", "fill-drain"), ("pp=2", "1f1b"), ("pp=4", "1f1b"), ("pp=2", "zbv"), ("pp=2,dp=2,zero=1", "zb-h1")]
    {
        let MeshOptions { mesh, zero, .. } = MeshOptions::parse(mode).unwrap();
        let params = [("accumulate", "8"), ("pipeline", schedule)];
        let estimate = Estimate::new(Arc::new(Cpu::new(Some(1))), usize::MAX).of_mesh(mesh);
        let predicted = train(Arc::new(estimate), zero, &file, &params);
        let cpus: Vec<Arc<dyn Backend>> =
            (0..mesh.devices()).map(|_| Arc::new(Cpu::new(Some(1))) as Arc<dyn Backend>).collect();
        let used = train(Arc::new(MeshBackend::new(mesh, cpus.clone()).unwrap()), zero, &file, &params);
        let near = |a: usize, b: usize| (0.95..1.05).contains(&(a as f64 / b as f64));
        let (peak, most) = (predicted.memory.peak, used.memory.peak);
        assert!(near(peak, most), "{mode} {schedule}: a peak of {peak} predicted, {most} used");
        for (rank, cpu) in cpus.iter().enumerate() {
            let k = mesh.coordinates(rank)[Axis::Pp as usize];
            let (own, peak) = (predicted.states[k] + predicted.prediction.devices[k].arena, cpu.memory().peak);
            assert!(near(own, peak), "{mode} {schedule}, device {rank}: {own} predicted, {peak} used");
        }
        arenas.push(predicted.prediction.devices[0].arena);
    }
    assert!(arenas[1] < arenas[0], "fill-drain keeps all micro-batches: {arenas:?}");
}

/// Equal stages, whose bubble is (P - 1) / (M + P - 1) of a step but for transfers and the update, and about half of it with two chunks.
#[test]
fn waiting_for_stages_is_that_of_the_formulas() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("deep.lua");
    std::fs::write(&file, DEEP).unwrap();
    let bubble = |mode: &str, micros: &str, schedule: &str| {
        let mesh = MeshOptions::parse(mode).unwrap().mesh;
        let estimate = Estimate::new(Arc::new(Cpu::new(Some(1))), usize::MAX).of_mesh(mesh);
        let params = [("accumulate", micros), ("pipeline", schedule)];
        let p = train(Arc::new(estimate), None, &file, &params).prediction;
        let sent: usize = p.devices.iter().map(|d| d.sent).sum();
        (p.bubble().unwrap(), 1.0 - p.devices[1].busy / p.serial, sent)
    };
    for (p, m) in [(2, 4), (4, 4)] {
        let (mode, micros) = (format!("pp={p}"), m.to_string());
        let formula = (p - 1) as f64 / (m + p - 1) as f64;
        let (found, _, sent) = bubble(&mode, &micros, "1f1b");
        assert!(
            (found / formula - 1.0).abs() < 0.1,
            "{mode}, {m} micro-batches: {found} predicted, {formula} in theory"
        );
        let (drained, ..) = bubble(&mode, &micros, "fill-drain");
        assert!((drained / formula - 1.0).abs() < 0.1, "{mode}, {m} micro-batches: {drained} with fill-drain");
        let (chunks, _, more) = bubble(&mode, &micros, "interleaved");
        assert!(chunks < 0.75 * found, "{mode}, {m} micro-batches: {chunks} with two chunks, {found} with one");
        assert!(more > sent, "two chunks send {more} bytes, one {sent}");
        // Activations forward and gradients back, between each two stages, of each micro-batch; and scalars.
        let least = 2 * (p - 1) * m * 2048 * 2048 * 4;
        assert!(sent >= least && sent < least + least / 50, "{sent} bytes are sent, of which {least} are activations");
    }
}

/// A kernel that computes the gradient of the inputs and that of a bias comes with the first, for which another stage waits, and the
/// gradients of weights come behind it: stages wait as the schedules say, which put these off.
#[test]
fn gradients_of_weights_keep_no_stage_waiting() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("deep.lua");
    std::fs::write(&file, DEEP).unwrap();
    let bubble = |schedule: &str| {
        let mesh = MeshOptions::parse("pp=4").unwrap().mesh;
        let estimate = Estimate::new(Arc::new(Cpu::new(Some(1))), usize::MAX).of_mesh(mesh);
        let params = [("accumulate", "8"), ("pipeline", schedule), ("gelu", "true")];
        train(Arc::new(estimate), None, &file, &params).prediction.bubble().unwrap()
    };
    let plain = bubble("1f1b");
    assert!((plain / (3.0 / 11.0) - 1.0).abs() < 0.1, "{plain} with 1f1b");
    for schedule in ["zb-h1", "zbv", "dualpipev"] {
        let found = bubble(schedule);
        assert!(found < 0.65 * plain, "{schedule}: {found} predicted, {plain} with 1f1b");
    }
}

/// In a pair one pass computes while the other exchanges tensors with the devices of another axis.
#[test]
fn exchanges_run_beside_the_other_pass_of_a_pair() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("sizes.lua");
    std::fs::write(&file, RECIPE).unwrap();
    let waited = |schedule: &str| {
        let mesh = MeshOptions::parse("pp=2,tp=2").unwrap().mesh;
        let estimate = Estimate::new(Arc::new(Cpu::new(Some(1))), usize::MAX).of_mesh(mesh);
        let params = [("layers", "4"), ("width", "4096"), ("accumulate", "8"), ("pipeline", schedule)];
        let p = train(Arc::new(estimate), None, &file, &params).prediction;
        let along_tp = p.sent.iter().filter(|s| s.transfer.axis == Axis::Tp);
        along_tp.fold([0.0; 2], |sum, s| [sum[0] + s.waited, sum[1] + s.seconds])
    };
    let without = Schedule::DualPipeV.table(2, 8).unwrap().to_string();
    let ([alone, _], [paired, all]) = (waited(&without), waited("dualpipev"));
    assert!(alone > 0.8 * all && paired < 0.75 * alone, "{paired} in pairs, {alone} without, of {all} seconds");
}

/// A device has slots for all rows that may come to its experts. Its work is that on the rows that come on average.
#[test]
fn products_of_experts_count_the_rows_that_come() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("experts.lua");
    let experts = "{ causal = true, mlp = \"swiglu\", experts = 4, top = 2 }";
    std::fs::write(&file, RECIPE.replace("{ causal = true }", experts)).unwrap();
    let flops = |mesh: &str| {
        let estimate = Estimate::new(Arc::new(Cpu::new(Some(1))), usize::MAX);
        let estimate = estimate.of_mesh(MeshOptions::parse(mesh).unwrap().mesh);
        train(Arc::new(estimate), None, &file, &[]).prediction.flops
    };
    let (dp, ep) = (flops("dp=2"), flops("ep=2"));
    assert!((ep / dp - 1.0).abs() < 0.01, "{ep} with ep=2, {dp} with dp=2");
}

/// The gradient of a weight that two stages read is sent once a step, whatever the number of micro-batches, and so are the squares of the
/// gradient norm.
#[test]
fn a_tied_gradient_is_sent_once() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tied.lua");
    std::fs::write(&file, TIED).unwrap();
    let sent = |micros: usize| {
        let estimate =
            Estimate::new(Arc::new(Cpu::new(Some(1))), usize::MAX).of_mesh(MeshOptions::parse("pp=2").unwrap().mesh);
        let micros = micros.to_string();
        let p = train(Arc::new(estimate), None, &file, &[("accumulate", &micros), ("pipeline", "1f1b")]).prediction;
        p.devices.iter().map(|d| d.sent).sum::<usize>()
    };
    // Activations forward and gradients back, of 8 sequences of 16 positions.
    let (micro, weight) = (2 * 8 * 16 * 64 * 4, 512 * 64 * 4);
    let (four, eight) = (sent(4), sent(8));
    assert_eq!(eight - four, 4 * micro, "{four} and {eight} bytes");
    // The weight forward, its gradient back, and a few scalars.
    assert!((four - 4 * micro - 2 * weight) < 256, "{four} bytes");
}

/// Devices that have some of the samples exchange sums of channels and gradients of weights, and nothing that grows with the images.
#[test]
fn batch_norms_of_divided_samples_send_no_activations() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("normed.lua");
    std::fs::write(&file, NORMED).unwrap();
    let sent = |pixels: &str| {
        let estimate =
            Estimate::new(Arc::new(Cpu::new(Some(1))), usize::MAX).of_mesh(MeshOptions::parse("dp=2").unwrap().mesh);
        let p = train(Arc::new(estimate), None, &file, &[("pixels", pixels)]).prediction;
        p.sent.iter().map(|s| s.transfer.bytes).sum::<usize>()
    };
    let (small, large) = (sent("16"), sent("32"));
    assert!(small > 0 && small == large, "{small} and {large} bytes");
}
