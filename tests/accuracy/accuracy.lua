-- tests/accuracy/accuracy.lua: computes the cases of inputs.safetensors with Perilune's ops, with gradients. accuracy.py runs it.
--
-- The name of a case has parts: the op, options as "key:number", shapes, dtype. The name of a tensor follows.

local pl = require "perilune"

local cases, order = {}, {}
for key, x in pairs(pl.load "inputs.safetensors") do
  local name, tensor = key:match "^(.*)/(%w+)$"
  if not cases[name] then
    cases[name] = {}
    order[#order + 1] = name
  end
  cases[name][tensor] = x
end
table.sort(order)

local ops = {}
function ops.attention(x, o)
  return pl.scaled_dot_product_attention(x.q, x.k, x.v, {
    is_causal = o.causal == 1 or o.window ~= nil, window = o.window, enable_gqa = o.gqa == 1, documents = x.documents,
  }), { "q", "k", "v" }
end
function ops.layer_norm(x) return pl.layer_norm(x.x, x.weight, x.bias), { "x", "weight", "bias" } end
function ops.rms_norm(x) return pl.rms_norm(x.x, x.weight, { eps = 1e-6 }), { "x", "weight" } end
function ops.softmax(x) return x.x:softmax(-1), { "x" } end
function ops.log_softmax(x) return x.x:log_softmax(-1), { "x" } end
function ops.cross_entropy(x, o) return pl.cross_entropy(x.x, x.target, { label_smoothing = o.smoothing }), { "x" } end
function ops.gelu(x, o) return x.x:gelu { approximate = o.tanh == 1 and "tanh" or "none" }, { "x" } end

local function solve(name)
  local x, options = cases[name], {}
  for key, number in name:gmatch "/(%w+):([%d%.]+)" do options[key] = tonumber(number) end
  local run = function() return ops[name:match "^[%w_]+"](x, options) end
  local y, wanted
  if name:match "/tf32/%d+$" then y, wanted = pl.autocast("tf32", run) else y, wanted = run() end
  local from = {}
  for i, k in ipairs(wanted) do from[i] = x[k] end
  -- The gradient of (y * grad):sum() for y is grad, to the bit.
  return y, wanted, { pl.grad(x.grad and (y * x.grad):sum() or y, from) }
end

-- One step for each op and dtype, so that missing GPU kernels are compiled on all cores in parallel.
local groups, kinds = {}, {}
for _, name in ipairs(order) do
  local kind = name:match "^[%w_]+" .. name:match "/(%w+)/%d+$"
  if not groups[kind] then
    groups[kind] = {}
    kinds[#kinds + 1] = kind
  end
  table.insert(groups[kind], name)
end

local out = {}
for _, kind in ipairs(kinds) do
  local keys = {}
  local results = { pl.step(function()
    local all = {}
    for _, name in ipairs(groups[kind]) do
      local y, wanted, grads = solve(name)
      keys[#keys + 1], all[#all + 1] = name .. "/y", y
      for i, k in ipairs(wanted) do keys[#keys + 1], all[#all + 1] = name .. "/d" .. k, grads[i] end
    end
    return table.unpack(all)
  end) }
  for i, key in ipairs(keys) do out[key] = results[i] end
end
pl.save("outputs.safetensors", out)
