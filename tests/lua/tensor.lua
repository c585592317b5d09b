-- Tests tensors in Lua: creation, printing, indexing, operators, promotion, broadcasting, evaluation.

local pl = require "perilune"
local t = require "support"
local describe, it, expect = t.describe, t.it, t.expect

describe("making", function()
  it("takes dtypes from what it is made of", function()
    expect(pl.tensor(3).dtype):to_be "i64"
    expect(pl.tensor({ 1, 2.5 }).dtype):to_be "f32"
    expect(pl.tensor({ true, false }).dtype):to_be "bool"
    expect(pl.tensor({ 1, 2 }, { dtype = "bf16" }).dtype):to_be "bf16"
    expect(pl.tensor({}).shape):to_equal { 0 }
    expect(pl.tensor({ {}, {} }).shape):to_equal { 2, 0 }
  end)

  it("makes scalars, lists and nested lists", function()
    expect(pl.tensor(2.5).shape):to_equal {}
    expect(pl.tensor({ { 1, 2 }, { 3, 4 }, { 5, 6 } }).shape):to_equal { 3, 2 }
    expect(pl.tensor({ { { 1 }, { 2 } } }):tolist()):to_equal { { { 1 }, { 2 } } }
  end)

  it("fills", function()
    expect(pl.zeros({ 2, 2 })):to_equal { { 0, 0 }, { 0, 0 } }
    expect(pl.ones({ 3 }, { dtype = "i32" })):to_equal { 1, 1, 1 }
    expect(pl.full({ 2 }, 7)):to_equal { 7, 7 }
    expect(pl.arange(4)):to_equal { 0, 1, 2, 3 }
    expect(pl.arange(1, 7, 2)):to_equal { 1, 3, 5 }
    expect(pl.linspace(0, 1, 5)):to_be_near { 0, 0.25, 0.5, 0.75, 1 }
    expect(pl.eye(2)):to_equal { { 1, 0 }, { 0, 1 } }
    expect(pl.one_hot(pl.tensor { 2, 0 }, 3):to("i64")):to_equal { { 0, 0, 1 }, { 1, 0, 0 } }
  end)

  it("goes to Lua tables and back", function()
    local list = { { 1.5, -2.0 }, { 0.25, 1e10 } }
    expect(pl.tensor(list):tolist()):to_equal(list)
    expect(math.type(pl.tensor({ 4 }):tolist()[1])):to_be "integer"
    expect(pl.tensor(true):item()):to_be(true)
    expect(pl.tensor({ 9007199254740993 }):item()):to_be(9007199254740993)
  end)
end)

local device = pl.zeros({}).device

-- Formats a value as on the CPU.
local function show(x) return (tostring(x):gsub(device, "cpu", 1)) end

describe("arange", function()
  it("counts whole numbers exactly", function()
    expect(pl.arange(9007199254740993, 9007199254740995)):to_equal { 9007199254740993, 9007199254740994 }
    expect(pl.arange(7, -2, -3)):to_equal { 7, 4, 1 }
    expect(pl.arange(0, 7, 3)):to_equal { 0, 3, 6 }
    expect(pl.arange(3, 1).shape):to_equal { 0 }
  end)
end)

