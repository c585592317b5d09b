//! Tests that an index out of range in a training step changes no State, although a GPU reports it after later steps were
//! queued. On the CPU, or on the device that `PERILUNE_DEVICE` names.
#![allow(clippy::unwrap_used)]

use perilune_core::{HostTensor, Shape};
use perilune_engine::Engine;
use perilune_tests::harness::{self, call, t};
use perilune_tests::scripts::script;

/// A classifier with a lookup, running statistics and an optimizer; `OPT`, `LOSS` and `BAD` are replaced. `BAD` is the batch of the
/// step that fails.
const TRAINING: &str = r#"
local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
pl.seed(5)
local words, norm, out = nn.Embedding(7, 12), nn.BatchNorm1d(12), nn.Linear(12, 4)
local model = nn.Sequential { words, norm, nn.ReLU(), out }
local opt = OPT
local seen = pl.state(pl.zeros { 12 })
local good = { ids = pl.tensor { 0, 3, 6, 2, 2 }, classes = pl.tensor { 0, 1, 2, 3, 3 } }
local bad = BAD
local function step(batch)
  return pl.step(function()
    seen:assign(seen + 1)          -- a State written before any lookup
    local x = words(batch.ids)
    local y = out(norm(x):relu())
    local loss = pl.cross_entropy(y, batch.classes)
    loss:backward()
    opt:step()
    return loss
  end)
end
local function states()
  local all = { table.concat(seen:tolist(), " ") }
  for _, s in ipairs { words.weight, norm.weight, norm.bias, norm.running_mean, norm.running_var, out.weight, out.bias } do
    all[#all + 1] = table.concat(s:flatten():tolist(), " ")
  end
  return table.concat(all, "\n")
end
for _ = 1, 6 do step(good):item() end   -- later steps are replayed on a GPU
local before = states()
local results, late = {}, nil
local ok, e = pcall(function()
  results[1] = step(bad)
  for k = 2, 5 do results[k] = step(good) end
  late = pl.state(pl.ones { 3 })         -- a State whose first value is written behind the bad index
  pl.step(function() late:assign(late * 2) end)
  results[1]:item()
end)
assert(not ok, "the bad index was accepted")
assert(tostring(e):find("faults.lua:LINE", 1, true), tostring(e))
assert(states() == before, "a State was written")
for k = 2, 5 do
  if results[k] then
    local fine, said = pcall(function() return results[k]:item() end)
    assert(not fine and tostring(said):find("computed by a step with an index out of range", 1, true), tostring(said))
    local used = pcall(function() return (results[k] + 1):item() end)
    assert(not used, "a spoilt value was used")
  end
end
if late then
  -- Refused, or as it was made if the error was noticed before its step.
  local fine, value = pcall(function() return table.concat(late:tolist(), " ") end)
  assert(fine and value == "1.0 1.0 1.0" or not fine and tostring(value):find("create the State again", 1, true), tostring(value))
  late = pl.state(pl.ones { 3 })
  assert(late:tolist()[3] == 1)
end
for _ = 1, 6 do step(good):item() end
print(states())
"#;

/// The States at the end of a run whose step 7 fails.
fn run(opt: &str, bad: &str, line: usize) -> String {
    let text = TRAINING.replace("OPT", opt).replace("BAD", bad).replace("LINE", &line.to_string());
    let s = script(2, &[]).unwrap();
    s.runtime.load_text(&text, "@faults.lua").unwrap_or_else(|e| panic!("{bad} with {opt}: {e}"));
    s.output()
}

/// The States after as many good steps alone.
fn without(opt: &str) -> String {
    let from = TRAINING.find("local results").unwrap();
    let to = TRAINING.rfind("for _ = 1, 6").unwrap();
    let text = [&TRAINING[..from], &TRAINING[to..]].concat().replace("OPT", opt).replace("BAD", "nil");
    let s = script(2, &[]).unwrap();
    s.runtime.load_text(&text, "@good.lua").unwrap_or_else(|e| panic!("{opt}: {e}"));
    s.output()
}

const BAD: [(&str, usize); 3] = [
    ("{ ids = pl.tensor { 0, 3, 7, 2, 2 }, classes = good.classes }", 14),
    ("{ ids = pl.tensor { 0, 3, -1, 2, 1 << 40 }, classes = good.classes }", 14),
    ("{ ids = good.ids, classes = pl.tensor { 0, 1, 4, 3, 3 } }", 16),
];

#[test]
fn a_bad_index_changes_no_state_and_training_goes_on() {
    let opt = "optim.SGD(model, { lr = 0.1, momentum = 0.9 })";
    let want = without(opt);
    for (bad, line) in BAD {
        assert_eq!(run(opt, bad, line), want, "{bad}");
    }
}

#[test]
fn a_bad_index_reaches_no_state_of_adamw() {
    for (bad, line) in BAD {
        assert!(run("optim.AdamW(model, { lr = 0.1, clip_norm = 1 })", bad, line).len() > 100);
    }
}

/// On a GPU the bad index of the last step has not been reported when the snapshot is asked for.
#[test]
fn snapshot_is_refused_after_a_bad_index() {
    let mut e = harness::engine(1);
    let table = e.from_host(HostTensor::from_f32(Shape::of(&[2, 2]), &[1.0, 2.0, 3.0, 4.0]));
    let zeros = e.from_host(HostTensor::from_f32(Shape::of(&[1, 2]), &[0.0; 2]));
    let (table, sum) = (e.new_state(table, false).unwrap(), e.new_state(zeros, false).unwrap());
    e.end_implicit_step().unwrap();
    let step = |e: &mut Engine, index: i64| {
        let index = e.from_host(HostTensor::from_i64(Shape::of(&[1]), &[index]));
        let (rows, old) = (e.state_node(table)?, e.state_node(sum)?);
        let row = call(e, "embedding", &[t(rows), t(index)], &[]).unwrap();
        let new = call(e, "add", &[t(old), t(row)], &[]).unwrap();
        e.assign(sum, new)?;
        e.end_implicit_step()
    };
    for _ in 0..6 {
        step(&mut e, 1).unwrap();
    }
    let kept = e.read_state(sum).unwrap();
    let said = match step(&mut e, 7) {
        Ok(()) => e.snapshot(&[sum]).map(|_| ()).unwrap_err().error.to_string(),
        Err(fault) => fault.error.to_string(),
    };
    assert!(said.contains('7'), "{said}");
    assert_eq!(e.read_state(sum).unwrap(), kept);
    e.snapshot(&[table, sum]).unwrap();
}
