-- Tests fp8: every byte against PyTorch (golden/fp8), matrix products, nn.Linear in fp8, precision = "fp8".

local pl = require "perilune"
local nn, optim, data, train = pl.nn, pl.optim, pl.data, pl.train
local t = require "support"
local describe, it, expect = t.describe, t.it, t.expect

local table_of = pl.load "golden/fp8/table.npz"

---Makes every bf16 number: 512 signs and exponents times 128 mantissas.
local function every_bf16()
  local code = pl.arange(65536)
  local mantissa, exponent, negative = code % 128, (code // 128) % 256, code:ge(32768)
  local powers = {} -- exact, which `pow` of a device need not be
  for e = 0, 255 do powers[e + 1] = 2.0 ^ (e - 134) end
  local normal = (mantissa + 128):to("f64") * pl.tensor(powers, { dtype = "f64" }):index_select(0, exponent)
  local small = mantissa:to("f64") * 2.0 ^ -133
  local x = pl.where(exponent:eq(0), small, normal)
  x = pl.where(exponent:eq(255), pl.where(mantissa:eq(0), math.huge, 0 / 0), x)
  return pl.where(negative, -x, x)
end

---Tolerance of fp8 products against f32: tensor cores accumulate about 14 bits (DeepSeek-V3 Technical Report, 2024, section
---3.5.2).
local NEAR = pl.zeros({}).device == "cpu" and 1e-5 or 1e-3

---Quantizes x to fp8 with the scale of its largest magnitude, and back.
local function rounded(x, format)
  local scale = x:abs():amax():to("f32") * (1.0 / (format == "e5m2" and 57344 or 448))
  return pl.dequantize_fp8(pl.quantize_fp8(x, scale, { format = format }), scale, { format = format })
end

describe("numbers of 8 bits", function()
  for _, format in ipairs { "e4m3", "e5m2" } do
    it("mean what they mean in PyTorch: " .. format, function()
      local got = pl.dequantize_fp8(pl.arange(256):to("u8"), 1, { format = format })
      local want = table_of["values_" .. format]
      expect(got:isnan()):to_equal(want:isnan())
      expect(pl.where(got:isnan(), 0, got)):to_equal(pl.where(want:isnan(), 0, want))
    end)

    it("are those of PyTorch for every bf16: " .. format, function()
      local x, want = every_bf16(), table_of["bytes_" .. format]
      for _, dtype in ipairs { "f64", "f32", "bf16" } do
        local got = pl.quantize_fp8(x:to(dtype), 1, { format = format })
        expect(got.dtype):to_be "u8"
        expect(got:ne(want):sum():item()):to_be(0)
      end
    end)
  end

  it("are multiplied as what they mean", function()
    local a, b, bias = pl.randn { 20, 32 }, pl.randn { 48, 32 }, pl.randn { 48 }
    local qa, qb = pl.quantize_fp8(a, 0.01, { format = "e5m2" }), pl.quantize_fp8(b, 0.02)
    local da, db = pl.dequantize_fp8(qa, 0.01, { format = "e5m2" }), pl.dequantize_fp8(qb, 0.02)
    local y = pl.matmul_fp8(qa, qb, 0.01, 0.02, bias, { format_a = "e5m2", dtype = "f32" })
    expect(y):to_be_near(pl.linear(da, db, bias), NEAR)
    expect(pl.matmul_fp8(qa, qb).dtype):to_be "bf16"
    -- Transposed operands give the same numbers.
    local turned = pl.matmul_fp8(qa:t():contiguous():t(), qb:t():contiguous():t(), 0.01, 0.02, bias, { format_a = "e5m2", dtype = "f32" })
    expect(turned):to_be_near(y, 1e-6)
  end)

  it("say what is wrong", function()
    local q, x = pl.quantize_fp8(pl.ones { 4, 16 }), pl.ones { 4, 16 }
    expect(function() pl.matmul_fp8(x, q) end):to_raise "a is f32; 8-bit floats are stored in u8 tensors"
    expect(function() pl.matmul_fp8(q, pl.quantize_fp8(pl.ones { 4, 8 })) end):to_raise "do not chain"
    expect(function() pl.matmul_fp8(q, q, pl.ones { 4 }) end):to_raise "scale_a has shape {4}; it must be one number"
    expect(function() pl.matmul_fp8(q, q, 1, 1, nil, { dtype = "f64" }) end):to_raise "the result cannot be f64"
    expect(function() pl.matmul_fp8(q, q, 1, 1, pl.ones { 3 }) end):to_raise "bias {3} must be {4}"
    expect(function() pl.quantize_fp8(x, 1, { format = "e3m4" }) end):to_raise "e3m4"
    expect(function() pl.quantize_fp8(x, pl.ones { 2, 4, 16 }) end):to_raise "does not broadcast"
    local w = pl.state(x)
    expect(function() pl.matmul_fp8(pl.quantize_fp8(w), q):sum():backward() end):to_raise "rounding to 8 bits has no derivative"
  end)
end)

---Runs y:backward(g) in a step; returns y, the gradient of x and that of the weight.
local function pass(layer, x, g)
  local state = pl.state(x)
  local y = layer(state)
  y:backward(g)
  local dx, dw, db = pl.eval(state.grad, layer.weight.grad, layer.bias and layer.bias.grad or pl.zeros { 1 })
  y = pl.eval(y:detach())
  pl.end_step()
  return y, dx, dw, db
end

describe("nn.Linear in fp8", function()
  it("is a product of rounded numbers, as are its gradients", function()
    pl.seed(3)
    local layer = nn.Linear(32, 48, { fp8 = true })
    local x, g = pl.eval(pl.randn { 2, 10, 32 }, pl.randn { 2, 10, 48 } * 1e-6)
    local w, b = pl.eval(layer.weight:detach() * 1, layer.bias:detach() * 1)
    local y, dx, dw, db = pass(layer, x, g)
    local rx, rw, rg = rounded(x, "e4m3"), rounded(w, "e4m3"), rounded(g, "e5m2")
    expect(y):to_be_near(pl.linear(rx, rw, b), NEAR)
    expect(dx * 1e6):to_be_near(rg:matmul(rw) * 1e6, 10 * NEAR)
    expect(dw * 1e6):to_be_near(rg:reshape(-1, 48):t():matmul(rx:reshape(-1, 32)) * 1e6, 10 * NEAR)
    expect(db * 1e6):to_be_near(g:sum({ 0, 1 }) * 1e6, 1e-4)
    expect(layer.amax:select(1, 0)):to_equal(pl.stack({ x:abs():amax(), w:abs():amax(), g:abs():amax() }, 0))
  end)

  it("takes its scales from uses before, newest first, as long as the history", function()
    pl.seed(4)
    local layer = nn.Linear(16, 16, { bias = false, fp8 = { history = 2, margin = 1 } })
    local x, g = pl.eval(pl.rand { 8, 16 } + 1, pl.randn { 8, 16 })
    local seen = {}
    for i, factor in ipairs { 1, 4, 0.5, 0.25 } do
      local before = layer.amax:tolist()
      local y = pass(layer, x * factor, g)
      seen[i] = (x * factor):abs():amax():item()
      expect(layer.amax:tolist()[1]):to_be_near { seen[i], seen[i - 1] or 0 }
      if i > 1 then
        local scale = math.max(before[1][1], before[1][2]) * 2 / 448
        local w_scale = math.max(before[2][1], before[2][2]) * 2 / 448
        local rx = pl.dequantize_fp8(pl.quantize_fp8(x * factor, scale), scale)
        local rw = pl.dequantize_fp8(pl.quantize_fp8(layer.weight, w_scale), w_scale)
        expect(y):to_be_near(pl.linear(rx, rw), NEAR)
      end
    end
  end)

  it("does not let a bad batch into its history", function()
    local layer = nn.Linear(16, 16, { fp8 = true })
    pass(layer, pl.full({ 4, 16 }, math.huge), pl.ones { 4, 16 })
    local first = layer.amax:tolist()
    expect(first[1][1]):to_be(0.0)
    expect(first[2][1]):to_be_above(0)
  end)

  it("learns in training only", function()
    local layer = nn.Linear(16, 16, { fp8 = true })
    local x = pl.randn { 4, 16 }
    local function amax() return layer.amax:amax():item() end
    pl.no_grad(function() pl.eval(layer(x)) end)
    pl.end_step()
    expect(amax()):to_be(0.0)
    layer:eval()
    pl.eval(layer(x))
    pl.end_step()
    expect(amax()):to_be(0.0)
    layer:train()
    pass(layer, x, pl.ones { 4, 16 })
    expect(amax()):to_be_above(0)
    local before = layer.amax:tolist()
    layer:eval()
    pl.eval(layer(x * 100))
    pl.end_step()
    expect(layer.amax):to_equal(before)
  end)

  it("gives the dtype of autocast, or that of x", function()
    local layer, x = nn.Linear(16, 32, { fp8 = true }), pl.randn { 3, 16 }
    expect(layer(x).dtype):to_be "f32"
    expect(layer(x:to("bf16")).dtype):to_be "bf16"
    expect(pl.autocast("bf16", function() return layer(x) end).dtype):to_be "bf16"
    expect(pl.autocast("f16", function() return layer(x) end).dtype):to_be "f16"
  end)

  it("says what is wrong", function()
    expect(function() nn.Linear(10, 16, { fp8 = true }) end):to_raise "fp8 needs sizes that are multiples of 16, not 10 -> 16"
    expect(function() nn.Linear(16, 16, { fp8 = { margins = 1 } }) end):to_raise "Did you mean 'margin'?"
    expect(function() nn.Linear(16, 16, { fp8 = 8 }) end):to_raise "fp8"
    expect(function() nn.Linear(16, 16, { fp8 = { history = 0 } }) end):to_raise "history is 0"
    expect(function() pl.autocast("fp8", function() end) end):to_raise "fp8 is a matter of layers"
    expect(function() nn.use_fp8(nn.Sequential { nn.Linear(4, 4) }) end):to_raise "no nn.Linear whose sizes are multiples of 16"
    local layer = nn.Linear(16, 16, { fp8 = true })
    expect(function() layer(pl.ones { 2, 8 }) end):to_raise "its last dim must be 16"
    expect(function() layer(pl.ones({ 2, 16 }, { dtype = "f64" })) end):to_raise "x is f64"
    local x = pl.state(pl.randn { 4, 16 })
    expect(function() pl.grad(layer(x):sum(), { x }, { create_graph = true }) end):to_raise "fp8 has no second derivatives"
  end)

  it("is chosen for a model, but not where it is ruled out", function()
    local m = nn.Sequential { nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32, { fp8 = false }), nn.Linear(32, 10), nn.Linear(10, 16) }
    expect(nn.use_fp8(m)):to_be(1)
    expect(m[1].fp8.history):to_be(16)
    expect(m[3].amax):to_be(nil)
    expect(tostring(m)):to_contain "Linear(16 -> 32, fp8)"
    expect(nn.use_fp8(m)):to_be(1)
    expect(#m:buffers()):to_be(1)
  end)
end)

local function recipe_of(changes)
  local recipe = {
    name = "test",
    params = { steps = 30, batch = 32, lr = 0.005, seed = 3 },
    data = function(p)
      local label = pl.randint(0, 2, { 256 })
      local set = data.tensors { x = pl.randn { 256, 16 } + label:unsqueeze(1), y = label }
      return { train = set:shuffle(1):batch(p.batch) }
    end,
    model = function() return nn.Sequential { nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 2) } end,
    optimizer = function(p, model) return optim.AdamW(model, { lr = p.lr }) end,
    loss = function(model, batch) return pl.cross_entropy(model(batch.x), batch.y) end,
  }
  for k, v in pairs(changes or {}) do recipe[k] = v end
  return recipe
