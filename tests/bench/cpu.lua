-- tests/bench/cpu.lua: defines the cases of `perilune bench --device cpu` for Perilune
--
-- Sizes must equal those of rival_cpu.py.

local pl = require "perilune"
local harness = require "harness"
local nn, optim = pl.nn, pl.optim
local cases, known, order = harness.cases()
local once = harness.once

function cases.chain()
  local x, y = pl.eval(pl.randn { 4 * 1024 * 1024 }, pl.randn { 4 * 1024 * 1024 })
  return once(function() return (((x * 1.5 + y) * x - 0.5):relu() * y + x) * 0.25 - y end)
end

function cases.chain_small()
  local x, y = pl.eval(pl.randn { 65536 }, pl.randn { 65536 })
  return once(function() return (((x * 1.5 + y) * x - 0.5):relu() * y + x) * 0.25 - y end)
end

function cases.gelu()
  local x = pl.eval(pl.randn { 1024, 4096 })
  return once(function() return x:gelu() end)
end

function cases.softmax()
  local x = pl.eval(pl.randn { 4096, 1024 })
  return once(function() return x:softmax(-1) end)
end

function cases.layer_norm()
  local x, w, b = pl.eval(pl.randn { 4096, 768 }, pl.ones { 768 }, pl.zeros { 768 })
  return once(function() return pl.layer_norm(x, w, b) end)
end

function cases.layer_norm_grad()
  local x, w, b = pl.eval(pl.randn { 4096, 768 }, pl.ones { 768 }, pl.zeros { 768 })
  local g = pl.eval(pl.randn { 4096, 768 })
  return once(function() return pl.grad((pl.layer_norm(x, w, b) * g):sum(), { x, w, b }) end)
end

function cases.cross_entropy()
  local x, t = pl.eval(pl.randn { 512, 32768 }, pl.randint(0, 32768, { 512 }))
  return once(function()
    local loss = pl.cross_entropy(x, t)
    return loss, pl.grad(loss, { x })
  end)
end

local function matmul(m, k, n)
  return function()
    local a, b = pl.eval(pl.randn { m, k }, pl.randn { k, n })
    return once(function() return a:matmul(b) end)
  end
end
cases.matmul_64 = matmul(64, 64, 64)
cases.matmul_256 = matmul(256, 256, 256)
cases.matmul_1024 = matmul(1024, 1024, 1024)
cases.matmul_768x128x512 = matmul(768, 128, 512)
cases.matmul_1x1024x1024 = matmul(1, 1024, 1024)
cases.matmul_1024x1024x1 = matmul(1024, 1024, 1)
cases.matmul_5x1024x1024 = matmul(5, 1024, 1024)

-- 2048 tokens over 8 experts; the largest group has three times as many tokens as the smallest.
function cases.grouped_matmul()
  local x, w = pl.eval(pl.randn { 2048, 512 }, pl.randn { 8, 512, 512 })
  local ends = pl.tensor { 128, 439, 640, 1024, 1298, 1463, 1810, 2048 }
  return once(function() return pl.grouped_matmul(x, w, ends) end)
end

function cases.cumsum()
  local x = pl.eval(pl.randn { 1024, 4096 })
  return once(function() return x:cumsum(-1) end)
end

function cases.sort()
  local x = pl.eval(pl.randn { 1024, 1024 })
  return once(function() return x:sort(-1) end)
end

local function attention(grad)
  return function()
    local q, k, v = pl.eval(pl.randn { 4, 8, 256, 64 }, pl.randn { 4, 8, 256, 64 }, pl.randn { 4, 8, 256, 64 })
    local g = pl.eval(pl.randn { 4, 8, 256, 64 })
    return once(function()
      local y = pl.scaled_dot_product_attention(q, k, v, { is_causal = true })
      if not grad then return y end
      return pl.grad((y * g):sum(), { q, k, v })
    end)
  end
end
cases.attention = attention(false)
cases.attention_grad = attention(true)

function cases.adamw()
  local w = {}
  for i = 1, 16 do w[i] = pl.state(pl.randn { 512, 512 }) end
  local opt = optim.AdamW(w, { lr = 1e-3, weight_decay = 0.1 })
  local g = {}
  for i = 1, 16 do g[i] = pl.eval(pl.randn { 512, 512 }) end
  return once(function()
    for i = 1, #w do w[i].grad = g[i] end
    opt:step()
    return pl.zeros { 1 } + 1
  end)
end

function cases.chargpt()
  local V, C, T, B = 65, 128, 64, 12
  local m = { tokens = nn.Embedding(V, C), positions = nn.Embedding(T, C), blocks = {}, norm = nn.LayerNorm(C, { bias = false }) }
  for i = 1, 4 do m.blocks[i] = nn.TransformerBlock(C, 4, { causal = true, bias = false }) end
  function m:forward(ids)
    local x = self.tokens(ids) + self.positions(pl.arange(T))
    for _, block in ipairs(self.blocks) do x = block(x) end
    return pl.linear(self.norm(x), self.tokens.weight)
  end
  local model = nn.module(m)
  local opt = optim.AdamW(model, { lr = 1e-3, weight_decay = 0.1, clip_norm = 1.0 })
  local x, y = pl.eval(pl.randint(0, V, { B, T }), pl.randint(0, V, { B * T }))
  return once(function()
    local loss = pl.cross_entropy(model(x):flatten(0, 1), y)
    loss:backward()
    opt:step()
    return loss
  end)
end

harness.run(known, order, 1)
