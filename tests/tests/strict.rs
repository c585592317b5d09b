//! Strict shards at the level of recipes: one hash of all States for the same run on 1, 2, 4 and 8 virtual devices, in every mode.
#![allow(clippy::unwrap_used)]

use perilune_dist::MeshOptions;
use perilune_lua::Run;
use perilune_tests::harness::{in_soak, on_mesh};
use perilune_tests::scripts::{Script, script_on};
use std::path::{Path, PathBuf};

const SHARDS: usize = 8;
/// Steps of each run.
fn steps() -> usize {
    in_soak(20, 6)
}

/// Modes on 1, 2, 4 and 8 devices.
const MODES: [&str; 8] =
    ["", "dp=2", "dp=4", "dp=8", "dp=2,zero=1", "dp=8,zero=2", "dp=4,zero=3", "dp=2,shard=4,zero=3"];

fn open(mode: &str, params: &[(&str, &str)], shards: Option<usize>) -> Script {
    let options = MeshOptions::parse(mode).unwrap_or_else(|e| panic!("{mode}: {e}"));
    let s = script_on(on_mesh(options.mesh, 1), params).unwrap();
    {
        let mut engine = s.runtime.host().engine.borrow_mut();
        engine.zero = options.zero;
        engine.set_strict_shards(shards).unwrap();
    }
    s.runtime.host().strict_shards.set(perilune_lua::StrictShards::CommandLine);
    s
}

fn start(s: &Script, file: &Path, precision: Option<&str>) -> Run {
    let recipe = s.recipe(file).unwrap_or_else(|e| panic!("{e}"));
    recipe.start(None, precision, None).unwrap_or_else(|e| panic!("{e}"))
}

/// The modes of runs that differ from others in precision only.
const FEW: [&str; 2] = ["dp=8", "dp=2,shard=4,zero=3"];

/// What identifies a run: a hash of all States, and the bits of its losses and metrics.
fn train(mode: &str, file: &Path, params: &[(&str, &str)], precision: Option<&str>, shards: Option<usize>) -> String {
    let s = open(mode, params, shards);
    let run = start(&s, file, precision);
    let mut text = String::new();
    for _ in 0..steps() {
        let numbers = run.step().and_then(|step| run.read(&step)).unwrap_or_else(|e| panic!("{mode}: {e}"));
        text += &format!("loss {:x}\n", numbers.loss.to_bits());
        numbers.metrics.iter().for_each(|(name, value)| text += &format!("{name} {:x}\n", value.to_bits()));
    }
    for split in run.evaluated_splits() {
        for (name, value) in run.evaluate_batches(&split, Some(2)).unwrap_or_else(|e| panic!("{mode}: {e}")) {
            text += &format!("{name} {:x}\n", value.to_bits());
        }
    }
    run.each_state(|path, t| {
        let bytes =
            t.bytes.iter().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3));
        text += &format!("{path} {} {} {bytes:x}\n", t.dtype, t.shape);
    })
    .unwrap();
    text
}

/// The first line in which two texts differ.
fn difference(a: &str, b: &str) -> String {
    let found = a.lines().zip(b.lines()).find(|(a, b)| a != b);
    found.map_or_else(|| "the lengths differ".into(), |(a, b)| format!("{a} and {b}"))
}

fn one_hash(file: &Path, params: &[(&str, &str)], precision: Option<&str>) {
    one_hash_on(&MODES, file, params, precision);
}

fn one_hash_on(modes: &[&str], file: &Path, params: &[(&str, &str)], precision: Option<&str>) {
    let want = train("", file, params, precision, Some(SHARDS));
    assert!(!want.contains("NaN"), "{want}");
    for mode in modes.iter().filter(|mode| !mode.is_empty()) {
        let got = train(mode, file, params, precision, Some(SHARDS));
        let what = format!("{} {precision:?} on {mode}", file.display());
        assert!(got == want, "{what}: {}", difference(&want, &got));
    }
}

fn recipe_of(file: &str) -> PathBuf {
    Path::new("../recipes").join(file)
}

