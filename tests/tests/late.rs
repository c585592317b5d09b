//! Tests results that are read late and inputs that arrive during a step: values are correct, and on a GPU the host does not
//! wait for the step. On the CPU, or on the device that `PERILUNE_DEVICE` names.
#![allow(clippy::unwrap_used)]

use perilune_tests::harness;
use perilune_tests::scripts::script;

fn run(text: &str) -> String {
    let s = script(2, &[]).unwrap();
    s.runtime.load_text(text, "@late.lua").unwrap_or_else(|e| panic!("{e}"));
    s.output()
}

/// Compares losses, gradient norms and States of a run that reads each immediately with runs that read results up to five
/// steps later, while States change, inputs arrive from the host and results are dropped.
#[test]
fn values_do_not_depend_on_when_they_are_read() {
    let text = r#"
local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local function losses(late)
  pl.seed(3)
  local net = nn.Sequential { nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 96) }
  local opt = optim.AdamW(net, { lr = 1e-2 })
  local out, waiting = {}, {}
  for k = 1, 60 do
    local rows = {}
    for i = 1, 64 do
      local row = {}
      for j = 1, 96 do row[j] = ((k * 31 + i * 7 + j * j) % 97) / 97 end
      rows[i] = row
    end
    local x = pl.tensor(rows)   -- 24 KiB, which pass through pinned memory
    for i = 1, 64 do rows[i] = nil end
    local loss, norm, first = pl.step(function()
      local y = net(x)
      local loss = ((y - x) * (y - x)):mean()
      loss:backward()
      local norm = (net[1].weight.grad * net[1].weight.grad):sum()
      opt:step()
      return loss, norm, net[1].weight[0] * 1
    end)
    waiting[#waiting + 1] = { loss, norm, first }
    -- Sometimes the current value of a State, after unfinished steps.
    if k % 7 == 0 then out[#out + 1] = "state " .. table.concat(net[3].bias:tolist(), " ") end
    while #waiting > late do
      local t = table.remove(waiting, k % 2 == 0 and #waiting > 1 and 2 or 1)
      out[#out + 1] = ("%s %s %s"):format(t[1]:item(), t[2]:item(), table.concat(t[3]:tolist(), " "))
    end
  end
  for _, t in ipairs(waiting) do
    out[#out + 1] = ("%s %s %s"):format(t[1]:item(), t[2]:item(), table.concat(t[3]:tolist(), " "))
  end
  table.sort(out)
  return table.concat(out, "\n")
end
local once = losses(0)
assert(#once > 10000)
for _, late in ipairs { 1, 2, 5 } do assert(losses(late) == once, "read " .. late .. " steps late: other values") end
"#;
    run(text);
}

/// A training loop reads the loss of the previous step and uploads the next batch while a step runs.
#[test]
fn a_read_does_not_wait_for_later_work() {
    let gpu = harness::on_gpu();
    let (width, products) = if gpu { (2048, 400) } else { (64, 4) };
    let text = r#"
local pl = require "perilune"
local w = pl.state(pl.randn { WIDTH, WIDTH } * 0.01)
local numbers = {}
for i = 1, 40000 do numbers[i] = i end
local function light() return pl.step(function() return (w * w):sum() end) end
local function heavy()
  return pl.step(function()
    local x = w
    for _ = 1, PRODUCTS do x = x:matmul(w) end
    return x:sum()
  end)
end
local host = pl.clock()
pl.tensor(numbers)[39999]:item()
for _ = 1, 4 do light():item(); heavy():item(); pl.tensor(numbers)[39999]:item() end
host = pl.clock()
pl.tensor(numbers)
host = pl.clock() - host
local before = light()
local start = pl.clock()
local after = heavy()
local queued = pl.clock() - start
before:item()
local read = pl.clock() - start
local x = pl.tensor(numbers)   -- 160 kB
local sent = pl.clock() - start
after:item()
local done = pl.clock() - start
assert(x[39999]:item() == 40000)
print(("queued after %.2f ms, read after %.2f, an input sent after %.2f, done after %.2f; making the input takes %.2f"):format(
  queued * 1e3, read * 1e3, sent * 1e3, done * 1e3, host * 1e3))
print(read < done / 2, sent - 2 * host < done / 2)
"#;
    let out = run(&text.replace("WIDTH", &width.to_string()).replace("PRODUCTS", &products.to_string()));
    println!("{out}");
    assert!(!gpu || out.ends_with("true\ttrue\n"), "{out}");
}
