-- pl.kernel: expressions against the ops they stand for, gradients, and what is refused.

local pl = require "perilune"
local t = require "support"
local describe, it, expect = t.describe, t.it, t.expect

local x, y = pl.tensor { -2.0, -0.5, 0.0, 1.0, 3.0 }, pl.tensor { 1.0, 2.0, -1.0, 0.5, 4.0 }
pl.eval(x, y)

local function same(expr, want, scalars, ...)
  local f = pl.kernel { inputs = "x, y", scalars = scalars, expr = expr }
  expect(f(x, y, ...):tolist()):to_equal(want:tolist())
end

describe("pl.kernel", function()
  it("reads operators with their usual strength", function()
    same("x + y * x - y / 4", x + y * x - y / 4)
    same("-x ^ 2 + y", -(x ^ 2) + y)
    same("2 ^ 3 ^ 2 * x + 0 * y", 512.0 * x + 0 * y)
    same("x - y - 1", x - y - 1)
    same("(x - (y - 1)) % 3", (x - (y - 1)) % 3)
    same("x * -y", x * -y)
    same("1.5e1f * x + .5 * y", 15.0 * x + 0.5 * y)
  end)

  it("has functions, comparisons and choices", function()
    same("max(x, y) + fmin(x, 0)", x:maximum(y) + x:minimum(0))
    same("exp(-x) * sigmoid(y)", (-x):exp() * y:sigmoid())
    same("x > 0 ? x : 0.1 * y", pl.where(x:gt(0), x, 0.1 * y))
    same("x > 0 && y < 1 || !(x != y) ? 1 : x < y ? 2 : 3", pl.where(x:gt(0):logical_and(y:lt(1)):logical_or(x:ne(y):logical_not()), 1, pl.where(x:lt(y), 2, 3)))
    same("where(isnan(x), 0, x) + 0 * y", x + 0 * y)
    same("x * exp(k) + y", x * pl.full({}, 2.0):exp() + y, "k", 2.0)
  end)

  it("is one kernel with its neighbours, whatever the scalars", function()
    local swish = pl.kernel { name = "swish", inputs = "x", scalars = "beta", expr = "x / (1 + exp(-beta * x))" }
    local function run(beta) return pl.step(function() return swish(x + 1, beta) * 2 end) end
    run(1.0)
    local before = pl.stats().misses
    expect(run(2.5):tolist()):to_equal((((x + 1) / (1 + (-2.5 * (x + 1)):exp())) * 2):tolist())
    local misses = before
    run(3.5)
    expect(pl.stats().misses - misses):to_be_below(2) -- the composition written out above, and nothing for 3.5
    expect(pl.plan(swish(x + 1, 1.0) * 2)):to_contain "1 kernel"
  end)

  it("has gradients, derived or given", function()
    local swish = pl.kernel { inputs = "x", scalars = "beta", expr = "x / (1 + exp(-beta * x))" }
    expect(pl.gradcheck(function(a) return swish(a, 1.5) end, { x })):to_be(true)
    local given = pl.kernel {
      inputs = "x", scalars = "beta", expr = "x / (1 + exp(-beta * x))",
      backward = function(g, a, beta) local s = (beta * a):sigmoid(); return g * (s + beta * a * s * (1 - s)) end,
    }
    expect(pl.gradcheck(function(a) return given(a, 1.5) end, { x })):to_be(true)
    local wrong = pl.kernel { inputs = "x", expr = "x * x", backward = function(g, a) return g * a end }
    expect(function() pl.gradcheck(wrong, { x }) end):to_raise "gradcheck"
  end)

  it("broadcasts and keeps dtypes", function()
    local f = pl.kernel { inputs = "a, b", expr = "a * b + 1" }
    local z = f(pl.ones { 2, 1 }, pl.ones({ 3 }))
    expect(z.shape):to_equal { 2, 3 }
    expect(f(pl.ones({ 2 }, { dtype = "bf16" }), pl.ones({ 2 }, { dtype = "bf16" })).dtype):to_be "bf16"
    expect(f(pl.zeros { 0 }, pl.zeros { 0 }):numel()):to_be(0)
  end)

  it("says what is wrong with an expression, and where", function()
    local function raises(expr, text, hint)
      expect(function() pl.kernel { name = "k", inputs = "x, y", expr = expr } end):to_raise(text)
      if hint then expect(function() pl.kernel { name = "k", inputs = "x, y", expr = expr } end):to_raise(hint) end
    end
    raises("x +", "the expression ends too early at column 4")
    raises("x + (y", "expected ')' at column 7")
    raises("x $ y", "unexpected '$' at column 3")
    raises("x + z", "'z' is neither an input nor a scalar at column 5", "declared are x, y")
    raises("exq(x)", "there is no function 'exq' at column 1", "did you mean exp?")
    raises("pow(x)", "pow takes 2 arguments, not 1")
    raises("x ? y", "expected ':'")
    raises("2x", "'2x' is no number")
    raises("", "the expression ends too early at column 1")
  end)

  it("says what is wrong with a declaration or a call", function()
    expect(function() pl.kernel { inputs = "x", exp = "x" } end):to_raise "expr"
    expect(function() pl.kernel { inputs = "x" } end):to_raise "expr"
    expect(function() pl.kernel { inputs = "x, 2", expr = "x" } end):to_raise "'2' is no name"
    expect(function() pl.kernel { inputs = "x, x", expr = "x" } end):to_raise "'x' is declared twice"
    expect(function() pl.kernel { inputs = "x: f23", expr = "x" } end):to_raise "f32"
    expect(function() pl.kernel { inputs = "x", source = "..." } end):to_raise "not in this version"
    local f = pl.kernel { name = "f", inputs = "x: f32", scalars = "k", expr = "x * k" }
    expect(function() f(x) end):to_raise "it takes 2 arguments, not 1"
    expect(function() f(1, 2) end):to_raise "x is 1"
    expect(function() f(x, y) end):to_raise "must be a number or a scalar tensor"
    expect(function() f(x:to "f64", 1) end):to_raise "x is f64, but declared as f32"
  end)
end)