const CHARGPT: [(&str, &str); 6] =
    [("layers", "2"), ("heads", "2"), ("width", "32"), ("context", "32"), ("batch", "8"), ("dropout", "0.1")];
const GPT2: [(&str, &str); 5] =
    [("size", "tiny"), ("vocab", "256"), ("context", "16"), ("batch", "8"), ("warmup", "2")];

/// AdamW with clipping; dropout.
#[test]
fn chargpt() {
    one_hash(&recipe_of("chargpt.lua"), &CHARGPT, None);
}

/// Mixed precision; with fp16 a loss scaler.
#[test]
fn gpt2() {
    one_hash(&recipe_of("gpt2.lua"), &GPT2, Some("bf16"));
    one_hash_on(&FEW, &recipe_of("gpt2.lua"), &GPT2, Some("fp16"));
}

/// Accumulation of two micro-batches, grouped-query attention.
#[test]
fn llama() {
    let small =
        [("size", "tiny"), ("vocab", "256"), ("context", "16"), ("batch", "8"), ("accumulate", "2"), ("warmup", "2")];
    one_hash_on(&["dp=2", "dp=4,zero=1", "dp=8,zero=3"], &recipe_of("llama.lua"), &small, None);
    one_hash_on(&["pp=2", "pp=2,dp=2", "pp=2,dp=4,zero=1"], &recipe_of("llama.lua"), &small, None);
    one_hash_on(&["pp=2,dp=2"], &recipe_of("llama.lua"), &small, Some("bf16"));
    one_hash_on(&FEW, &recipe_of("llama.lua"), &small, Some("bf16"));
}

/// A multilayer perceptron, and convolutions.
#[test]
fn digits() {
    one_hash(&recipe_of("digits.lua"), &[("batch", "64")], None);
    one_hash(&recipe_of("digits.lua"), &[("net", "cnn"), ("batch", "32")], None);
}

/// Convolutions with batch norm.
#[test]
fn resnet50() {
    let small =
        [("size", "tiny"), ("classes", "10"), ("pixels", "32"), ("batch", "8"), ("warmup", "2"), ("lr", "0.001")];
    one_hash(&recipe_of("resnet50.lua"), &small, None);
}

/// A recipe with what the others lack together: ragged targets, batch norm, dropout, an average of weights, accumulation.
const ALL: &str = r#"
local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local recipe = pl.recipe { name = "all", params = { steps = 20, batch = 16 } }
recipe.ema, recipe.accumulate = 0.9, 2
function recipe.data(p)
  local y = pl.randint(0, 5, { 160, 3 })
  y = pl.where(pl.rand { 160, 3 } :lt(0.4), pl.full({ 160, 3 }, -100, { dtype = "i64" }), y)
  local set = pl.data.tensors { x = pl.randn { 160, 4 }, y = y }
  return { train = set:split("train", 0.75, 1):shuffle(1):batch(p.batch), valid = set:split("valid", 0.25, 1):batch(24) }
end
function recipe.model()
  return nn.Sequential { nn.Linear(4, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 15) }
end
function recipe.optimizer(_, model) return optim.AdamW(model, { lr = 0.05, clip_norm = 0.5 }) end
function recipe.loss(model, batch)
  return pl.cross_entropy(model(batch.x):view(-1, 5), batch.y:flatten())
end
return recipe
"#;

fn written(text: &str) -> tempfile::NamedTempFile {
    let file = tempfile::Builder::new().suffix(".lua").tempfile().unwrap();
    std::fs::write(file.path(), text).unwrap();
    file
}

#[test]
fn ragged_targets_averages_and_accumulation() {
    let file = written(ALL);
    one_hash(file.path(), &[], None);
    one_hash_on(&["pp=2", "pp=2,dp=2,zero=3"], file.path(), &[], None);
    let few = [&FEW[..], &["pp=2,dp=2,zero=1"]].concat();
    one_hash_on(&few, file.path(), &[], Some("bf16"));
    one_hash_on(&few, file.path(), &[], Some("fp16"));
}