end

local function losses(run, n)
  local out = {}
  for i = 1, n do out[i] = run:step().loss:item() end
  return out
end

local function states(run)
  local out = {}
  for _, entry in ipairs(run.model:states()) do out[entry.path] = entry.state:tolist() end
  return out
end

describe('precision = "fp8"', function()
  it("follows bf16", function()
    local low = losses(train.new(recipe_of { precision = "fp8" }), 30)
    local half = losses(train.new(recipe_of { precision = "bf16" }), 30)
    for i = 1, 30 do expect(low[i]):to_be_near(half[i], 0.03) end
    expect(low[30]):to_be_below(0.7 * low[1])
    local differs = false
    for i = 1, 30 do differs = differs or low[i] ~= half[i] end
    expect(differs):to_be(true)
  end)

  it("is the same with recomputation", function()
    local function model(checkpoint)
      return function()
        return nn.Sequential({ nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 2) }, { checkpoint = checkpoint })
      end
    end
    local kept = train.new(recipe_of { precision = "fp8", model = model(false) })
    local want = losses(kept, 6)
    local again = train.new(recipe_of { precision = "fp8", model = model(2) })
    expect(losses(again, 6)):to_equal(want)
    expect(states(again)):to_equal(states(kept))
  end)

  it("counts every micro-batch of an accumulated step", function()
    local run = train.new(recipe_of { precision = "fp8", accumulate = 4, params = { steps = 30, batch = 8, lr = 0.005, seed = 3 } })
    run:step()
    local filled = run.model[1].amax:gt(0):sum(1):tolist()
    expect(filled):to_equal { 4, 4, 4 }
    local full = losses(train.new(recipe_of { precision = "bf16" }), 10)
    expect(losses(run, 9)[9]):to_be_near(full[10], 0.05)
  end)

  it("leaves a step that went wrong out of the histories", function()
    local spoilt = recipe_of { precision = "fp8", on_nan = "skip", loss = function(model, batch)
      local loss = pl.cross_entropy(model(batch.x), batch.y)
      return model.bad and loss * (0 / 0) or loss
    end }
    local run = train.new(spoilt)
    losses(run, 2)
    local before = states(run)
    run.model.bad = true
    run:step()
    expect(states(run)):to_equal(before)
  end)

  it("needs a layer that can", function()
    local thin = recipe_of { precision = "fp8", model = function() return nn.Sequential { nn.Linear(16, 2) } end }
    expect(function() train.new(thin) end):to_raise "no nn.Linear whose sizes are multiples of 16"
  end)
end)
