-- Tests States, step scopes and gradients.

local pl = require "perilune"
local t = require "support"
local describe, it, expect = t.describe, t.it, t.expect

describe("a State", function()
  it("reads what was assigned, in order", function()
    local w = pl.state(pl.zeros { 2 })
    local before = w + 0
    w:assign(w + 1)
    w:assign(w * 10)
    expect(before):to_equal { 0, 0 }
    expect(w):to_equal { 10, 10 }
  end)

  it("keeps shape and dtype", function()
    local w = pl.state(pl.zeros({ 2 }, { dtype = "f64" }))
    w:assign(3)
    w:assign(w + pl.ones { 1 })
    expect(w):to_equal { 4, 4 }
    expect(w.dtype):to_be "f64"
    expect(function() w:assign(pl.zeros { 3 }) end):to_raise "does not fit a State"
  end)

  it("trains if it holds floats, unless told otherwise", function()
    expect(pl.state(pl.zeros { 1 }).trainable):to_be(true)
    expect(pl.state(pl.tensor { 1 }).trainable):to_be(false)
    local w = pl.state(pl.zeros { 1 }, { trainable = false })
    expect(w.trainable):to_be(false)
    w.trainable = true
    expect(w.trainable):to_be(true)
    expect({ pl.is_state(w), w:is_state(), pl.is_state(w + 1), pl.is_tensor(w) }):to_equal { true, true, false, true }
  end)

  it("swaps values with another", function()
    local a, b = pl.state(pl.ones { 2 }), pl.state(pl.zeros { 2 })
    pl.step(function()
      local old = a:detach()
      a:assign(b)
      b:assign(old)
    end)
    expect(a):to_equal { 0, 0 }
    expect(b):to_equal { 1, 1 }
  end)
end)

describe("a step", function()
  it("returns evaluated results and writes at its end", function()
    local w = pl.state(pl.tensor { 1.0, 2.0 })
    local y, n = pl.step(function(k)
      w:assign(w * k)
      return w:sum(), 7
    end, 3)
    expect(y:is_evaluated()):to_be(true)
    expect(y:item()):to_be(9.0)
    expect(n):to_be(7)
    expect(w):to_equal { 3, 6 }
  end)

  it("leaves every State as it was when it raises", function()
    local w = pl.state(pl.tensor { 1.0 })
    expect(function()
      pl.step(function()
        w:assign(w + 1)
        error "no"
      end)
    end):to_raise "no"
    expect(w):to_equal { 1 }
    expect(pl.in_step()):to_be(false)
  end)

  it("lets results outlive it, and names the line of what does not", function()
    local kept, lost
    local result = pl.step(function()
      kept, lost = pl.ones { 2 } * 3, pl.ones { 2 } * 4
      pl.keep(kept)
      return pl.ones { 2 } * 5
    end)
    pl.step(function() return pl.zeros {} end)
    expect(kept):to_equal { 3, 3 }
    expect(result):to_equal { 5, 5 }
    expect(function() return lost:item() end):to_raise "was never evaluated"
  end)

  it("may read a number in the middle", function()
    local y = pl.step(function()
      local x = pl.ones { 3 }
      local n = x:sum():item()
      return x * n
    end)
    expect(y):to_equal { 3, 3, 3 }
  end)

  it("cannot be opened in a step", function()
    expect(function() pl.step(function() pl.step(function() end) end) end):to_raise "inside a step"
  end)

  it("counts its random numbers", function()
    pl.seed(5)
    local a = pl.step(function() return pl.rand { 4 } end):tolist()
    local b = pl.step(function() return pl.rand { 4 } end):tolist()
    pl.seed(5)
    local c = pl.step(function() return pl.rand { 4 } end):tolist()
    expect(c):to_equal(a)
    expect(pl.tensor(a):eq(pl.tensor(b)):any():item()):to_be(false)
  end)
end)

describe("backward", function()
  it("adds gradients up until the step ends", function()
    local w = pl.state(pl.tensor { 1.0, 2.0 })
    pl.step(function()
      (w * w):sum():backward()
      w:sum():backward()
      pl.keep(w.grad)
      w:assign(w - 0.1 * w.grad)
    end)
    expect(w):to_be_near { 0.7, 1.5 }
    expect(w.grad):to_be(nil)
  end)

  it("takes a seed for what is no scalar", function()
    local w = pl.state(pl.tensor { 1.0, 2.0 });
    (w * 3):backward(pl.tensor { 1.0, 10.0 })
    expect(w.grad):to_be_near { 3, 30 }
    w.grad = nil
    expect(w.grad):to_be(nil)
  end)

  it("may be the State itself", function()
    local w = pl.state(pl.tensor { 1.0, 2.0 })
    w.grad = w
    expect(w.grad):to_be_near { 1, 2 }
    w.grad = nil
  end)

  it("passes over frozen States and detached tensors", function()
    local w, frozen = pl.state(pl.ones { 2 }), pl.state(pl.ones { 2 }, { trainable = false });
    (w * frozen + w:detach() * 5):sum():backward()
    expect(w.grad):to_be_near { 1, 1 }
    expect(frozen.grad):to_be(nil)
    w.grad = nil
  end)

  it("says when there is nothing to reach", function()
    expect(function() pl.ones({}):backward() end):to_raise "no trainable State"
    local w = pl.state(pl.ones { 1 })
    expect(function() pl.no_grad(function() return (w * 2):sum() end):backward() end):to_raise "no trainable State"
  end)
end)