/// Values that the backward pass recomputes have the bits of those that it stores, on any mesh.
#[test]
fn recomputed_values_are_those_that_are_stored() {
    let file = recipe_of("chargpt.lua");
    let with = |checkpoint| [&CHARGPT[..], &[("checkpoint", checkpoint)]].concat();
    for (mode, precision, shards) in [
        ("dp=2", "fp8", None),
        ("dp=4", "f32", None),
        ("tp=2", "bf16", None),
        ("dp=2,tp=2,zero=3", "f32", None),
        ("", "fp8", Some(SHARDS)),
        ("dp=4,zero=1", "bf16", Some(SHARDS)),
        ("dp=2,shard=2", "f32", Some(SHARDS)),
    ] {
        let run = |checkpoint| train(mode, &file, &with(checkpoint), Some(precision), shards);
        let (stored, recomputed) = (run("false"), run("true"));
        assert!(stored == recomputed, "{mode} {precision}: {}", difference(&stored, &recomputed));
    }
    one_hash_on(&FEW, &file, &with("true"), Some("fp8"));
}

/// Also sums of a batch: statistics of batch norm, and with fp8 maxima.
#[test]
fn recomputed_statistics_are_those_that_are_stored() {
    let model = "nn.Linear(24, 15) }";
    let wide =
        ALL.replace("nn.Linear(4, 24)", "nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 24)");
    let stored = written(&wide);
    let recomputed = written(&wide.replace(model, &format!("{model}, {{ checkpoint = 3 }}")));
    for mode in ["", "dp=2", "dp=4", "dp=2,shard=2,zero=3"] {
        for precision in ["f32", "bf16", "fp8"] {
            for shards in [None, Some(SHARDS)] {
                let run = |file: &tempfile::NamedTempFile| train(mode, file.path(), &[], Some(precision), shards);
                let (a, b) = (run(&stored), run(&recomputed));
                assert!(a == b, "{mode} {precision} {shards:?}: {}", difference(&a, &b));
            }
        }
    }
}

/// Without strict shards the bits differ: the tests above can fail.
#[test]
fn bits_depend_on_the_mesh_without_strict_shards() {
    let file = written(ALL);
    let one = train("", file.path(), &[], None, None);
    assert!(one != train("dp=2", file.path(), &[], None, None));
    assert!(one != train("", file.path(), &[], None, Some(SHARDS)));
}

#[test]
fn what_cannot_be_strict_is_refused_with_the_cure() {
    let error = |more: &str, params: &[(&str, &str)], mode: &str| {
        let file = written(&ALL.replace("return recipe", &format!("{more}\nreturn recipe")));
        let options = MeshOptions::parse(mode).unwrap();
        let s = script_on(on_mesh(options.mesh, 1), params).unwrap();
        let recipe = s.recipe(file.path()).unwrap_or_else(|e| panic!("{e}"));
        match recipe.start(None, None, None) {
            Ok(_) => format!("{:?} shards", s.runtime.host().engine.borrow().strict_shards()),
            Err(e) => e.to_string(),
        }
    };
    for (more, params, mode, message) in [
        ("recipe.strict_shards = 6", &[][..], "", "6 is no power of two"),
        ("recipe.strict_shards = 8", &[], "dp=3", "3 devices along dp and shard do not divide 8 shards"),
        ("recipe.strict_shards = 2", &[], "dp=4", "4 devices along dp and shard do not divide 2 shards"),
        ("recipe.strict_shards = 2", &[], "pp=2,dp=4", "4 devices along dp and shard do not divide 2 shards"),
        ("recipe.strict_shards = 8", &[], "dp=2,tp=2", "tp=2 splits sums in a way that depends on the mesh"),
        ("recipe.strict_shards = 8", &[("batch", "12")], "", "8 shards do not divide a batch of 12 samples"),
        ("recipe.strict_shards = \"many\"", &[], "", "strict_shards"),
        ("recipe.strict_shard = 8", &[], "", "strict_shards"),
    ] {
        let e = error(more, params, mode);
        assert!(e.contains(message), "{more} {mode}: {e}");
    }
    assert_eq!(error("recipe.strict_shards = 8", &[], "dp=2"), "Some(8) shards");
}
