//! Tests that long runs of changing shapes, with errors and with memory exhausted, leak nothing.
//!
//! Short on the CPU by default. `PERILUNE_ENDURANCE=10000` sets the number of steps, `PERILUNE_DEVICE=cuda:0` the device.
#![allow(clippy::unwrap_used)]

use perilune_cpu::Cpu;
use perilune_lua::{Runtime, RuntimeOptions};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// The memory limit of the CPU.
const LIMIT: usize = 1 << 30;

const SCRIPT: &str = r#"
local pl = require "perilune"
local nn, optim, data = pl.nn, pl.optim, pl.data
pl.seed(7)
local width, vocab, batch = 16, 50, 4
local net = nn.Sequential { nn.Embedding(vocab, width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, vocab) }
local opt = optim.AdamW(net, { lr = 1e-3 })

-- Lengths from 1 to 512, most of them short, from a generator of our own: the same on every device.
local seed = 12345
local function random(n)
  seed = (seed * 1103515245 + 12345) % 2147483648
  return seed // 65536 % n
end
local function sequences()
  local out = {}
  for i = 1, batch do
    local row = {}
    for k = 1, 1 + random(1 + random(512)) do row[k] = random(vocab) end
    out[i] = row
  end
  return out
end

local shapes = {}
local function step()
  return pl.step(function()
    local x, lengths = data.pad(sequences(), { from = 32, to = 512 })
    shapes[x:size(1)] = true
    local real = pl.arange(x:size(1)):unsqueeze(0):lt(lengths:unsqueeze(1))
    local y = pl.where(real, x, -100)
    local loss = pl.cross_entropy(net(x):flatten(0, 1), y:flatten())
    loss:backward()
    opt:step()
    return loss
  end)
end

---A mistake of each kind, in the middle of a step.
local function mistake(k)
  local ok, e = pcall(pl.step, function()
    local x = pl.tensor(sequences()[1])
    net(x:unsqueeze(0)):sum():backward()
    if k % 4 == 0 then return net(pl.zeros { 2, 2 }):matmul(pl.zeros { 3, 3 }) end
    if k % 4 == 1 then error "deliberate" end
    if k % 4 == 2 then return pl.cross_entropy(pl.zeros { 2, 3 }, pl.tensor { 0, 7 }):item() end
    return x.no_such_field()
  end)
  assert(not ok, "mistake " .. k .. " went through")
end

-- More than the device has, in one buffer; the step before it has made something.
local function exhaust()
  local ok, e = pcall(pl.step, function()
    local held = pl.randn { 1000 } * 2
    return held:sum() + (pl.ones { 1 << 20, 1 << 18 } * held:mean() ):relu():cumsum(0):sum()
  end)
  assert(not ok and tostring(e):find "out of memory", tostring(e))
end

-- A step that runs out of memory collects what was dropped.
local function used() exhaust() return pl.memory().allocated, pl.stats().held_bytes end

local loss
local warm = math.max(steps // 5, 60)
for _ = 1, warm do loss = step() end
-- All lengths have come once.
for length = 1, 512 do
  if not shapes[data.bucket(length, { from = 32, to = 512 })] then
    local row = {}
    for k = 1, length do row[k] = 1 end
    local keep = sequences
    sequences = function() return { row, row, row, row } end
    loss = step()
    sequences = keep
  end
end
local first = loss:item()
loss = nil
local allocated, held = used()
local plans = pl.stats().plans
local mistakes, events = 0, 0
for k = 1, steps - warm do
  loss = step()
  if k * mistakes_wanted // (steps - warm) > mistakes then mistakes = mistakes + 1; mistake(mistakes) end
  if k * events_wanted // (steps - warm) > events then events = events + 1; exhaust() end
end
local last = loss:item()
loss = nil
local after, held_after = used()
local kinds = 0
for _ in pairs(shapes) do kinds = kinds + 1 end
print(("%d steps, %d mistakes, %d times out of memory: loss %.3f to %.3f, %d lengths, %d plans, %d then %d bytes"):format(
  steps, mistakes, events, first, last, kinds, plans, allocated, after))
assert(kinds <= 12 and plans <= 12, ("%d lengths, %d plans"):format(kinds, plans))
assert(last < first, "it does not learn")
assert(mistakes == mistakes_wanted and events == events_wanted)
assert(held_after <= held + 4096, ("%d bytes held, then %d"):format(held, held_after))
-- The arena is as large as the largest plan needs, and no larger for having run often.
assert(after <= allocated + (1 << 20), ("%d bytes allocated, then %d"):format(allocated, after))
"#;

#[test]
fn random_lengths_mistakes_and_exhaustion_leave_nothing_behind() {
    let steps: usize = std::env::var("PERILUNE_ENDURANCE").ok().map_or(300, |n| n.parse().unwrap());
    let (mistakes, events) = if steps >= 10_000 { (100, 20) } else { (20, 5) };
    let resident = || {
        let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
        text.split_whitespace().nth(1).and_then(|n| n.parse::<usize>().ok()).unwrap_or(0) * 4096
    };
    let gpu = std::env::var_os("PERILUNE_DEVICE").is_some();
    let printed: Rc<RefCell<String>> = Rc::default();
    let sink = printed.clone();
    let runtime = Runtime::new(RuntimeOptions {
        backend: if gpu { perilune_tests::harness::device(2) } else { Arc::new(Cpu::limited(Some(2), Some(LIMIT))) },
        params: Vec::new(),
        strict: true,
        print: Rc::new(move |line| sink.borrow_mut().push_str(&format!("{line}\n"))),
    })
    .unwrap();
    let head = format!("local steps, mistakes_wanted, events_wanted = {steps}, {mistakes}, {events} ");
    let before = resident();
    let run = runtime.load_text(&format!("{head}{SCRIPT}"), "@endurance.lua");
    let grown = resident().saturating_sub(before);
    println!("{}{} MiB of the host's memory", printed.borrow(), grown >> 20);
    run.unwrap_or_else(|e| panic!("{e}"));
    // NVIDIA's libraries need more.
    assert!(grown < if gpu { 4 << 30 } else { 1 << 30 }, "the process grew by {} MiB", grown >> 20);
}
