-- A recipe's model with their weights against what transformers or torchvision says: see make.py, and tests/tests/models.rs, which
-- runs this in the folder of the recipes, with `local name = ...` before it.

local pl = require "perilune"
local recipe = require(name)
local want = pl.load("golden/models/" .. name .. "_want.safetensors")
local TOLERANCE = 1e-4 -- of the norm

local function norm(x) return (x * x):sum():sqrt() end

local checked = 0
local function near(what, got, expected)
  checked = checked + 1
  assert(table.concat(got.shape, ",") == table.concat(expected.shape, ","), what .. " has another shape")
  local off, size = norm(got - expected):item(), norm(expected):item()
  if not (off <= TOLERANCE * size) then error(("%s is off by %.3g of %.3g"):format(what, off, size)) end
end

local model = recipe.model(recipe.params)
if want.eval then near("logits in evaluation", model:eval()(want.x), want.eval) end
model:train()
local logits_BTV = model(want.x)
near("logits", logits_BTV:narrow(-1, 0, want.logits:size(-1)), want.logits)
local loss = recipe.loss(model, { x = want.x, y = want.y })
near("loss", loss, want.loss)
loss:backward()
pl.eval(loss)
for _, entry in ipairs(model:parameters()) do
  local g = assert(entry.state.grad, entry.path .. " has no gradient")
  near("the gradient of " .. entry.path, g, want["grad/" .. entry.path])
end
if want.running_var then near("the running variance", model.layer2[2].bn2.running_var, want.running_var) end
if want.rates then
  local scaling = { factor = 32, low = 1, high = 4, original = 8192 }
  near("the rates of the rotary positions", pl.nn.rope_rates(16, { base = 500000.0, scaling = scaling }), want.rates)
end
print("compared", checked)
