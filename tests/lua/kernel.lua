-- Tests pl.kernel: expressions against the ops they consist of, CUDA source on the device, gradients, errors.

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
    raises("2x", "'2x' is not a number")
    raises("", "the expression ends too early at column 1")
  end)

  it("says what is wrong with a declaration or a call", function()
    expect(function() pl.kernel { inputs = "x", exp = "x" } end):to_raise "expr"
    expect(function() pl.kernel { inputs = "x" } end):to_raise "expr"
    expect(function() pl.kernel { inputs = "x, 2", expr = "x" } end):to_raise "'2' is not a name"
    expect(function() pl.kernel { inputs = "x, x", expr = "x" } end):to_raise "'x' is declared twice"
    expect(function() pl.kernel { inputs = "x: f23", expr = "x" } end):to_raise "f32"
    local f = pl.kernel { name = "f", inputs = "x: f32", scalars = "k", expr = "x * k" }
    expect(function() f(x) end):to_raise "it takes 2 arguments, not 1"
    expect(function() f(1, 2) end):to_raise "x is 1"
    expect(function() f(x, y) end):to_raise "must be a number or a scalar tensor"
    expect(function() f(x:to "f64", 1) end):to_raise "x is f64, but declared as f32"
  end)
end)

local scale_source = [[
  template <class T>
  __global__ void __launch_bounds__(128) scale_rows(const T* x, const float* w, T* y, float* sums, int cols, float alpha) {
    float sum = 0;
    for (int c = threadIdx.x; c < cols; c += blockDim.x) {
      long long i = (long long)blockIdx.x * cols + c;
      y[i] = alpha * w[blockIdx.x] * x[i];
    }
    if (threadIdx.x == 0) {
      for (int c = 0; c < cols; c++) sum += alpha * w[blockIdx.x] * x[(long long)blockIdx.x * cols + c];
      sums[blockIdx.x] = sum;
    }
  }
]]

---Makes the kernel above; `more` replaces options.
local function scale_rows(more)
  local options = {
    name = "scale_rows", inputs = "x: f32, w: f32", outputs = "y, sums: f32", scalars = "alpha", source = scale_source,
    shape = function(a) return a.shape, { a:size(0) } end, grid = function(a) return a:size(0) end, block = 128,
    args = function(a) return a:size(1) end,
    cpu = function(a, w, alpha) local out = alpha * w:unsqueeze(1) * a; return out, out:sum(1) end,
  }
  for k, v in pairs(more or {}) do options[k] = v or nil end
  return pl.kernel(options)
end

local square_source = "__global__ void square(const float* x, float* y, long long n) { long long i = blockIdx.x * 256ll + threadIdx.x; if (i < n) y[i] = x[i] * x[i]; }"
local function square(more)
  local options = { name = "square", inputs = "x: f32", source = square_source, args = function(a) return a:numel() end,
                    cpu = function(a) return a * a end, backward = function(g, a) return 2 * g * a end }
  for k, v in pairs(more or {}) do options[k] = v or nil end
  return pl.kernel(options)
end