describe("grad", function()
  it("gives gradients of any tensor, in order", function()
    local x, y = pl.tensor { 2.0, 3.0 }, pl.tensor { 4.0, 5.0 }
    local dx, dy = pl.grad((x * x * y):sum(), { x, y })
    expect(dx):to_be_near { 16, 30 }
    expect(dy):to_be_near { 4, 9 }
  end)

  it("goes twice, and thrice", function()
    local x = pl.tensor { 0.5, -1.5 }
    local d1 = pl.grad(x:sin():sum(), { x }, { create_graph = true })
    local d2 = pl.grad(d1:sum(), { x }, { create_graph = true })
    local d3 = pl.grad(d2:sum(), { x })
    expect(d1):to_be_near(x:cos():tolist())
    expect(d2):to_be_near((-x:sin()):tolist())
    expect(d3):to_be_near((-x:cos()):tolist())
  end)

  it("gives nil for what is not used, if that is allowed", function()
    local x, y = pl.ones { 2 }, pl.ones { 2 }
    local dx, dy = pl.grad(x:sum(), { x, y }, { allow_unused = true })
    expect(dx):to_equal { 1, 1 }
    expect(dy):to_be(nil)
    expect(function() pl.grad(x:sum(), { x, y }) end):to_raise "does not depend on input 2"
  end)

  it("is a constant unless asked otherwise", function()
    local x = pl.tensor { 2.0 }
    local d = pl.grad((x ^ 3):sum(), { x })
    expect(function() pl.grad(d:sum(), { x }) end):to_raise "does not depend"
  end)
end)

describe("custom", function()
  local swish = pl.custom {
    name = "swish",
    forward = function(x, beta) return x * (x * beta):sigmoid() end,
    backward = function(g, x, beta)
      local s = (x * beta):sigmoid()
      return g * (s + beta * x * s * (1 - s))
    end,
  }

  it("has the forward's value and the backward's gradient", function()
    local x = pl.tensor { -1.0, 0.0, 2.0 }
    expect(swish(x, 1.0)):to_be_near(x:silu():tolist())
    local want = pl.grad(x:silu():sum(), { x })
    expect(pl.grad(swish(x, 1.0):sum(), { x })):to_be_near(want:tolist())
    expect(pl.gradcheck(function(v) return swish(v, 2.0) end, { x })):to_be(true)
  end)

  it("may be differentiated again", function()
    local x = pl.tensor({ 0.3, -0.7 }, { dtype = "f64" })
    local function second(f)
      local d = pl.grad(f(x):sum(), { x }, { create_graph = true })
      return pl.grad(d:sum(), { x }):tolist()
    end
    expect(second(function(v) return swish(v, 1.0) end)):to_be_near(second(function(v) return v:silu() end))
  end)

  it("works inside a step, many times", function()
    local w = pl.state(pl.tensor { 3.0 })
    local opt = pl.optim.SGD({ w }, { lr = 0.1 })
    for _ = 1, 20 do
      pl.step(function()
        local loss = (swish(w, 1.0) ^ 2):sum()
        loss:backward()
        opt:step()
        return loss
      end)
    end
    expect(math.abs(w:item())):to_be_below(1)
  end)

  it("checks what its backward gives", function()
    local both = pl.custom { forward = function(x) return x, x end, backward = function(g) return g end }
    expect(function() return both(pl.ones { 2 }) end):to_raise "returned 2 values"
    local wrong = pl.custom { forward = function(x) return x:sum() end, backward = function(g) return g end }
    local x = pl.ones { 3 }
    expect(function() pl.grad(wrong(x), { x }) end):to_raise "gradient of shape {}"
  end)
end)

describe("gradcheck", function()
  it("accepts right gradients", function()
    local x, w = pl.randn { 2, 3 }, pl.randn { 3, 4 }
    expect(pl.gradcheck(function(a, b) return a:matmul(b):tanh():softmax(-1) end, { x, w })):to_be(true)
    expect(pl.gradcheck(function(a) return a:exp(), a * a end, { x })):to_be(true)
  end)

  it("names the worst element of wrong ones", function()
    local wrong = pl.custom { forward = function(x) return x * x end, backward = function(g, x) return g * x end }
    expect(function() pl.gradcheck(wrong, { pl.tensor { 0.0, 3.0 } }) end):to_raise "gradient of input 1 at {1}"
    expect(function() pl.gradcheck(wrong, {}) end):to_raise "gradcheck"
    expect(function() pl.gradcheck(wrong, { pl.tensor { 1 } }) end):to_raise "no gradient"
  end)
end)