describe("printing", function()
  it("shows shape, dtype and device", function()
    expect(show(pl.tensor { 1, 2 })):to_be "tensor {2} i64 cpu   1 2"
    expect(show(pl.tensor(0.5))):to_be "tensor {} f32 cpu   0.5000"
    expect(show(pl.zeros({ 0, 3 }))):to_be "tensor {0, 3} f32 cpu"
    expect(show(pl.state(pl.zeros { 1 }))):to_be "tensor {1} f32 cpu state   0"
  end)

  it("lines columns up", function()
    expect(show(pl.tensor({ { 1.5, -10.25 }, { 0.0, 3.0 } }))):to_be "tensor {2, 2} f32 cpu\n   1.5000 -10.2500\n   0.0000   3.0000"
  end)

  it("summarises large tensors", function()
    local text = tostring(pl.zeros({ 100, 100 }))
    expect(#text):to_be_below(600)
    expect(text):to_contain "…"
  end)

  it("shows nan and infinities", function()
    expect(tostring(pl.tensor { 0 / 0, 1 / 0, -1 / 0 })):to_contain "inf"
    expect(tostring(pl.tensor { 0 / 0 })):to_contain "nan"
  end)
end)

describe("indexing", function()
  local x = pl.arange(12):reshape(3, 4)

  it("counts from 0 and from the back", function()
    expect(x[0]):to_equal { 0, 1, 2, 3 }
    expect(x[-1]):to_equal { 8, 9, 10, 11 }
    expect(x[1][2]:item()):to_be(6)
    expect(x[{ 1, -1 }]:item()):to_be(7)
  end)

  it("takes half-open ranges", function()
    expect(x[{ { 0, 2 } }].shape):to_equal { 2, 4 }
    expect(x[{ {}, { 1, 3 } }]):to_equal { { 1, 2 }, { 5, 6 }, { 9, 10 } }
    expect(function() return x[{ { 1 } }] end):to_raise "write {lo, hi}"
  end)

  it("takes steps and open ends", function()
    expect(x[{ {}, { 0, 4, 2 } }]):to_equal { { 0, 2 }, { 4, 6 }, { 8, 10 } }
    expect(x[{ { -2, 3 } }].shape):to_equal { 2, 4 }
    expect(x[{ { 0, 99 } }].shape):to_equal { 3, 4 }
    expect(x[{ { 2, 1 } }].shape):to_equal { 0, 4 }
  end)

  it("adds dims", function()
    expect(x[pl.newaxis].shape):to_equal { 1, 3, 4 }
    expect(x[{ {}, pl.newaxis, 0 }].shape):to_equal { 3, 1 }
  end)

  it("picks rows by a tensor", function()
    expect(x[pl.tensor { 2, 0 }]):to_equal { { 8, 9, 10, 11 }, { 0, 1, 2, 3 } }
    expect(x[{ {}, pl.tensor { { 3, 0 } } }]):to_equal { { { 3, 0 } }, { { 7, 4 } }, { { 11, 8 } } }
    expect(x[pl.tensor(2)]):to_equal { 8, 9, 10, 11 }
  end)

  it("reads tensors side by side in step, as PyTorch", function()
    local y = pl.arange(24):reshape(2, 3, 4)
    expect(x[{ pl.tensor { 2, 0, 2 }, pl.tensor { 1, 3, 0 } }]):to_equal { 9, 3, 8 }
    expect(y[{ pl.tensor { 1, 0 }, pl.tensor { 2, 0 } }]):to_equal { { 20, 21, 22, 23 }, { 0, 1, 2, 3 } }
    expect(y[{ {}, pl.tensor { { 1 }, { 2 } }, pl.tensor { { 3 }, { 0 } } }]):to_equal { { { 7 }, { 8 } }, { { 19 }, { 20 } } }
    expect(y[{ pl.tensor { 1, 0 }, pl.tensor { 2, 0 }, pl.tensor { 3, 1 } }]):to_equal { 23, 1 }
    local f = pl.tensor { { 1.0, 2.0 }, { 3.0, 4.0 } }
    local both = pl.grad(f[{ pl.tensor { 1, 1 }, pl.tensor { 0, 0 } }]:sum(), { f })
    expect(both):to_equal { { 0, 0 }, { 2, 0 } }
    expect(function() return x[{ pl.tensor { 2, 0 }, pl.tensor { 1, 3, 0 } }] end):to_raise "shapes {2} and {3}"
    expect(function() return y[{ pl.tensor { 1 }, {}, pl.tensor { 0 } }] end):to_raise "apart from each other"
    expect(function() return x[{ pl.tensor { 2 }, pl.tensor { 4 } }]:item() end):to_raise "out of range"
  end)

  it("raises out of range", function()
    expect(function() return x[3] end):to_raise "index 3 is out of range for dim 0 of size 3"
    expect(function() return x[{ 0, 0, 0 }] end):to_raise "3 indices"
    expect(function() x[0] = 1 end):to_raise "not written in place"
  end)
end)

describe("sizes", function()
  local x = pl.zeros { 2, 3, 5 }

  it("are values, a table, or one", function()
    local a, b, c = x:size()
    expect({ a, b, c }):to_equal { 2, 3, 5 }
    expect(x:size(-1)):to_be(5)
    expect(x.shape):to_equal { 2, 3, 5 }
    expect({ #x, x:dim(), x:numel() }):to_equal { 2, 3, 30 }
    expect({ x.dtype, x.device }):to_equal { "f32", device }
  end)
end)

describe("operators", function()
  local x, y = pl.tensor { 1.0, -2.0, 3.5 }, pl.tensor { 2.0, 4.0, -0.5 }

  it("are elementwise", function()
    expect(x + y):to_be_near { 3, 2, 3 }
    expect(x - y):to_be_near { -1, -6, 4 }
    expect(x * y):to_be_near { 2, -8, -1.75 }
    expect(x / y):to_be_near { 0.5, -0.5, -7 }
    expect(-x):to_be_near { -1, 2, -3.5 }
    expect(x ^ 2):to_be_near { 1, 4, 12.25 }
  end)

  it("take numbers on either side", function()
    expect(1 + x):to_be_near { 2, -1, 4.5 }
    expect(10 - x):to_be_near { 9, 12, 6.5 }
    expect(2 / y):to_be_near { 1, 0.5, -4 }
    expect(2 ^ x):to_be_near { 2, 0.25, 2 ^ 3.5 }
  end)

  it("round down as Lua does", function()
    local a = pl.tensor { 7, -7 }
    expect(a // 2):to_equal { 3, -4 }
    expect(a % 3):to_equal { 1, 2 }
    expect(a / 2):to_be_near { 3.5, -3.5 }
  end)

  it("compare by methods", function()
    expect(x:lt(y)):to_equal { true, true, false }
    expect(x:ge(1)):to_equal { true, false, true }
    expect(x:eq(x)):to_equal { true, true, true }
    expect(x == x):to_be(true)
    expect(x == y):to_be(false)
    expect(function() return x < y end):to_raise "one boolean"
  end)

  it("name what does not combine", function()
    expect(function() return x + nil end):to_raise "a tensor and nil"
    expect(function() return x .. "!" end):to_raise "joined"
  end)
end)

describe("promotion", function()
  local cases = {
    { "bool", "u8", "u8" }, { "u8", "i32", "i32" }, { "i32", "i64", "i64" }, { "i64", "f16", "f16" }, { "f16", "bf16", "f32" },
    { "bf16", "f32", "f32" }, { "f32", "f64", "f64" }, { "bool", "bf16", "bf16" },
  }
  for _, c in ipairs(cases) do
    it(c[1] .. " and " .. c[2] .. " give " .. c[3], function()
      local a, b = pl.ones({ 2 }, { dtype = c[1] }), pl.ones({ 2 }, { dtype = c[2] })
      expect((a + b).dtype):to_be(c[3])
      expect((b + a).dtype):to_be(c[3])
    end)
  end

  it("lets numbers keep the tensor's dtype", function()
    expect((pl.ones({ 2 }, { dtype = "bf16" }) + 1.5).dtype):to_be "bf16"
    expect((pl.ones({ 2 }, { dtype = "i32" }) + 1).dtype):to_be "i32"
    expect((pl.ones({ 2 }, { dtype = "i32" }) + 0.5).dtype):to_be "f32"
    expect((pl.ones({ 2 }, { dtype = "i64" }) / 2).dtype):to_be "f32"
  end)

  it("lets a scalar tensor give way, as a number does", function()
    expect((pl.ones({ 2 }, { dtype = "bf16" }) * pl.tensor(1.5)).dtype):to_be "bf16"
    expect((pl.tensor(1.5) * pl.ones({ 2 }, { dtype = "i64" })).dtype):to_be "f32"
    expect((pl.tensor(1.5) * pl.tensor(1.5, { dtype = "f64" })).dtype):to_be "f64"
    -- The gradient of the promoted operand has that operand's dtype.
    local s = pl.tensor(2.0)
    local g = pl.grad((s * pl.tensor({ 1.0, 3.0 }, { dtype = "bf16" })):sum(), { s })
    expect(g.dtype):to_be "f32"
    expect(g:item()):to_be_near(4)
  end)

  it("takes true and false for bools", function()
    local mask = pl.tensor { true, false }
    expect(mask:eq(true)):to_equal { true, false }
    expect(mask:masked_fill(mask, false)):to_equal { false, false }
    local y = pl.where(mask, true, false)
    expect(y.dtype):to_be "bool"
    expect(y):to_equal { true, false }
    expect((mask + true).dtype):to_be "bool"
    expect(pl.tensor { 1.5, 2.5 } * true):to_be_near { 1.5, 2.5 }
    expect((mask + 1).dtype):to_be "i64"
  end)
end)

describe("broadcasting", function()
  it("stretches dims of size 1 and leading dims", function()
    local x, row, column = pl.zeros { 2, 3 }, pl.tensor { 1, 2, 3 }, pl.tensor { { 10 }, { 20 } }
    expect(x + row + column):to_be_near { { 11, 12, 13 }, { 21, 22, 23 } }
    expect((pl.zeros { 4, 1, 3 } * pl.zeros { 5, 1 }).shape):to_equal { 4, 5, 3 }
    expect((pl.zeros { 0, 3 } + row).shape):to_equal { 0, 3 }
  end)

  it("refuses other shapes", function()
    expect(function() return pl.zeros { 2, 3 } + pl.zeros { 2 } end):to_raise "do not broadcast"
  end)
end)

describe("arguments that say nothing or too much", function()
  local x = pl.arange(6):view(2, 3)

  it("are errors, not left out", function()
    expect(function() return x:roll({ 1, 2 }) end):to_raise "without dims there is one"
    expect(function() return x:flip({ 0, -2 }) end):to_raise "named twice"
    expect(function() return x:take_along(1, pl.zeros({ 3, 1 }, { dtype = "i64" })) end):to_raise "broadcast in all but dim 1"
  end)

  it("keepdim counts without a dim too", function()
    expect(x:argmax(nil, { keepdim = true })):to_equal { { 5 } }
    expect(x:argmin(nil, { keepdim = true }).shape):to_equal { 1, 1 }
  end)
end)

describe("einsum", function()
  local a, b = pl.randn { 2, 3, 3 }, pl.randn { 3, 4 }

  it("takes dots, diagonals and dims of size 1", function()
    expect((pl.einsum("...ij,jk->...ik", { a, b }) - a:matmul(b)):abs():max():item()):to_be_below(1e-6)
    expect(pl.einsum("bii->bi", { a })):to_equal(a:diagonal():tolist())
    expect(pl.einsum("...", { a }).shape):to_equal { 2, 3, 3 }
    expect(pl.einsum("b...->b", { a })):to_be_near(a:sum({ 1, 2 }):tolist(), 1e-5)
    expect(pl.einsum("ij,ij->j", { pl.ones { 1, 4 }, b })):to_be_near(b:sum(0):tolist(), 1e-6)
  end)

  it("names what does not fit", function()
    expect(function() return pl.einsum("bij->b", { b }) end):to_raise "names 3 dims of shape {3, 4}"
    expect(function() return pl.einsum("ii", { b }) end):to_raise "'i' is 3 and 4 in one operand"
    expect(function() return pl.einsum("...i,...i", { a, b }) end):to_raise "'i' is 3 in one operand and 4 in another"
    expect(function() return pl.einsum("...i,...i", { a, pl.zeros { 5, 3 } }) end):to_raise "a dim of '...' is 3 in one operand and 5 in another"
    expect(function() return pl.einsum("..i", { a }) end):to_raise "'.' is not a letter"
    expect(function() return pl.einsum("i->j", { pl.zeros { 3 } }) end):to_raise "'j' on the right"
  end)
end)

describe("grouped products", function()
  local x = pl.tensor { { 1.0, 2.0 }, { 3.0, 4.0 }, { 5.0, 6.0 }, { 7.0, 8.0 } }
  local w = pl.tensor { { { 1.0 }, { 0.0 } }, { { 0.0 }, { 1.0 } }, { { 1.0 }, { 1.0 } } }

  it("multiply each group of rows with its own matrix", function()
    expect(pl.grouped_matmul(x, w, pl.tensor { 1, 2, 4 })):to_equal { { 1 }, { 4 }, { 11 }, { 15 } }
    expect(x:grouped_matmul(w, pl.tensor({ 1, 1, 3 }, { dtype = "i32" }))):to_equal { { 1 }, { 7 }, { 11 }, { 0 } }
  end)

  it("multiply columns with rows, group by group", function()
    local y = pl.tensor { { 1.0 }, { 1.0 }, { 10.0 }, { 10.0 } }
    expect(pl.grouped_matmul(x:t(), y, pl.tensor { 2, 2, 3 })):to_equal { { { 4 }, { 6 } }, { { 0 }, { 0 } }, { { 50 }, { 60 } } }
  end)

  it("have gradients", function()
    local ends = pl.tensor { 1, 1, 3 }
    local dx, dw = pl.grad(pl.grouped_matmul(x, w, ends):sum(), { x, w })
    expect(dx):to_equal { { 1, 0 }, { 1, 1 }, { 1, 1 }, { 0, 0 } }
    expect(dw):to_equal { { { 1 }, { 2 } }, { { 0 }, { 0 } }, { { 8 }, { 10 } } }
  end)

  it("refuse ends that are none", function()
    expect(function() return pl.grouped_matmul(x, w, pl.tensor { 1, 2 }) end):to_raise "3 matrices and ends {2} names 2 groups"
    expect(function() return pl.grouped_matmul(x, w, pl.tensor { 1, 5, 5 }):tolist() end):to_raise "there are 4 rows"
    expect(function() return pl.grouped_matmul(x, w, pl.tensor { 3, 2, 4 }):tolist() end):to_raise "less than the one before it"
  end)
end)

describe("selecting by a mask", function()
  it("has a gradient", function()
    local x = pl.tensor { { 1.0, 2.0 }, { 3.0, 4.0 } }
    local y = (x * x):masked_select(x:gt(1.5))
    expect(y):to_be_near { 4, 9, 16 }
    expect(pl.grad(y:sum(), { x })):to_be_near { { 0, 4 }, { 6, 8 } }
    expect(function() return x:masked_select(pl.tensor { true, false }) end):to_raise "same shape"
  end)
end)

describe("dropout", function()
  it("with p = 1 keeps nothing, and no gradient", function()
    local x = pl.tensor { 1.0, -2.0 }
    local y = x:dropout(1)
    expect(y):to_equal { 0, 0 }
    expect(pl.grad(y:sum(), { x })):to_equal { 0, 0 }
  end)
end)

describe("evaluation", function()
  it("happens when a number is wanted", function()
    local x = pl.randn { 3 } * 2
    expect(x:is_evaluated()):to_be(false)
    pl.eval(x)
    expect(x:is_evaluated()):to_be(true)
  end)

  it("gives the same bits with fusion off", function()
    local x = pl.linspace(-3, 3, 1000)
    local function f() return (x:exp() / (1 + x:exp()) + x:tanh() * x:sin()):tolist() end
    expect(pl.switches({ fusion = false }, f)):to_equal(f())
  end)

  it("draws the same numbers from the same seed", function()
    pl.seed(3)
    local a = pl.randn({ 5 }):tolist()
    pl.seed(3)
    expect(pl.randn { 5 }):to_equal(a)
    expect(pl.randn { 5 }:eq(pl.tensor(a)):all():item()):to_be(false)
  end)
end)

describe("where results lie", function()
  -- A result may be stored with heads and rows swapped if all its readers swap them, but not if it is evaluated as it is.
  local function swapped(make)
    local x = make()
    pl.eval(x)
    local apart = (x:transpose(1, 2):contiguous() * 1):tolist()
    expect(pl.step(function() return make():transpose(1, 2):contiguous() * 1 end):tolist()):to_equal(apart)
    expect(pl.step(function()
      local y = make():transpose(1, 2)
      return y:reshape(y:size(0), y:size(1), -1) * 1
    end):reshape(pl.tensor(apart).shape):tolist()):to_equal(apart)
  end

  it("does not show in products", function()
    pl.seed(4)
    local sizes = { { 64, 64, 32 }, { 33, 17, 40 }, { 2, 9, 5 }, { 1, 16, 33 }, { 20, 300, 1 }, { 7, 0, 6 }, { 70, 530, 300 } }
    for _, s in ipairs(sizes) do
      local m, k, n = s[1], s[2], s[3]
      for _, dtype in ipairs { "f32", "f64", "bf16" } do
        local a, b = pl.eval(pl.randn({ 2, 3, m, k }):to(dtype), pl.randn({ 2, 3, k, n }):to(dtype))
        swapped(function() return a:matmul(b) end)
      end
    end
  end)

  it("does not show in joined tensors", function()
    pl.seed(5)
    for _, dtype in ipairs { "f32", "bf16", "i64", "bool" } do
      local a, b, c = pl.eval(pl.randn({ 3, 2, 5, 4 }), pl.randn({ 3, 6, 5, 4 }), pl.randn({ 3, 5, 1, 4 }))
      local function of(x) return dtype == "bool" and x:gt(0) or (x * 10):to(dtype) end
      swapped(function() return pl.cat({ of(a), of(b), of(c):transpose(1, 2) }, 1) end)
      swapped(function() return pl.cat({ of(a), of(a) }, 0) end)
      swapped(function() return pl.cat({ of(b), of(b) }, 2) end)
      swapped(function() return pl.cat({ of(b), of(b):flip(3) }, 3) end)
      local none = of(b):narrow(0, 0, 0)
      expect(pl.step(function() return pl.cat({ none, none }, 1):transpose(1, 2):contiguous() end).shape):to_equal { 0, 5, 12, 4 }
    end
  end)

  -- Results of at least 8 MiB are written by non-temporal stores.
  it("does not show in large rows", function()
    pl.seed(6)
    for _, cols in ipairs { 768, 1024, 4096, 1000 } do
      local rows = 9 * 1024 * 1024 // 4 // cols + 3
      local x, w, b = pl.eval(pl.randn({ rows, cols }), pl.randn({ cols }), pl.randn({ cols }))
      local bad = pl.where(pl.arange(rows):eq(5):unsqueeze(1):logical_and(pl.arange(cols):eq(cols - 3)), 0 / 0, x)
      bad = pl.where(pl.arange(rows):eq(8):unsqueeze(1), -math.huge, bad)
      pl.eval(bad)
      local forms = {
        function(v) return pl.layer_norm(v, w, b) end,
        function(v) return pl.layer_norm(v, w, nil) end,
        function(v) return v:softmax(-1) end,
      }
      for _, form in ipairs(forms) do
        for _, v in ipairs { x, bad } do
          local whole = pl.eval(form(v))
          local parts = {}
          for at = 0, rows - 1, 500 do parts[#parts + 1] = pl.eval(form(v:narrow(0, at, math.min(500, rows - at)))) end
          local joined = pl.cat(parts, 0)
          expect(whole:eq(joined):logical_or(whole:isnan():logical_and(joined:isnan())):all():item()):to_be(true)
        end
      end
    end
  end)
end)

describe("a script of its own", function()
  it("runs as in the examples", function()
    pl.seed(0)
    local x, w = pl.randn({ 256, 8 }), pl.state(pl.zeros({ 8 }))
    local y = x:matmul(pl.tensor { 1, 2, 3, 4, 5, 6, 7, 8 }) + 0.1 * pl.randn({ 256 })
    local opt = pl.optim.SGD({ w }, { lr = 0.1 })
    local losses = {}
    for i = 1, 100 do
      local loss = ((x:matmul(w) - y) ^ 2):mean()
      loss:backward(); opt:step()
      if i % 20 == 0 then losses[#losses + 1] = loss:item() end
    end
    expect(losses[5]):to_be_below(0.02)
    expect(losses[1]):to_be_above(losses[5])
    expect(w):to_be_near({ 1, 2, 3, 4, 5, 6, 7, 8 }, 0.02)
  end)
end)
