-- tests/bench/cuda.lua: defines the cases of `perilune bench --device cuda` for Perilune
--
-- Sizes must equal those of rival_cuda.py.

local pl = require "perilune"
local harness = require "harness"
local nn, optim = pl.nn, pl.optim
local cases, known, order = harness.cases()
local once = harness.once

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
cases.matmul_2048 = matmul(2048, 2048, 2048, "bf16")
cases.matmul_llama_up = matmul(16384, 2048, 8192, "bf16")
cases.matmul_f32_4096 = matmul(4096, 4096, 4096, "f32")

-- 16384 tokens over 8 experts; the largest group has three times as many tokens as the smallest. "grad" computes both gradients.
local function grouped(grad)
  return function()
    local x, w, g = bf16 { 16384, 2048 }, bf16 { 8, 2048, 2048 }, bf16 { 16384, 2048 }
    local ends = pl.tensor { 1024, 3511, 5120, 8192, 10386, 11703, 14482, 16384 }
    return once(function()
      local y = pl.grouped_matmul(x, w, ends)
      if not grad then return y end
      return pl.grad((y * g):sum(), { x, w })
    end)
  end
end
cases.grouped_matmul, cases.grouped_matmul_grad = grouped(false), grouped(true)

local function attention(b, h, t, d, grad, dtype)
  return function()
    local function rand() return pl.eval(pl.randn({ b, h, t, d }):to(dtype or "bf16")) end
    local q, k, v, g = rand(), rand(), rand(), rand()
    return once(function()
      local y = pl.scaled_dot_product_attention(q, k, v, { is_causal = true })
      if not grad then return y end
      return pl.grad((y * g):sum(), { q, k, v })
    end)
  end
end
for _, c in ipairs {
  { "d64_1k", 16, 32, 1024, 64 }, { "d64_4k", 4, 32, 4096, 64 }, { "d64_16k", 1, 32, 16384, 64 },
  { "d128_1k", 16, 16, 1024, 128 }, { "d128_4k", 4, 16, 4096, 128 }, { "d128_16k", 1, 16, 16384, 128 },
} do
  cases["attention_" .. c[1]] = attention(c[2], c[3], c[4], c[5], false)
  cases["attention_" .. c[1] .. "_grad"] = attention(c[2], c[3], c[4], c[5], true)
end
for _, c in ipairs { { "d64_1k", 4, 12, 1024, 64 }, { "d64_4k", 4, 12, 4096, 64 }, { "d128_4k", 2, 12, 4096, 128 } } do
  cases["attention_f32_" .. c[1]] = attention(c[2], c[3], c[4], c[5], false, "f32")
  cases["attention_f32_" .. c[1] .. "_grad"] = attention(c[2], c[3], c[4], c[5], true, "f32")
end

-- A convolution with a bias, forward and backward. `fn`: pl.conv1d or pl.conv2d.
local function convolution(fn, x, w, options)
  return function()
    local x, w, b = bf16(x), bf16(w), bf16 { w[1] }
    local g = pl.eval(pl.zeros_like(fn(x, w, b, options)) + 1)
    return once(function() return pl.grad((fn(x, w, b, options) * g):sum(), { x, w, b }) end)
  end
end
cases.conv1d = convolution(pl.conv1d, { 32, 256, 4096 }, { 256, 256, 3 }, { padding = 1 })
cases.conv1d_depthwise = convolution(pl.conv1d, { 32, 256, 4096 }, { 256, 1, 3 }, { padding = 1, groups = 256 })
cases.conv1d_groups = convolution(pl.conv1d, { 32, 768, 512 }, { 768, 48, 128 }, { padding = 64, groups = 16 })
cases.conv2d = convolution(pl.conv2d, { 64, 128, 56, 56 }, { 128, 128, 3, 3 }, { padding = 1 })
cases.conv2d_odd = convolution(pl.conv2d, { 64, 125, 56, 56 }, { 131, 125, 3, 3 }, { padding = 1 })

function cases.cumsum()
  local x = bf16 { 65536, 4096 }
  return once(function() return x:cumsum(-1) end)
end

function cases.sort()
  local x = pl.eval(pl.randn { 16384, 4096 })
  return once(function() return x:sort(-1) end)
end

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

