//! Plants differences between two processes and checks that both stop before a collective starts, with the recipe lines of both.
//!
//! The processes are threads, each with its own runtime, backend and TCP links; the first one trains the recipe as it is, the second
//! one a changed text. `perilune run` gives all processes one text, so these are the differences that data, time or a fault of the
//! program could make.
#![allow(clippy::unwrap_used)]

use perilune_core::Mesh;
use perilune_cpu::Cpu;
use perilune_dist::links::Options;
use perilune_dist::rendezvous::{Address, Source};
use perilune_dist::{Links, MeshBackend, Place};
use perilune_lua::{Failed, Loaded};
use perilune_plan::Backend;
use perilune_tests::scripts::script_on;
use std::sync::Arc;
use std::time::{Duration, Instant};

const STEPS: usize = 6;

/// Lines are numbered by the table below.
const RECIPE: &str = r#"local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local recipe = pl.recipe { name = "pair", params = { lr = 0.1, steps = 9, seed = 3 } }
function recipe.data(p)
  local x = pl.randn { 64, 4 }
  local set = pl.data.tensors { x = x, y = x:sum(1) }
  return { train = set:split("train", 0.75, p.seed):shuffle(p.seed):batch(8), valid = set:split("valid", 0.25, p.seed):batch(8) }
end
function recipe.model(p)
  return nn.Sequential { nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 1) }
end
function recipe.optimizer(p, model) return optim.SGD(model, { lr = p.lr }) end
local step = 0
function recipe.loss(model, batch)
  step = step + 1
  local out = model(batch.x)
  local error = out:squeeze(-1) - batch.y
  local loss = (error * error):mean()
  return loss
end
return recipe
"#;

/// A planted difference: its name, what is replaced in the text of the second process, and texts of its error.
struct Planted {
    name: &'static str,
    from: &'static str,
    to: &'static str,
    says: &'static [&'static str],
}