describe("pl.kernel from CUDA source", function()
  local a, w = pl.randn { 6, 700 }, pl.randn { 6 }
  pl.eval(a, w)

  it("computes what its reference says, whatever the scalars and however inputs lie", function()
    local f = scale_rows()
    local function same(b, v, alpha)
      local out, sums = f(b, v, alpha)
      local want = alpha * v:unsqueeze(1) * b
      expect((out - want):abs():max():item()):to_be_near(0, 1e-6)
      local size = want:abs():sum(1):max():item()
      expect((sums - want:sum(1)):abs():max():item() / (1 + size)):to_be_near(0, 1e-5)
    end
    same(a, w, 2.0)
    same(a, w, -0.5)
    same(a:t():narrow(0, 0, 6), pl.ones { 6 }, 1.0)
    same(a + 1, w * 2, 3)
    same(a:narrow(1, 3, 500), w, 1.0)
    expect(f(pl.ones { 0, 5 }, pl.ones { 0 }, 1.0):numel()):to_be(0)
    local _, sums = f(a, w, 1.0) -- the other output is made and not read
    expect((sums - (w:unsqueeze(1) * a):sum(1)):abs():max():item()):to_be_near(0, 1e-3)
    if a.device ~= "cpu" then
      expect(pl.kernel_check(f, { a, w, 1.5 }, { atol = 1e-3 })):to_be(true)
      local wrong = scale_rows { cpu = function(b, v) local out = v:unsqueeze(1) * b; return out, out:sum(1) end }
      expect(function() pl.kernel_check(wrong, { a, w, 1.5 }) end):to_raise "scale_rows: output 1 differs"
    else
      expect(function() pl.kernel_check(f, { a, w, 1.5 }) end):to_raise "the device is the CPU"
    end
  end)

  it("is a node of the graph: replayed, fused around, differentiated by its backward", function()
    local f = square()
    local s = pl.state(pl.tensor { 1.0, 2.0, 3.0 })
    for _ = 1, 6 do
      pl.step(function()
        f(s * 2):sum():backward()
        s:assign(s - 0.01 * s.grad)
        s.grad = nil
      end)
    end
    local want = 0.92 ^ 6
    expect(s):to_be_near({ want, 2 * want, 3 * want }, 1e-5)
    local refused = square { backward = false }
    expect(function() refused(s):sum():backward() end):to_raise "square: it has no backward, so it cannot be differentiated"
    local both = scale_rows()
    expect(function() both(pl.state(a), w, 1.0):sum():backward() end):to_raise "it has no backward"
    if a.device ~= "cpu" then expect(pl.plan(f(s * 2))):to_contain "square" end
  end)

  it("says what is wrong with a declaration", function()
    local function raises(more, ...)
      for _, text in ipairs { ... } do expect(function() square(more) end):to_raise(text) end
    end
    raises({ name = false }, "name")
    raises({ name = "sqare" }, "sqare: its source has no function of that name", 'did you mean name = "square"?')
    raises({ sourse = "x" }, "unknown option 'sourse'", "source")
    raises({ expr = "x" }, "both expr and source")
    raises({ inputs = "" }, "is not a name")
    raises({ outputs = "y: f31" }, "f32")
    raises({ outputs = "x" }, "'x' is declared twice")
    raises({ outputs = "y, z" }, "several outputs and a backward")
    raises({ source = "__global__ void __cluster_dims__(2) square() {}" }, "__cluster_dims__")
    raises({ grid = true }, "grid")
  end)

  it("says what is wrong with a call", function()
    local function raises(more, args, ...)
      for _, text in ipairs { ... } do expect(function() pl.eval(square(more)(table.unpack(args))) end):to_raise(text) end
    end
    raises({}, {}, "it takes 1 arguments, not 0", "square(x)")
    raises({}, { 1.0 }, "x is 1.0", "it must be a tensor")
    raises({}, { a:to "f64" }, "x is f64, but declared as f32")
    raises({ shape = function() return { 2.5 } end }, { a }, "shape returned a table for y")
    raises({ shape = function() end }, { a }, "shape returned 0 values for 1 outputs")
    -- On the CPU the reference runs, but a launch that no GPU accepts is an error there too.
    raises({ block = 2048 }, { a }, "block has 2048 threads", "a block has at most 1024")
    raises({ block = 2.5 }, { a }, "block is 2.5")
    raises({ grid = function() return { 1, 2, 3, 4 } end }, { a }, "grid is {1, 2, 3, 4}")
    raises({ grid = function() return "foo" end }, { a }, "grid is 'foo'")
    raises({ grid = function() return { 1, 70000 } end }, { a }, "at most 65535")
    raises({ shared = -1 }, { a }, "shared is -1")
    raises({ args = function() return 1.5 end }, { a }, "args returned 1.5")
    raises({ cpu = false, block = 2048 }, { a }, "block has 2048 threads")
    if a.device == "cpu" then
      raises({ cpu = false }, { a }, "its CUDA source needs a GPU, but the device is the CPU", "add `cpu`")
      raises({ cpu = function(b) return b:sum() end }, { a }, "cpu returned {} f32 for y, which is declared as {6, 700} f32")
      raises({ cpu = function() end }, { a }, "cpu returned 0 values for 1 outputs")
    else
      raises({ shared = 1 << 20 }, { a }, "a block has at most")
      raises({ source = (square_source:gsub("x%[i%] %* x", "z[i] * x")) }, { a }, "its CUDA source does not compile", 'identifier "z" is undefined')
      raises({ source = (square_source:gsub("const float", "const double")) }, { a }, "its call", "const float* x0, float* y0, long long n0")
    end
  end)
end)
