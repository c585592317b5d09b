-- Tests layers: values of PyTorch (golden/nn.lua), shapes, parameter names, modes, custom modules.

local pl = require "perilune"
local nn = pl.nn
local t = require "support"
local numbers = require "golden.nn"
local describe, it, expect = t.describe, t.it, t.expect

---Makes weights 0.5, 0.6, ... as golden/make.py does, so that every output has a different weight.
local function weighted(outputs)
  local sum
  for _, y in ipairs(outputs) do
    local w = (pl.arange(y:numel()):to("f32") * 0.1 + 0.5):reshape(y.shape)
    local part = (y * w):sum()
    sum = sum and sum + part or part
  end
  return sum
end

---Assigns the golden weights to `model`; compares outputs and the gradients of weights and inputs.
local function compare(name, model, tolerance)
  local case = numbers[name]
  local seen = 0
  for _, entry in ipairs(model:states()) do
    local value = case.states[entry.path]
    if not value then error("PyTorch has no " .. entry.path) end
    expect(entry.state.shape):to_equal(value.shape)
    entry.state:assign(t.golden(value))
    seen = seen + 1
  end
  local given = 0
  for _ in pairs(case.states) do given = given + 1 end
  expect(seen):to_be(given)

  local inputs, wrt = {}, {}
  for i, x in ipairs(case.inputs) do
    inputs[i] = t.golden(x)
    if inputs[i].dtype == "f32" then wrt[#wrt + 1] = inputs[i] end
  end
  local num_inputs = #wrt
  local paths = {}
  for _, p in ipairs(model:parameters()) do
    wrt[#wrt + 1] = p.state
    paths[#paths + 1] = p.path
  end
  local outputs = { model(table.unpack(inputs)) }
  expect(#outputs):to_be(#case.outputs)
  for i, want in ipairs(case.outputs) do
    expect(outputs[i].shape):to_equal(want.shape)
    expect(outputs[i]:flatten()):to_be_near(want[1], tolerance)
  end
  local grads = { pl.grad(weighted(outputs), wrt) }
  for i = 1, num_inputs do expect(grads[i]:flatten()):to_be_near(case.input_grads[i][1], tolerance) end
  for i, path in ipairs(paths) do expect(grads[num_inputs + i]:flatten()):to_be_near(case.grads[path][1], tolerance) end
  for path, want in pairs(case.after or {}) do expect(model[path]:flatten()):to_be_near(want[1], tolerance) end
end

describe("as PyTorch:", function()
  local layers = {
    linear = function() return nn.Linear(4, 3) end,
    conv1d = function() return nn.Conv1d(2, 3, 3, { stride = 2, padding = 1 }) end,
    conv2d = function() return nn.Conv2d(2, 3, 3, { padding = 1 }) end,
    conv2d_groups = function() return nn.Conv2d(4, 4, { 2, 3 }, { stride = 2, dilation = { 1, 2 }, groups = 2 }) end,
    conv_transpose2d = function() return nn.ConvTranspose2d(2, 3, 3, { stride = 2, padding = 1, output_padding = 1 }) end,
    embedding = function() return nn.Embedding(5, 3) end,
    layer_norm = function() return nn.LayerNorm(6) end,
    layer_norm_two_dims = function() return nn.LayerNorm { 3, 4 } end,
    rms_norm = function() return nn.RMSNorm(6) end,
    group_norm = function() return nn.GroupNorm(2, 4) end,
    batch_norm1d = function() return nn.BatchNorm1d(3) end,
    batch_norm2d = function() return nn.BatchNorm2d(3) end,
    rnn = function() return nn.RNN(3, 4) end,
    rnn_relu = function() return nn.RNN(3, 4, { nonlinearity = "relu" }) end,
    lstm = function() return nn.LSTM(3, 4, { layers = 2, bidirectional = true }) end,
    gru = function() return nn.GRU(3, 4, { batch_first = true }) end,
    attention = function() return nn.MultiHeadAttention(8, 2, { causal = true }) end,
    block = function() return nn.TransformerBlock(8, 2, { causal = true }) end,
    gelu = function() return nn.GELU() end,
    gelu_tanh = function() return nn.GELU { approximate = "tanh" } end,
    elu = function() return nn.ELU(0.7) end,
    leaky_relu = function() return nn.LeakyReLU(0.1) end,
    max_pool2d = function() return nn.MaxPool2d(2) end,
    avg_pool2d = function() return nn.AvgPool2d(3, { stride = 2, padding = 1 }) end,
    conv2d_same = function() return nn.Conv2d(2, 3, { 2, 3 }, { padding = "same", dilation = { 1, 2 } }) end,
    max_pool2d_ceil = function() return nn.MaxPool2d(2, { stride = 2, padding = 1, ceil_mode = true }) end,
    avg_pool2d_ceil = function() return nn.AvgPool2d(3, { stride = 2, padding = 1, ceil_mode = true, count_include_pad = false }) end,
  }
  for _, name in ipairs(pl.tree.names(layers)) do
    it(name, function() compare(name, layers[name](), 5e-5) end)
  end
end)

local function paths(model)
  local out = {}
  for i, entry in ipairs(model:states()) do out[i] = entry.path end
  return out
end

describe("shapes and names", function()
  local x = pl.randn { 2, 6, 8 }
  local cases = {
    { "Linear without bias", nn.Linear(8, 3, { bias = false }), { 2, 6, 3 }, { "weight" } },
    { "LayerNorm without bias", nn.LayerNorm(8, { bias = false }), { 2, 6, 8 }, { "weight" } },
    { "LayerNorm without weights", nn.LayerNorm(8, { affine = false }), { 2, 6, 8 }, {} },
    { "Dropout", nn.Dropout(0.5), { 2, 6, 8 }, {} },
    { "Flatten", nn.Flatten(), { 2, 48 }, {} },
    { "Unflatten", nn.Unflatten(-1, { 2, -1 }), { 2, 6, 2, 4 }, {} },
    { "Softmax", nn.Softmax(), { 2, 6, 8 }, {} },
    { "grouped queries", nn.MultiHeadAttention(8, 4, { kv_heads = 2, rope = true, causal = true }), { 2, 6, 8 },
      { "out.bias", "out.weight", "qkv.bias", "qkv.weight" } },
    { "a window", nn.MultiHeadAttention(8, 2, { window = 3, bias = false }), { 2, 6, 8 }, { "out.weight", "qkv.weight" } },
    { "FeedForward swiglu", nn.FeedForward(8, { kind = "swiglu", bias = false }), { 2, 6, 8 }, { "down.weight", "gate.weight", "up.weight" } },
    { "MoE", nn.MoE(8, 4, { top = 2, hidden = 16 }), { 2, 6, 8 }, { "down", "gate", "router.weight", "up" } },
    { "MoE of one expert a token", nn.MoE(8, 3, { top = 1, kind = "gelu" }), { 2, 6, 8 }, { "down", "router.weight", "up" } },
    { "Llama's block", nn.TransformerBlock(8, 2, { norm = "rms", mlp = "swiglu", rope = true, bias = false, causal = true }), { 2, 6, 8 },
      { "attn.out.weight", "attn.qkv.weight", "mlp.down.weight", "mlp.gate.weight", "mlp.up.weight", "norm1.weight", "norm2.weight" } },
    { "LSTM with two layers", nn.LSTM(8, 5, { layers = 2, batch_first = true }), { 2, 6, 5 },
      { "bias_hh_l0", "bias_hh_l1", "bias_ih_l0", "bias_ih_l1", "weight_hh_l0", "weight_hh_l1", "weight_ih_l0", "weight_ih_l1" } },
    { "Sequential", nn.Sequential { nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2) }, { 2, 6, 2 }, { "1.bias", "1.weight", "3.bias", "3.weight" } },
  }
  for _, c in ipairs(cases) do
    local name, model, shape, names = table.unpack(c)
    it(name, function()
      local y = model(x)
      expect(y.shape):to_equal(shape)
      expect(paths(model)):to_equal(names)
      local count = 0
      for _, p in ipairs(model:parameters()) do count = count + p.state:numel() end
      expect(model:num_parameters()):to_be(count)
      if count > 0 then
        (y * y):sum():backward()
        for _, p in ipairs(model:parameters()) do
          expect(p.state.grad ~= nil):to_be_true()
          expect(p.state.grad:abs():sum():item()):to_be_above(0)
          p.state.grad = nil
        end
      end
    end)
  end

  for _, kind in ipairs { "ReLU", "SiLU", "Tanh", "Sigmoid", "Softplus", "Mish", "Hardswish" } do
    it(kind .. " is its op", function()
      local op = kind:lower()
      expect(nn[kind]()(x)):to_equal(x[op](x):tolist())
    end)
  end
end)

describe("a mixture of experts", function()
  local T, C, E = 10, 6, 4
  local x = pl.eval(pl.randn { T, C })

  -- The definition, token by token.
  local function by_token(m, x_TC)
    local share = m.router(x_TC):softmax(-1)
    local rows = {}
    for t = 0, T - 1 do
      local weight, expert = share[t]:topk(m.top)
      if m.top > 1 then weight = weight / weight:sum() end
      local y = pl.zeros { C }
      for k, e in ipairs(expert:tolist()) do
        local h = x_TC[t]:matmul(m.up[e])
        h = m.gate and x_TC[t]:matmul(m.gate[e]):silu() * h or h:gelu()
        y = y + h:matmul(m.down[e]) * weight[k - 1]
      end
      rows[#rows + 1] = y
    end
    return pl.stack(rows)
  end

  for _, opts in ipairs { { top = 2 }, { top = 1, kind = "gelu" }, { top = 4, hidden = 5 } } do
    it(("gives each token %d of its experts"):format(opts.top), function()
      local m = nn.MoE(C, E, opts)
      local y, balance = m(x)
      expect(y):to_be_near(by_token(m, x):tolist(), 1e-5)
      expect(balance.shape):to_equal {}
      local wrt = { x, m.up, m.down, m.router.weight }
      local ours, theirs = { pl.grad((m(x) ^ 2):sum(), wrt) }, { pl.grad((by_token(m, x) ^ 2):sum(), wrt) }
      for i = 1, #wrt do expect(ours[i]):to_be_near(theirs[i]:tolist(), 1e-4) end
    end)
  end

  -- The same by pl.grouped_matmul.
  local function by_group(m, x_TC)
    local weight_TK, expert_TK = m.router(x_TC):softmax(-1):topk(2)
    weight_TK = weight_TK / weight_TK:sum(-1, { keepdim = true })
    local expert_R = expert_TK:flatten()
    local order_R = expert_R:argsort()
    local ends_E = pl.one_hot(expert_R, E):sum(0):cumsum(0)
    local x_RC = x_TC:index_select(0, order_R // 2)
    local h = pl.grouped_matmul(x_RC, m.gate, ends_E):silu() * pl.grouped_matmul(x_RC, m.up, ends_E)
    local y_TKC = pl.grouped_matmul(h, m.down, ends_E):index_select(0, order_R:argsort()):view(T, 2, C)
    return (y_TKC * weight_TK:unsqueeze(-1)):sum(1):to(x_TC.dtype)
  end

  for _, precision in ipairs { "f32", "bf16", "f16" } do
    it("has the bits of grouped products of sorted rows in " .. precision, function()
      local m = nn.MoE(C, E, { top = 2, hidden = 5 })
      local function both() return (m(x)), by_group(m, x) end
      local ours, theirs
      if precision == "f32" then ours, theirs = both() else ours, theirs = pl.autocast(precision, both) end
      expect(ours):to_equal(theirs:tolist())
    end)
  end

  it("agrees with finite differences", function()
    for _, kind in ipairs { "swiglu", "gelu" } do
      local m = nn.MoE(3, 2, { top = 2, hidden = 4, kind = kind })
      local function f(x_TC, up, down, gate)
        m.up, m.down, m.gate = up, down, gate
        return (m(x_TC))
      end
      local inputs = { pl.randn { 4, 3 }, pl.randn { 2, 3, 4 }, pl.randn { 2, 4, 3 }, kind == "swiglu" and pl.randn { 2, 3, 4 } or nil }
      expect(pl.gradcheck(f, inputs)):to_be(true)
    end
  end)

  it("has the second derivatives of grouped products", function()
    local m = nn.MoE(C, E, { top = 2, hidden = 5 })
    local wrt = { x, m.up, m.gate, m.down, m.router.weight }
    local function second(y)
      local d = pl.grad((y ^ 2):sum(), { x }, { create_graph = true })
      return { pl.grad((d ^ 2):sum(), wrt) }
    end
    local ours, theirs = second((m(x))), second(by_group(m, x))
    for i = 1, #wrt do
      expect(theirs[i]:abs():sum():item()):to_be_above(0)
      expect(ours[i]):to_be_near(theirs[i]:tolist(), 1e-3)
    end
  end)

  it("has one plan for any routing", function()
    local m = nn.MoE(C, E)
    local function run(x_TC) return (pl.step(function() return m(x_TC) end)):sum():item() end
    local inputs = {}
    for i = 1, 4 do inputs[i] = pl.eval(pl.randn { T, C }) end
    run(inputs[1])
    local before = pl.stats().misses
    for i = 2, 4 do run(inputs[i]) end
    expect(pl.stats().misses):to_be(before)
  end)

  it("says how uneven the routing is", function()
    local m = nn.MoE(C, E, { top = 1 })
    m.router.weight:assign(pl.zeros { E, C })
    local _, even = m(x)
    expect(even:item()):to_be_near(1, 1e-6)
    local w = pl.cat({ pl.full({ 1, C }, 9.0), pl.zeros { E - 1, C } }, 0)
    m.router.weight:assign(w)
    local _, uneven = m(pl.ones { T, C })
    expect(uneven:item()):to_be_near(E, 1e-3)
  end)

  it("takes the place of the MLP in a transformer block", function()
    for _, checkpoint in ipairs { false, true } do
      local block = nn.TransformerBlock(8, 2, { mlp = "swiglu", norm = "rms", bias = false, experts = 4, top = 1, hidden = 12, checkpoint = checkpoint })
      local y, balance = block(pl.randn { 2, 5, 8 })
      expect(y.shape):to_equal { 2, 5, 8 }
      expect(balance:item()):to_be_above(0.9)
      expect(block.mlp.up.shape):to_equal { 4, 8, 12 }
    end
    expect(function() nn.TransformerBlock(8, 2, { top = 1 }) end):to_raise "give `experts` too"
    expect(function() nn.TransformerBlock(8, 2, { experts = 2, top = 3 }) end):to_raise "top is 3 of 2 experts"
  end)

  it("refuses more experts than there are", function()
    expect(function() nn.MoE(8, 2, { top = 3 }) end):to_raise "top is 3 of 2 experts"
  end)
end)

describe("attention", function()
  it("sees only what it may", function()
    local attn = nn.MultiHeadAttention(8, 2, { causal = true })
    local x = pl.randn { 1, 5, 8 }
    local changed = pl.cat({ x:narrow(1, 0, 4), pl.randn { 1, 1, 8 } }, 1)
    expect(attn(changed):narrow(1, 0, 4)):to_be_near(attn(x):narrow(1, 0, 4):tolist(), 1e-6)
  end)

  it("takes a mask, and memory", function()
    local attn = nn.MultiHeadAttention(8, 2)
    local x, memory = pl.randn { 2, 3, 8 }, pl.randn { 2, 7, 8 }
    local causal = pl.ones({ 3, 3 }):tril():to("bool")
    local same = nn.MultiHeadAttention(8, 2, { causal = true })
    for i, entry in ipairs(attn:states()) do same:states()[i].state:assign(entry.state) end
    expect(attn(x, { mask = causal })):to_be_near(same(x):tolist(), 1e-6)
    expect(attn(x, { memory = memory }).shape):to_equal { 2, 3, 8 }
    expect(function() attn(x, { masc = causal }) end):to_raise "Did you mean 'mask'?"
  end)

  it("keeps to documents, as if each stood alone", function()
    for _, opts in ipairs { { causal = true }, { window = 3, kv_heads = 1, rope = true }, {} } do
      local attn = nn.MultiHeadAttention(8, 2, opts)
      local a, b = pl.randn { 1, 4, 8 }, pl.randn { 1, 3, 8 }
      local packed = pl.cat({ a, b }, 1)
      local alone = pl.cat({ attn(a), attn(b, { positions = pl.arange(3) + 4 }) }, 1)
      if not opts.rope then alone = pl.cat({ attn(a), attn(b) }, 1) end
      local ids = pl.tensor { 0, 0, 0, 0, 1, 1, 1 }
      expect(attn(packed, { documents = ids })):to_be_near(alone:tolist(), 1e-5)
      expect(attn(packed, { documents = ids:unsqueeze(0) })):to_be_near(alone:tolist(), 1e-5)
      -- By elementary ops, the path with dropout.
      attn.dropout = 1e-30
      expect(attn:train()(packed, { documents = ids:unsqueeze(0) })):to_be_near(alone:tolist(), 1e-5)
      attn.dropout = 0
    end
  end)

  it("takes documents in any order, and only for the positions that it has", function()
    local attn = nn.MultiHeadAttention(8, 2, { causal = true })
    local x, ids = pl.randn { 2, 5, 8 }, pl.tensor { { 1, 0, 1, 0, 1 }, { -3, -3, 7, -3, 7 } }
    local mask = ids:unsqueeze(2):eq(ids:unsqueeze(1)):unsqueeze(1)
    expect(attn(x, { documents = ids })):to_be_near(attn(x, { mask = mask }):tolist(), 1e-6)
    expect(function() attn(x, { documents = ids:narrow(1, 0, 4) }) end):to_raise "does not broadcast to {2, 5}"
    expect(function() attn(x, { documents = ids:to("f32") }) end):to_raise "documents must be integers"
    expect(function() attn(x, { documents = ids, memory = x }) end):to_raise "positions of x"
    local q, k = pl.randn { 2, 5, 4 }, pl.randn { 2, 6, 4 }
    expect(function() pl.scaled_dot_product_attention(q, k, k, { documents = pl.arange(5) }) end):to_raise "q has 5 positions and k has 6"
  end)

  it("depends on distances alone with rope", function()
    local attn = nn.MultiHeadAttention(8, 2, { rope = true })
    local x = pl.randn { 1, 4, 8 }
    local y, shifted = attn(x), attn(x, { positions = pl.arange(4) + 11 })
    expect(shifted):to_be_near(y:tolist(), 1e-4)
  end)
end)

describe("modes", function()
  it("dropout acts in training alone, and keeps the mean", function()
    local drop = nn.Dropout(0.25)
    local x = pl.ones { 10000 }
    local y = drop(x)
    expect(y:eq(0):to("f32"):mean():item()):to_be_near(0.25, 0.02)
    expect(y:mean():item()):to_be_near(1, 0.02)
    expect(drop:eval()(x)):to_equal(x:tolist())
    expect(drop:train()(x):eq(0):any():item()):to_be(true)
  end)

  it("batch norm uses running statistics in evaluation", function()
    local norm = nn.BatchNorm1d(2)
    local x = pl.randn { 64, 2 } * 3 + 5
    for _ = 1, 60 do pl.step(function() return norm(x) end) end
    expect(norm.running_mean):to_be_near(x:mean(0):tolist(), 0.02)
    norm:eval()
    expect(norm(x):mean():item()):to_be_near(0, 0.02)
    expect(norm(pl.ones { 1, 2 }).shape):to_equal { 1, 2 }
    expect(#norm:parameters()):to_be(2)
    expect(#norm:buffers()):to_be(2)
  end)

  it("batch norm keeps bf16 under autocast, with statistics in f32", function()
    local norm, x = nn.BatchNorm2d(3), pl.randn { 4, 3, 5, 5 }
    local y = pl.autocast("bf16", function() return norm(x:to("bf16")) end)
    expect(y.dtype):to_be("bf16")
    expect(norm.running_mean.dtype):to_be("f32")
    expect(norm:eval()(x:to("bf16")).dtype):to_be("bf16")
  end)

  it("the outputs of one op can be asked for one after another", function()
    local x = pl.randn { 4, 3, 5, 5 }
    local y, mean, var = pl.batch_norm_train(x)
    pl.eval(y)
    expect(mean):to_be_near(x:mean({ 0, 2, 3 }):tolist(), 1e-5)
    expect(var):to_be_near(x:var({ 0, 2, 3 }, { unbiased = false }):tolist(), 1e-5)
    expect(y):to_equal(pl.batch_norm_train(x):tolist())
  end)

  it("reach every module below", function()
    local model = nn.Sequential { nn.Linear(2, 2), nn.Sequential { nn.Dropout(0.9) } }
    expect(model[2][1].training):to_be(true)
    model:eval()
    expect(model[2][1].training):to_be(false)
    model:train()
    expect(model[2][1].training):to_be(true)
  end)
end)

describe("modules of one's own", function()
  local function Attention(width, heads)
    local m = { qkv = nn.Linear(width, 3 * width), out = nn.Linear(width, width) }
    function m:forward(x_BTC)
      local B, T, C = x_BTC:size()
      local q, k, v = self.qkv(x_BTC):view(B, T, 3, heads, C // heads):permute(2, 0, 3, 1, 4):unbind(0)
      local y_BHTD = pl.scaled_dot_product_attention(q, k, v, { is_causal = true })
      return self.out(y_BHTD:transpose(1, 2):reshape(B, T, C))
    end
    return nn.module(m)
  end

  it("are made from tensors, as in the examples", function()
    local m = Attention(8, 2)
    local library = nn.MultiHeadAttention(8, 2, { causal = true })
    for i, entry in ipairs(m:states()) do library:states()[i].state:assign(entry.state) end
    local x = pl.randn { 2, 5, 8 }
    expect(m(x)):to_be_near(library(x):tolist(), 1e-6)
    expect(paths(m)):to_equal { "out.bias", "out.weight", "qkv.bias", "qkv.weight" }
  end)

  it("find States in lists, count tied ones once, and order names naturally", function()
    local shared = pl.state(pl.zeros { 2 })
    local m = nn.module { blocks = {}, head = shared, tail = shared }
    for i = 1, 11 do m.blocks[i] = nn.module { w = pl.state(pl.zeros { 1 }) } end
    local names = paths(m)
    expect(names[2]):to_be "blocks.2.w"
    expect(names[11]):to_be "blocks.11.w"
    expect(names[12]):to_be "head"
    expect(#names):to_be(12)
  end)

  it("print what they hold", function()
    local text = tostring(nn.Sequential { nn.Linear(64, 32), nn.ReLU() })
    expect(text):to_contain "Linear(64 -> 32)"
    expect(text):to_contain "2,080 parameters"
  end)
end)

describe("LoRA", function()
  it("begins as its base, trains alone, and merges", function()
    local base = nn.Linear(6, 4)
    local x = pl.randn { 3, 6 }
    local before = base(x):tolist()
    local lora = nn.LoRA(base, { rank = 2 })
    expect(lora(x)):to_be_near(before, 1e-6)
    expect(#lora:parameters()):to_be(2)
    local opt = pl.optim.Adam(lora, { lr = 0.05 })
    for _ = 1, 5 do
      (lora(x) ^ 2):mean():backward()
      opt:step()
    end
    local trained = lora(x):tolist()
    expect(lora.b:abs():sum():item()):to_be_above(0)
    lora:merge()
    expect(base(x)):to_be_near(trained, 1e-5)
    expect(lora(x)):to_be_near(trained, 1e-5)
  end)

  it("wraps the layers of a model by their path", function()
    local block = nn.TransformerBlock(8, 2)
    expect(nn.add_lora(block, "attn", { rank = 2 })):to_be(2)
    expect(#block:parameters()):to_be(4)
    expect(block(pl.randn { 1, 3, 8 }).shape):to_equal { 1, 3, 8 }
    expect(function() nn.add_lora(block, "nowhere") end):to_raise "no Linear matches"
  end)
end)

describe("initialisers", function()
  local init = pl.init
  pl.seed(11)

  ---Computes mean, standard deviation, minimum and maximum.
  local function facts(x)
    return x:mean():item(), x:std():item(), x:min():item(), x:max():item()
  end

  it("uniform and normal", function()
    local mean, std, low, high = facts(init.uniform({ 200, 300 }, { a = -2, b = 4 }))
    expect(mean):to_be_near(1, 0.03)
    expect(std):to_be_near(6 / math.sqrt(12), 0.02)
    expect(low >= -2 and high < 4):to_be_true()
    mean, std = facts(init.normal({ 200, 300 }, { mean = 3, std = 0.5 }))
    expect(mean):to_be_near(3, 0.01)
    expect(std):to_be_near(0.5, 0.01)
  end)

  it("trunc_normal stays within and has the cut law's deviation", function()
    local mean, std, low, high = facts(init.trunc_normal({ 200, 300 }, { std = 1, a = -1, b = 1 }))
    expect(mean):to_be_near(0, 0.01)
    expect(std):to_be_near(0.5396, 0.01) -- of the standard normal on [-1, 1]
    expect(low >= -1 and high <= 1):to_be_true()
  end)

  it("xavier and kaiming", function()
    local _, std = facts(init.xavier_uniform { 300, 200 })
    expect(std):to_be_near(math.sqrt(2 / 500), 1e-3)
    _, std = facts(init.xavier_normal({ 300, 200 }, { gain = 2 }))
    expect(std):to_be_near(2 * math.sqrt(2 / 500), 2e-3)
    _, std = facts(init.kaiming_normal({ 64, 32, 3, 3 }, { nonlinearity = "relu" }))
    expect(std):to_be_near(math.sqrt(2 / 288), 2e-3)
    local _, _, low, high = facts(init.kaiming_uniform({ 300, 200 }, { a = math.sqrt(5) }))
    local bound = 1 / math.sqrt(200)
    expect(low):to_be_near(-bound, 1e-3)
    expect(high):to_be_near(bound, 1e-3)
  end)

  it("orthogonal and eye", function()
    for _, shape in ipairs { { 5, 9 }, { 9, 5 }, { 6, 6 } } do
      local q = init.orthogonal(shape)
      if shape[1] > shape[2] then q = q:transpose(0, 1) end
      local n = q:size(0)
      expect(q:matmul(q:transpose(0, 1))):to_be_near(pl.eye(n):tolist(), 1e-4)
    end
    expect(init.eye({ 2, 3 })):to_equal { { 1, 0, 0 }, { 0, 1, 0 } }
  end)

  it("dirac is the identity of a convolution", function()
    local x = pl.randn({ 2, 4, 5, 5 })
    expect((x:conv2d(init.dirac { 4, 4, 3, 3 }, nil, { padding = 1 }) - x):abs():max():item()):to_be(0)
    expect((x:conv2d(init.dirac({ 4, 2, 3, 3 }, { groups = 2 }), nil, { padding = 1, groups = 2 }) - x):abs():max():item()):to_be(0)
    expect(init.dirac { 2, 3, 2 }):to_equal { { { 0, 1 }, { 0, 0 }, { 0, 0 } }, { { 0, 0 }, { 0, 1 }, { 0, 0 } } } -- as torch's
    expect(function() init.dirac { 2, 3 } end):to_raise "3 to 5 dims"
    expect(function() init.dirac({ 3, 3, 1 }, { groups = 2 }) end):to_raise "equal groups"
  end)

  it("sparse has as many zeros in each column", function()
    local w = init.sparse({ 50, 30 }, 0.33)
    expect(w:eq(0):to("i64"):sum(0):eq(17):all():item()):to_be(true)
    expect(w:std():item()):to_be_near(0.01 * math.sqrt(33 / 50), 1e-3)
    expect(w:eq(0)[{ {}, 0 }]:eq(w:eq(0)[{ {}, 1 }]):all():item()):to_be(false)
  end)

  it("layers start as PyTorch's", function()
    local layer = nn.Linear(400, 300)
    local _, _, low, high = facts(layer.weight)
    expect(low):to_be_near(-0.05, 1e-3)
    expect(high):to_be_near(0.05, 1e-3)
    expect(layer.bias:abs():max():item()):to_be_below(0.05 + 1e-6)
    local _, std = facts(nn.Embedding(300, 200).weight)
    expect(std):to_be_near(1, 0.02)
  end)
end)

describe("weights under other names", function()
  local function model(rows)
    return nn.module {
      table_ = nn.module { weight = pl.state(pl.arange(rows * 2):to("f32"):view(rows, 2)) },
      blocks = { nn.Linear(2, 3), nn.Linear(2, 3) },
      forward = function(_, x) return x end,
    }
  end
  local function rules(rows)
    return {
      { "table_", "emb", rows = rows },
      { "blocks.#.bias", "layer.#.shift" },
      { "blocks.#", { "layer.#.a", "layer.#.b" }, sizes = { 1, 2 }, transpose = true },
    }
  end
  local path = "lua/files/out.weights.safetensors"

  it("go out in parts, turned and cut, and come back", function()
    local from = model(5)
    nn.save_weights(from, path, rules(4))
    local file = pl.load(path)
    expect(file["emb.weight"].shape):to_equal { 4, 2 }
    expect(file["layer.0.b.weight"]):to_equal(from.blocks[1].weight:narrow(0, 1, 2):transpose(0, 1):tolist())
    expect(file["layer.1.shift"]):to_equal(from.blocks[2].bias:tolist())
    local to = model(5)
    nn.load_weights(to, path, rules(4))
    expect(to.blocks[2].weight):to_equal(from.blocks[2].weight:tolist())
    expect(to.table_.weight):to_equal { { 0, 1 }, { 2, 3 }, { 4, 5 }, { 6, 7 }, { 0, 0 } }
  end)

  it("are asked for at the start of a run that exports at its end", function()
    nn.check_export(path)
    nn.check_export "w.npz"
    expect(function() nn.check_export "no/such/folder/w.safetensors" end):to_raise "there is no folder no/such/folder"
    expect(function() nn.check_export "lua/files/w.bin" end):to_raise '"lua/files/w.bin" is none of .safetensors, .npz'
    expect(function() nn.check_export "lua/files/golden/w" end):to_raise "is none of"
  end)

  it("may lack the prefix of the rules", function()
    local to = model(4)
    local long = rules(4)
    long[1][2] = "net.emb"
    nn.load_weights(to, path, long, { prefix = "net." })
    expect(to.table_.weight:sum():item()):to_be(28)
    expect(function() nn.load_weights(to, path, long) end):to_raise "has no 'net.emb.weight'"
  end)

  it("say what does not fit", function()
    expect(function() nn.load_weights(model(3), path, rules()) end):to_raise "the file belongs to a model of another size"
    expect(function() nn.load_weights(model(5), path, { { "table_", "emb" } }) end):to_raise "no rule names 'blocks.1.bias'"
    local other = rules(4)
    other[2][2] = "layer.#.shfit"
    expect(function() nn.load_weights(model(5), path, other) end):to_raise "did you mean 'layer.0.shift'?"
    local small = nn.module { table_ = model(4).table_, forward = print }
    expect(function() nn.load_weights(small, path, rules(4)) end):to_raise "the model has no 'layer.0.a.weight'"
    nn.load_weights(small, path, rules(4), { ignore = { "^layer%." } })
  end)

  it("rates of rotary positions", function()
    expect(nn.rope_rates(4)):to_be_near({ 1, 0.01 }, 1e-7)
    local x = pl.randn { 2, 3, 4 }
    expect(pl.rope(x, nil, { rates = nn.rope_rates(4) })):to_be_near(pl.rope(x):tolist(), 1e-6)
    expect(function() nn.rope_rates(4, { scaling = { factor = 2 } }) end):to_raise "option 'low' is missing"
    expect(function() pl.rope(x, nil, { rates = pl.ones { 3 } }) end):to_raise "they must be {2}"
  end)
end)
