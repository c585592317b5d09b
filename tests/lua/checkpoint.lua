-- Tests pl.checkpoint and the option `checkpoint` of layers: equal bits with dropout, States assigned once, errors.

local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local t = require "support"
local describe, it, expect = t.describe, t.it, t.expect

---Computes the gradients of `weights` after loss(span):backward(), for span = pl.checkpoint and a plain call; and the arena's bytes.
local function both(weights, loss)
  local out = {}
  for k, span in ipairs { function(fn, ...) return fn(...) end, pl.checkpoint } do
    pl.seed(5)
    local list = { pl.step(function()
      local l = loss(span)
      l:backward()
      local grads = { l }
      for _, w in ipairs(weights) do grads[#grads + 1] = w.grad end
      return table.unpack(grads)
    end) }
    local stats = pl.stats()
    out[k] = { arena = stats.arena_bytes, live = stats.live_bytes }
    for i, g in ipairs(list) do out[k][i] = g:tolist() end
  end
  return out[1], out[2]
end

local function same(a, b)
  expect(#a):to_be_above(0)
  for i = 1, #a do expect(b[i]):to_equal(a[i]) end
end

describe("pl.checkpoint", function()
  it("passes arguments and results through, and takes modules", function()
    local a, b, c = pl.checkpoint(function(x, y, z) return x + 1, y, z end, pl.tensor { 1.0 }, 7, "text")
    expect(a):to_equal { 2 }
    expect(b):to_be(7)
    expect(c):to_be("text")
    local layer = nn.Linear(3, 2)
    expect(pl.checkpoint(layer, pl.ones { 4, 3 })):to_equal(layer(pl.ones { 4, 3 }))
  end)

  it("changes no bit of the gradients, with dropout", function()
    local w1, w2 = pl.state(pl.randn { 16, 64 }), pl.state(pl.randn { 64, 16 })
    local x = pl.eval(pl.randn { 32, 16 })
    same(both({ w1, w2 }, function(span)
      local function block(h) return h + h:matmul(w1):gelu():dropout(0.3):matmul(w2):layer_norm() end
      local h = x
      for _ = 1, 4 do h = span(block, h) end
      return (h * h):mean()
    end))
  end)

  it("in bf16 too", function()
    local w1, w2 = pl.state(pl.randn { 16, 64 }), pl.state(pl.randn { 64, 16 })
    local x = pl.eval(pl.randn { 32, 16 })
    same(both({ w1, w2 }, function(span)
      return pl.autocast("bf16", function()
        local function block(h) return h + pl.linear(pl.linear(h, w1:t()):gelu():dropout(0.3), w2:t()) end
        local h = x
        for _ = 1, 3 do h = span(block, h) end
        return (h:to "f32" * h):mean()
      end)
    end))
  end)

  it("makes the memory of a deep chain fall", function()
    local weights = {}
    for i = 1, 12 do weights[i] = pl.state(pl.randn { 32, 32 } * 0.1) end
    local x = pl.eval(pl.randn { 256, 32 })
    local saved, again = both(weights, function(span)
      local h = x
      for i = 1, 12 do
        h = span(function(h) return h + (h:matmul(weights[i]):tanh() * h):sigmoid():matmul(weights[i]):exp():log1p() end, h)
      end
      return h:sum()
    end)
    same(saved, again)
    expect(again.live * 2):to_be_below(saved.live)
    expect(again.arena * 2):to_be_below(saved.arena)
  end)

  it("nests", function()
    local w = pl.state(pl.randn { 8, 8 })
    local x = pl.eval(pl.randn { 16, 8 })
    same(both({ w }, function(span)
      local function inner(h) return h:matmul(w):tanh():dropout(0.2) end
      local function outer(h) return span(inner, span(inner, h)):softmax(-1):matmul(w):tanh() end
      return span(outer, span(outer, x)):sum()
    end))
  end)

  it("keeps what is used outside: several results, and what slipped out", function()
    local w = pl.state(pl.randn { 8, 8 })
    local x = pl.eval(pl.randn { 16, 8 })
    same(both({ w }, function(span)
      local slipped
      local a, b = span(function(h)
        local u = h:matmul(w)
        slipped = u:tanh()
        return slipped * 2, u:exp()
      end, x)
      return (a * slipped):sum() + b:mean()
    end))
  end)

  it("assigns a State of its inside once", function()
    local x = pl.eval(pl.randn { 64, 4 })
    local stats = {}
    for k, span in ipairs { function(fn, ...) return fn(...) end, pl.checkpoint } do
      pl.seed(1)
      local net = nn.Sequential { nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1) }
      local count = pl.state(pl.zeros {})
      local opt = optim.SGD(net, { lr = 0.1 })
      for _ = 1, 3 do
        pl.step(function()
          local y = span(function(h)
            count:assign(count + 1)
            return net(h)
          end, x)
          local loss = (y * y):mean()
          loss:backward()
          opt:step()
          return loss
        end)
      end
      stats[k] = { count = count:item() }
      for _, e in ipairs(net:states()) do stats[k][e.path] = e.state:tolist() end
    end
    expect(stats[2].count):to_be(3)
    expect(stats[2]):to_equal(stats[1])
  end)

  it("does nothing under no_grad, and lets detach and frozen weights be", function()
    local w, frozen = pl.state(pl.randn { 4, 4 }), pl.state(pl.randn { 4, 4 }, { trainable = false })
    local x = pl.eval(pl.randn { 8, 4 })
    same(both({ w }, function(span)
      local h = span(function(h) return pl.no_grad(function() return h:matmul(w):exp() end) + h:matmul(frozen):detach() end, x)
      return span(function(h) return (h:matmul(w) * h):tanh() end, h):sum()
    end))
  end)

  it("holds functions with a backward of their own", function()
    local w = pl.state(pl.randn { 4, 4 })
    local x = pl.eval(pl.randn { 8, 4 })
    local swish = pl.custom {
      forward = function(h) return h * h:sigmoid() end,
      backward = function(g, h)
        local s = h:sigmoid()
        return g * (s + h * s * (1 - s))
      end,
    }
    same(both({ w }, function(span)
      local h = x
      for _ = 1, 3 do h = span(function(h) return swish(h:matmul(w)):tanh() end, h) end
      return h:sum()
    end))
  end)

  it("has right derivatives, first and second", function()
    local w = pl.eval(pl.randn({ 3, 3 }, { dtype = "f64" }))
    local function f(x)
      local h = pl.checkpoint(function(h) return h:matmul(w):tanh() * h end, x)
      return pl.checkpoint(function(h) return (h * h):softmax(-1):log() end, h)
    end
    expect(pl.gradcheck(f, { pl.randn({ 4, 3 }, { dtype = "f64" }) })):to_be(true)
    local c = pl.eval(pl.randn({ 2, 3 }, { dtype = "f64" }))
    local function slope(x) return (pl.grad((f(x) * x):sum(), { x }, { create_graph = true }) * c):sum() end
    local x = pl.eval(pl.randn({ 2, 3 }, { dtype = "f64" }))
    local second = pl.grad(slope(x), { x }):flatten():tolist()
    for k = 0, 5 do
      local step = pl.arange(6):eq(k):to("f64"):reshape(2, 3) * 1e-5
      local up, down = slope(pl.eval(x + step)):item(), slope(pl.eval(x - step)):item()
      expect(second[k + 1]):to_be_near((up - down) / 2e-5, 1e-6)
    end
  end)

  it("takes a gradient inside, and a host read", function()
    local w = pl.state(pl.randn { 3, 3 })
    local x = pl.eval(pl.randn { 4, 3 })
    same(both({ w }, function(span)
      local y = span(function(h)
        local u = h:matmul(w):tanh()
        expect(u:sum():item()):to_be_below(1e9)
        local slope = pl.grad(u:sum(), { w }, { create_graph = true })
        return (u * u):sum() + (slope * slope):sum()
      end, x)
      return y * 2
    end))
  end)

  it("refuses what it cannot call", function()
    expect(function() pl.checkpoint(3) end):to_raise "argument 1 is 3; it must be a function or a module"
    expect(function() pl.checkpoint(pl.ones { 2 }, nn.ReLU()) end):to_raise "the function comes first"
    expect(function() pl.checkpoint(function() error("inside") end) end):to_raise "inside"
  end)
end)

describe("the layers' option", function()
  local function train(make, checkpoint)
    pl.seed(2)
    local net = make(checkpoint)
    local opt = optim.AdamW(net, { lr = 1e-2 })
    local x = pl.eval(pl.randn { 4, 6, 16 })
    local out = {}
    for k = 1, 3 do
      out[k] = pl.step(function()
        local y = net(x)
        local loss = (y * y):mean()
        loss:backward()
        opt:step()
        return loss
      end):item()
    end
    for _, e in ipairs(net:states()) do out[e.path] = e.state:tolist() end
    return out
  end

  it("nn.TransformerBlock { checkpoint = true }", function()
    local function make(on)
      return nn.Sequential {
        nn.TransformerBlock(16, 2, { causal = true, dropout = 0.1, checkpoint = on }),
        nn.TransformerBlock(16, 2, { causal = true, dropout = 0.1, checkpoint = on, norm = "rms", mlp = "swiglu", rope = true }),
      }
    end
    expect(train(make, true)):to_equal(train(make, false))
  end)

  it("nn.Sequential(list, { checkpoint = n })", function()
    local function make(on)
      return nn.Sequential({ nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16), nn.LayerNorm(16) }, { checkpoint = on })
    end
    local plain = train(make, false)
    expect(train(make, true)):to_equal(plain)
    expect(train(make, 2)):to_equal(plain)
    expect(function() make(0) end):to_raise "checkpoint"
    expect(function() make(1.5) end):to_raise "checkpoint"
    expect(function() nn.Sequential({ nn.ReLU() }, { checkpont = true }) end):to_raise "Did you mean 'checkpoint'"
  end)
end)