-- With `residual` in bf16 the residual stream has 16 bits, as in llm.c; autocast keeps it in f32.
local function gpt2(batch, layers, heads, C, residual)
  return function()
    local V, T = 50304, 1024
    local m = { wte = nn.Embedding(V, C, { std = 0.02 }), wpe = nn.Embedding(T, C, { std = 0.02 }), blocks = {}, norm = nn.LayerNorm(C) }
    for i = 1, layers do m.blocks[i] = nn.TransformerBlock(C, heads, { causal = true, approximate = "tanh" }) end
    function m:forward(ids)
      local x = (self.wte(ids) + self.wpe(pl.arange(T))):to(residual or "f32")
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
cases.gpt2_b4 = gpt2(4, 12, 12, 768)
cases.gpt2_b32 = gpt2(32, 12, 12, 768)
-- The same step with a memory budget: activations that do not fit are recomputed.
function cases.gpt2_b32_12gib()
  pl.memory_budget("12GiB")
  return gpt2(32, 12, 12, 768)()
end
cases.gpt2_b64 = gpt2(64, 12, 12, 768)
cases.gpt2_350m_b32 = gpt2(32, 24, 16, 1024)
cases.gpt2_1558m_b8 = gpt2(8, 48, 25, 1600)
cases.gpt2_b4_bf16_residual = gpt2(4, 12, 12, 768, "bf16")
cases.gpt2_b32_bf16_residual = gpt2(32, 12, 12, 768, "bf16")
cases.gpt2_1558m_b8_bf16_residual = gpt2(8, 48, 25, 1600, "bf16")

-- Llama 3.2 1B, one step of 4 x 4096 tokens: recipes/llama.lua without its files.
function cases.llama_1b()
  local V, C, B, T = 128256, 2048, 4, 4096
  local rates = nn.rope_rates(64, { base = 500000.0, scaling = { factor = 32, low = 1, high = 4, original = 8192 } })
  local m = { embed = nn.Embedding(V, C, { std = 0.02 }), blocks = {}, norm = nn.RMSNorm(C, { eps = 1e-5 }) }
  for i = 1, 16 do
    m.blocks[i] = nn.TransformerBlock(C, 32, {
      causal = true, norm = "rms", eps = 1e-5, mlp = "swiglu", hidden = 8192, kv_heads = 8, bias = false, rope = { rates = rates },
    })
  end
  function m:forward(ids)
    local x = self.embed(ids)
    for _, block in ipairs(self.blocks) do x = block(x) end
    return pl.linear(self.norm(x), self.embed.weight)
  end
  local model = nn.module(m)
  local opt = optim.AdamW(model, { lr = 1e-4, weight_decay = 0.1, clip_norm = 1.0 })
  local x, y = pl.eval(pl.randint(0, V, { B, T }), pl.randint(0, V, { B * T }))
  return once(function()
    local loss = pl.autocast("bf16", function() return pl.cross_entropy(model(x):flatten(0, 1), y) end)
    loss:backward()
    opt:step()
    return loss
  end)
end

-- ResNet-50 v1.5, one step of 256 images: recipes/resnet50.lua without its files.
local function bottleneck(from, width, stride)
  local function conv(a, b, kernel, s) return nn.Conv2d(a, b, kernel, { stride = s, padding = kernel // 2, bias = false }) end
  local m = {
    conv1 = conv(from, width, 1, 1), bn1 = nn.BatchNorm2d(width), conv2 = conv(width, width, 3, stride), bn2 = nn.BatchNorm2d(width),
    conv3 = conv(width, 4 * width, 1, 1), bn3 = nn.BatchNorm2d(4 * width),
  }
  if stride ~= 1 or from ~= 4 * width then m.short = nn.Sequential { conv(from, 4 * width, 1, stride), nn.BatchNorm2d(4 * width) } end
  function m:forward(x)
    local y = self.bn2(self.conv2(self.bn1(self.conv1(x)):relu())):relu()
    return (self.bn3(self.conv3(y)) + (self.short and self.short(x) or x)):relu()
  end
  return nn.module(m)
end

function cases.resnet50()
  local parts, from = { nn.Conv2d(3, 64, 7, { stride = 2, padding = 3, bias = false }), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, { stride = 2, padding = 1 }) }, 64
  for i, blocks in ipairs { 3, 4, 6, 3 } do
    local width = 64 << (i - 1)
    for k = 1, blocks do
      parts[#parts + 1] = bottleneck(from, width, k == 1 and i > 1 and 2 or 1)
      from = 4 * width
    end
  end
  parts[#parts + 1] = function(x) return x:mean({ 2, 3 }) end
  parts[#parts + 1] = nn.Linear(2048, 1000)
  local model = nn.Sequential(parts)
  local opt = optim.SGD(model, { lr = 0.1, momentum = 0.9, weight_decay = 1e-4 })
  local x, y = pl.eval(pl.randn { 256, 3, 224, 224 }, pl.randint(0, 1000, { 256 }))
  return once(function()
    local loss = pl.autocast("bf16", function() return pl.cross_entropy(model(x), y, { label_smoothing = 0.1 }) end)
    loss:backward()
    opt:step()
    return loss
  end)
end

harness.run(known, order, 20)