describe("no_grad", function()
  it("passes values through and cuts gradients", function()
    local w = pl.state(pl.ones { 2 })
    local y, word = pl.no_grad(function(k) return w * k, "kept" end, 2)
    expect(word):to_be "kept"
    expect(y):to_equal { 2, 2 }
    expect(function() y:sum():backward() end):to_raise "no trainable State"
  end)

  it("ends with an error too", function()
    pcall(pl.no_grad, function() error "no" end)
    local w = pl.state(pl.ones { 1 });
    (w * 2):sum():backward()
    expect(w.grad):to_equal { 2 }
    w.grad = nil
  end)
end)

describe("autocast", function()
  it("computes matmuls in 16 bits and islands in f32", function()
    local x, w = pl.ones { 2, 3 }, pl.state(pl.ones { 4, 3 })
    local y, p, l = pl.autocast("bf16", function()
      local y = pl.linear(x, w)
      return y, y:softmax(-1), pl.mse_loss(y, pl.zeros { 2, 4 })
    end)
    expect(y.dtype):to_be "bf16"
    expect(p.dtype):to_be "f32"
    expect(l.dtype):to_be "f32"
    expect(w.dtype):to_be "f32"
    expect(pl.linear(x, w).dtype):to_be "f32"
  end)

  it("reads 16-bit copies of weights, which are what a cast gives, whatever happens to the weights", function()
    -- A cast of w has a shadow copy; a cast of w * 1 has none.
    local function train(dtype, read)
      pl.seed(5)
      local w, b, x = pl.state(pl.randn { 6, 6 }), pl.state(pl.randn { 6 }), pl.randn { 8, 6 }
      local seen, copies = {}, pl.memory().by_role.shadow_weights or 0
      local function step(rate, also)
        local loss = pl.step(function()
          local loss = pl.autocast(dtype, function()
            local h = pl.linear(x, read(w), b):gelu()
            return pl.linear(h, read(w)):to("f32"):pow(2):mean()
          end)
          loss:backward()
          w:assign(w - rate * w.grad)
          if also then also(w, b) end
          return loss
        end)
        seen[#seen + 1] = loss:item()
      end
      local function evaluate()
        seen[#seen + 1] = pl.autocast(dtype, function() return pl.linear(x, read(w), b):sum() end):item()
      end
      for _ = 1, 3 do step(0.05) end
      evaluate()
      w:assign(w * 1.5 + 0.01)
      evaluate()
      step(0.05)
      evaluate()
      pcall(pl.step, function()
        w:assign(w + 1)
        evaluate()
        error "this step is not taken"
      end)
      evaluate()
      step(0.05, function(w, b) b:assign(b + w:sum(0)) end)
      step(0.05)
      evaluate()
      seen[#seen + 1] = w:sum():item()
      return seen, (pl.memory().by_role.shadow_weights or 0) - copies
    end
    for _, dtype in ipairs { "bf16", "f16" } do
      local plain, none = train(dtype, function(w) return w * 1 end)
      local same, some = train(dtype, function(w) return w end)
      expect(same):to_equal(plain)
      expect(some):to_be_above(none + 36)
    end
  end)

  it("reads a copy of a weight, not a cast, in what is evaluated between updates", function()
    local w, x = pl.state(pl.randn { 256, 256 }), pl.randn { 8, 256 }
    local function evaluate()
      local y = pl.autocast("bf16", function() return pl.linear(x, w):sum() end):item()
      return y, pl.stats().arena_bytes
    end
    pl.step(function()
      local loss = pl.autocast("bf16", function() return pl.linear(x, w):to("f32"):pow(2):mean() end)
      loss:backward()
      w:assign(w - 0.1 * w.grad)
    end)
    local read, arena = evaluate()
    w:assign(w * 1)
    local cast, larger = evaluate()
    expect(read):to_be(cast)
    expect(larger - arena):to_be_above(256 * 256)
  end)

  it("leaves dtypes alone in tf32, and differs from f32 by the roundings of operands at most", function()
    pl.seed(3)
    -- Large products only: kernels of small ones do not round operands to tf32.
    local x, w = pl.randn { 1024, 1024 }, pl.state(pl.randn { 1024, 1024 })
    local bias = pl.randn { 1024 }
    local function both() return x:matmul(w:t()), pl.linear(x, w, bias) end
    local function gradient(y)
      (y * y):sum():backward()
      local g = w.grad
      w.grad = nil
      return g
    end
    local exact, exact_linear = both()
    local near, near_linear = pl.autocast("tf32", both)
    for _, pair in ipairs { { exact, near }, { exact_linear, near_linear }, { gradient(exact), gradient(near) } } do
      local a, b = pair[1], pair[2]
      expect(b.dtype):to_be "f32"
      local off = ((a - b):abs():max() / a:abs():max()):item()
      expect(off):to_be_below(2e-3)
      if x.device == "cpu" then expect(off):to_be(0.0) else expect(off):to_be_above(1e-6) end
    end
  end)
end)