const fn planted(name: &'static str, from: &'static str, to: &'static str, says: &'static [&'static str]) -> Planted {
    Planted { name, from, to, says }
}

/// What every difference of a plan says: the lines of both sides.
const LINES: &[&str] = &["do not agree on what they compute next", "rank 0: ", "rank 1: ", "recipe.lua:"];
const LOSS: &[&str] = &["do not agree on what they compute next", "rank 0: recipe.lua:18:", "rank 1: recipe.lua:18:"];

/// A process that repeats its last plan compares nothing; the other one is found to wait for it.
const BRANCH: &[&str] =
    &["waits for all processes to agree on what they compute next (recipe.lua:", "runs a step at recipe.lua:"];

const PLANTED: [Planted; 27] = [
    planted("another reduction", ":mean()", ":sum()", LOSS),
    planted("another op", "(error * error)", "error:abs()", LOSS),
    planted("an op more", "(error * error)", "(error * error):exp()", LOSS),
    planted("an op less", "(error * error)", "error", LOSS),
    planted("another number", "(error * error)", "(error * error * 2)", LINES),
    planted("a number of the step", "(error * error)", "(error * error * step)", LINES),
    planted("another axis", "out:squeeze(-1) - batch.y", "(out:squeeze(-1) - batch.y):unsqueeze(0):sum(0)", LINES),
    planted("operands in another order", "out:squeeze(-1) - batch.y", "batch.y - out:squeeze(-1)", LINES),
    planted("another dtype", "local out = model(batch.x)", "local out = model(batch.x):to('f64')", LINES),
    planted(
        "a wider layer",
        "nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 1)",
        "nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)",
        LINES,
    ),
    planted("a layer more", "nn.GELU(),", "nn.GELU(), nn.Linear(6, 6),", LINES),
    planted("another activation", "nn.GELU()", "nn.ReLU()", LINES),
    planted("no bias", "nn.Linear(6, 1)", "nn.Linear(6, 1, { bias = false })", LINES),
    planted("dropout", "nn.GELU()", "nn.Dropout(0.5)", LINES),
    planted("normalisation", "nn.GELU()", "nn.LayerNorm(6)", LINES),
    planted("synchronised statistics", "nn.GELU()", "nn.BatchNorm1d(6)", LINES),
    planted("another batch", ":shuffle(p.seed):batch(8)", ":shuffle(p.seed):batch(16)", LINES),
    planted("more data", "pl.randn { 64, 4 }", "pl.randn { 65, 4 }", LINES),
    planted("another seed", "seed = 3", "seed = 4", LINES),
    planted("another optimizer", "optim.SGD(model, { lr = p.lr })", "optim.AdamW(model, { lr = p.lr })", LINES),
    planted("clipping", "{ lr = p.lr })", "{ lr = p.lr, clip_norm = 1 })", LINES),
    planted("momentum", "{ lr = p.lr })", "{ lr = p.lr, momentum = 0.9 })", LINES),
    planted("another learning rate", "{ lr = p.lr })", "{ lr = p.lr * 2 })", LINES),
    planted("micro-batches", "return recipe\n", "recipe.accumulate = 2\nreturn recipe\n", LINES),
    planted(
        "an average of the weights",
        "return recipe\n",
        "recipe.ema = 0.9\nreturn recipe\n",
        &["what they compute next", "rank 0: the end of the recording", "rank 1: detach"],
    ),
    planted("a host read", "  return loss", "  if step == 3 then loss:item() end\n  return loss", BRANCH),
    planted(
        "another branch later",
        "local loss = (error * error):mean()",
        "local loss = step < 4 and (error * error):mean() or (error * error):sum()",
        BRANCH,
    ),
];

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn place(rank: usize, port: u16) -> Place {
    let address = Some(Address { host: "127.0.0.1".into(), port });
    let (processes, local_processes) = (2, 2);
    Place { rank, processes, local_rank: rank, local_processes, address, source: Source::Torchrun, ..Place::alone() }
}

/// Trains a text as one process. Returns the first error.
fn process(rank: usize, port: u16, text: &str, steps: usize) -> (Result<(), String>, Instant) {
    let options = Options { join: Duration::from_secs(60), ..Options::default() };
    let links = Arc::new(Links::join(&place(rank, port), &[], options).unwrap());
    let mesh = Mesh::parse("dp=2").unwrap();
    let open = |_| Ok(Arc::new(Cpu::new(Some(1))) as Arc<dyn Backend>);
    let backend = Arc::new(MeshBackend::among(mesh, &links, open).unwrap());
    let train = || -> Result<(), Failed> {
        let s = script_on(backend, &[])?;
        let Loaded::Recipe(recipe) = s.runtime.load_text(text, "@recipe.lua")? else { panic!("no recipe") };
        let run = recipe.start(None, None, None)?;
        for _ in 0..steps {
            run.read(&run.step()?)?;
        }
        Ok(())
    };
    let result = train().map_err(|e| e.to_string());
    let ended = Instant::now();
    let result = match result {
        Ok(()) => links.finish().map_err(|e| e.to_string()),
        Err(text) => {
            let cause = links.abort(3, &text);
            Err(if cause.rank == rank { text } else { links.message(&cause) })
        }
    };
    (result, ended)
}

fn pair(texts: [&str; 2], steps: [usize; 2]) -> [(Result<(), String>, Instant); 2] {
    let port = free_port();
    std::thread::scope(|scope| {
        let of = |rank: usize| scope.spawn(move || process(rank, port, texts[rank], steps[rank]));
        [0, 1].map(of).map(|thread| thread.join().unwrap())
    })
}

#[test]
fn equal_processes_train() {
    for (result, _) in pair([RECIPE; 2], [STEPS; 2]) {
        result.unwrap();
    }
}

#[test]
fn planted_differences_stop_both_processes_with_the_lines_of_both() {
    let mut wrong = Vec::new();
    for p in &PLANTED {
        let changed = RECIPE.replacen(p.from, p.to, 1);
        assert_ne!(changed, RECIPE, "{}", p.name);
        let results = pair([RECIPE, &changed], [STEPS; 2]);
        let apart = results[0].1.max(results[1].1) - results[0].1.min(results[1].1);
        for (rank, (result, _)) in results.iter().enumerate() {
            match result {
                Ok(()) => wrong.push(format!("{}: rank {rank} has trained", p.name)),
                Err(text) => {
                    let missing: Vec<_> = p.says.iter().filter(|says| !anonymous(text).contains(**says)).collect();
                    if !missing.is_empty() {
                        wrong.push(format!("{}: rank {rank} does not say {missing:?}: {text}", p.name));
                    }
                }
            }
        }
        if apart > Duration::from_secs(2) {
            wrong.push(format!("{}: the second process stops {apart:?} after the first", p.name));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_process_that_ends_early_is_named() {
    let results = pair([RECIPE; 2], [STEPS, STEPS - 2]);
    let text = anonymous(results[0].0.as_ref().unwrap_err());
    assert!(text.contains("rank 1 has finished, but the other processes still wait for it"), "{text}");
}

/// Without the host's name, which differs among machines.
fn anonymous(text: &str) -> String {
    let mut out = text.to_string();
    while let Some(at) = out.find(" (host ") {
        let end = at + out[at..].find(')').unwrap() + 1;
        out.replace_range(at..end, "");
    }
    out
}
