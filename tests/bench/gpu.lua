-- tests/bench/gpu.lua: our side of tests/bench/gpu.py: times one case and prints the median microseconds of a run
--
-- Sizes are those of the rival's table in gpu.py; the two must say the same. Runs are queued in rounds and each round ends
-- with a read, so that the host runs ahead within a round, as it does in training.

local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local p = pl.params { case = "softmax", seconds = 1.0, round = 20 }

local cases = {}

local function free(...)
  for i = 1, select("#", ...) do select(i, ...):free() end
end

-- A case returns a function that queues the work once and gives a tensor that a read of waits for it.
local function once(fn)
  return function(last)
    local out = { pl.step(fn) }
    if last then return out[1] end
    free(table.unpack(out))
  end
end

local function bf16(shape) return pl.eval(pl.randn(shape):to("bf16")) end

function cases.chain()
  local x, y = bf16 { 64 << 20 }, bf16 { 64 << 20 }
  return once(function() return (((x * 1.5 + y) * x - 0.5):relu() * y + x) * 0.25 - y end)
end

function cases.gelu()
  local x = bf16 { 65536, 4096 }
  return once(function() return x:gelu({ approximate = "tanh" }) end)
end

function cases.softmax()
  local x = bf16 { 65536, 4096 }
  return once(function() return x:softmax(-1) end)
end

function cases.layer_norm()
  local x, w, b = bf16 { 65536, 4096 }, bf16 { 4096 }, bf16 { 4096 }
  return once(function() return pl.layer_norm(x, w, b) end)
end

function cases.rms_norm()
  local x, w = bf16 { 65536, 4096 }, bf16 { 4096 }
  return once(function() return pl.rms_norm(x, w) end)
end

function cases.layer_norm_grad()
  local x, w, b, g = bf16 { 65536, 4096 }, bf16 { 4096 }, bf16 { 4096 }, bf16 { 65536, 4096 }
  return once(function() return pl.grad((pl.layer_norm(x, w, b) * g):sum(), { x, w, b }) end)
end

function cases.cross_entropy()
  local x, t = bf16 { 32768, 50304 }, pl.eval(pl.randint(0, 50304, { 32768 }))
  return once(function()
    local loss = pl.cross_entropy(x, t)
    return loss, pl.grad(loss, { x })
  end)
end

function cases.sum()
  local x = bf16 { 256 << 20 }
  return once(function() return x:sum() end)
end

function cases.adamw()
  local w, g = {}, {}
  for i = 1, 96 do
    w[i], g[i] = pl.state(pl.randn { 2048, 2048 }), pl.eval(pl.randn { 2048, 2048 })
  end
  local opt = optim.AdamW(w, { lr = 1e-3, weight_decay = 0.1 })
  return once(function()
    for i = 1, #w do w[i].grad = g[i] end
    opt:step()
    return pl.zeros { 1 } + 1
  end)
end

local function matmul(m, k, n, dtype)
  return function()
    local a, b = pl.eval(pl.randn({ m, k }):to(dtype), pl.randn({ k, n }):to(dtype))
    return once(function() return a:matmul(b) end)
  end
end
cases.matmul_8192 = matmul(8192, 8192, 8192, "bf16")
cases.matmul_gpt2_up = matmul(65536, 768, 3072, "bf16")
cases.matmul_f32_4096 = matmul(4096, 4096, 4096, "f32")

local function attention(b, h, t, d, grad)
  return function()
    local q, k, v, g = bf16 { b, h, t, d }, bf16 { b, h, t, d }, bf16 { b, h, t, d }, bf16 { b, h, t, d }
    return once(function()
      local y = pl.scaled_dot_product_attention(q, k, v, { is_causal = true })
      if not grad then return y end
      return pl.grad((y * g):sum(), { q, k, v })
    end)
  end
end
cases.attention_d64_1k, cases.attention_d64_1k_grad = attention(16, 32, 1024, 64), attention(16, 32, 1024, 64, true)
cases.attention_d64_4k, cases.attention_d64_4k_grad = attention(4, 32, 4096, 64), attention(4, 32, 4096, 64, true)
cases.attention_d128_4k, cases.attention_d128_4k_grad = attention(4, 16, 4096, 128), attention(4, 16, 4096, 128, true)

function cases.mlp()
  local layers = {}
  for i = 1, 8 do layers[#layers + 1] = nn.Linear(64, 64); layers[#layers + 1] = nn.ReLU() end
  local model = nn.Sequential(layers)
  local opt = optim.AdamW(model, { lr = 1e-3 })
  local x, y = pl.eval(pl.randn { 32, 64 }, pl.randn { 32, 64 })
  return once(function()
    local loss = pl.mse_loss(model(x), y)
    loss:backward()
    opt:step()
    return loss
  end)
end

local function gpt2(batch)
  return function()
    local layers, heads, C, V, T = 12, 12, 768, 50304, 1024
    local m = { wte = nn.Embedding(V, C, { std = 0.02 }), wpe = nn.Embedding(T, C, { std = 0.02 }), blocks = {}, norm = nn.LayerNorm(C) }
    for i = 1, layers do m.blocks[i] = nn.TransformerBlock(C, heads, { causal = true, approximate = "tanh" }) end
    function m:forward(ids)
      local x = self.wte(ids) + self.wpe(pl.arange(T))
      for _, block in ipairs(self.blocks) do x = block(x) end
      return pl.linear(self.norm(x), self.wte.weight)
    end
    local model = nn.module(m)
    local opt = optim.AdamW(model, { lr = 1e-4, weight_decay = 0.1, clip_norm = 1.0 })
    local x, y = pl.eval(pl.randint(0, 50257, { batch, T }), pl.randint(0, 50257, { batch * T }))
    return once(function()
      local loss = pl.autocast("bf16", function() return pl.cross_entropy(model(x):flatten(0, 1), y) end)
      loss:backward()
      opt:step()
      return loss
    end)
  end
end
cases.gpt2_b4, cases.gpt2_b32 = gpt2(4), gpt2(32)

local make = cases[p.case]
if not make then
  local names = {}
  for name in pairs(cases) do names[#names + 1] = name end
  table.sort(names)
  pl.error("bench", "there is no case '" .. p.case .. "'", "one of " .. table.concat(names, ", "))
end
local work = make()
local function wait(x) pl.step(function() return x:flatten():narrow(0, 0, 1):to("f32") end):item() end
local first = pl.clock()
wait(work(true))
first = pl.clock() - first
for _ = 1, 3 do wait(work(true)) end
local times, start = {}, pl.clock()
local n = p.round
while pl.clock() - start < p.seconds or #times < 3 do
  local before = pl.clock()
  for _ = 2, n do work() end
  wait(work(true))
  times[#times + 1] = (pl.clock() - before) * 1e6 / n
  if times[1] > 5e4 then n = 3 end
end
table.sort(times)
print(("%.3f %.3f"):format(times[(#times + 1) // 2], first))
