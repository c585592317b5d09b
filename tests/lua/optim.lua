-- Tests optimizers, schedules, clipping and averages against PyTorch (golden/optim.lua, golden/schedule.lua).

local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local t = require "support"
local numbers, rates = require "golden.optim", require "golden.schedule"
local describe, it, expect = t.describe, t.it, t.expect

local X, Y = t.golden(numbers.X), t.golden(numbers.Y)
pl.eval(X, Y)

local function weights()
  return { w = pl.state(t.golden(numbers.w)), b = pl.state(t.golden(numbers.b)) }
end

local function loss_of(p) return ((X:matmul(p.w) + p.b):tanh() - Y):pow(2):mean() end

describe("ten steps as PyTorch:", function()
  local makers = {
    sgd = function(p) return optim.SGD(p, { lr = 0.1 }) end,
    sgd_momentum = function(p) return optim.SGD(p, { lr = 0.1, momentum = 0.9, dampening = 0.1, weight_decay = 0.01 }) end,
    sgd_nesterov = function(p) return optim.SGD(p, { lr = 0.1, momentum = 0.9, nesterov = true }) end,
    adam = function(p) return optim.Adam(p, { lr = 0.05 }) end,
    adam_decay = function(p) return optim.Adam(p, { lr = 0.05, betas = { 0.8, 0.99 }, eps = 1e-6, weight_decay = 0.1 }) end,
    adamw = function(p) return optim.AdamW(p, { lr = 0.05, weight_decay = 0.1 }) end,
    rmsprop = function(p) return optim.RMSprop(p, { lr = 0.02 }) end,
    rmsprop_centered = function(p)
      return optim.RMSprop(p, { lr = 0.02, alpha = 0.9, momentum = 0.5, centered = true, weight_decay = 0.01 })
    end,
    lion = function(p) return optim.Lion(p, { lr = 0.01, betas = { 0.9, 0.99 }, weight_decay = 0.1 }) end,
    adafactor = function(p) return optim.Adafactor(p, { lr = 0.05 }) end,
    muon = function(p) return optim.Muon(p, { lr = 0.05, weight_decay = 0.1, adamw = { lr = 0.01 } }) end,
    clip_norm = function(p) return optim.SGD(p, { lr = 0.5, clip_norm = 0.1 }) end,
    clip_value = function(p) return optim.SGD(p, { lr = 0.5, clip_value = 0.02 }) end,
  }
  for _, name in ipairs(pl.tree.names(makers)) do
    for _, scope in ipairs { "a plain loop", "steps" } do
      it(name .. " in " .. scope, function()
        local p, want = weights(), numbers[name]
        local opt = makers[name](p)
        local function step()
          local loss = loss_of(p)
          loss:backward()
          opt:step()
          return loss
        end
        for i = 1, 10 do
          local loss = scope == "steps" and pl.step(step) or step()
          expect(loss:item()):to_be_near(want.losses[i], 2e-5)
        end
        expect(p.w:flatten()):to_be_near(want.w[1], 5e-5)
        expect(p.b:flatten()):to_be_near(want.b[1], 5e-5)
        expect(opt.count):to_be(10)
      end)
    end
  end
end)

describe("an optimizer", function()
  it("applies a rate that a parameter is given after a step", function()
    local a, b = pl.state(pl.ones { 1 }), pl.state(pl.ones { 1 })
    local opt = optim.AdamW({ a, b }, { lr = 0.1, weight_decay = 0 })
    local function step()
      pl.step(function() (a + b):sum():backward(); opt:step() end)
      return b:item()
    end
    local first = step()
    expect(first):to_be_near(0.9, 1e-6)
    local p = opt.groups[1].params[2]
    p.lr = 0
    expect(step()):to_be(first)
    p.lr = 0.2
    expect(step()):to_be_near(first - 0.2, 1e-6)
    p.lr = nil
    opt.groups[1].options.lr = 0.3
    expect(step()):to_be_near(first - 0.5, 1e-6)
    expect(a:item()):to_be_near(0.4, 1e-5)
  end)

  it("names its slots by the paths of the weights", function()
    local opt = optim.AdamW(nn.Linear(2, 3), { lr = 1e-3 })
    local names = {}
    for i, e in ipairs(opt:states()) do names[i] = e.path end
    table.sort(names)
    expect(names):to_equal { "adamw.m.bias", "adamw.m.weight", "adamw.v.bias", "adamw.v.weight" }
  end)

  it("takes groups with options of their own", function()
    local p = weights()
    local opt = optim.SGD({ model = p, { params = function(path) return path == "b" end, lr = 0 }, {} }, { lr = 0.1 })
    loss_of(p):backward()
    opt:step()
    expect(p.b):to_equal { 0, 0, 0, 0 }
    expect(p.w:eq(t.golden(numbers.w)):any():item()):to_be(false)
    expect({ opt:lr(1), opt:lr(2) }):to_equal { 0, 0.1 }
  end)

  it("leaves weights alone that the loss did not reach", function()
    local p = weights()
    local opt = optim.Adam(p, { lr = 0.1 });
    (p.w ^ 2):sum():backward()
    opt:step()
    expect(p.b):to_equal { 0, 0, 0, 0 }
  end)

  it("follows a schedule without a new plan", function()
    local p = weights()
    local opt = optim.SGD(p, { lr = function(step) return 0.1 / (step + 1) end })
    local plans
    for i = 1, 6 do
      loss_of(p):backward()
      opt:step()
      if i == 3 then plans = pl.stats().misses end
    end
    expect(pl.stats().misses):to_be(plans)
    expect(opt:lr()):to_be_near(0.1 / 7)
  end)

  it("works on half weights in f32", function()
    local w = pl.state(pl.ones({ 4 }, { dtype = "bf16" }))
    local opt = optim.AdamW({ w }, { lr = 0.1, weight_decay = 0 });
    (w:to("f32") ^ 2):sum():backward()
    opt:step()
    expect(w.dtype):to_be "bf16"
    expect(w):to_be_near({ 0.9, 0.9, 0.9, 0.9 }, 0.01)
    expect(opt:states()[1].state.dtype):to_be "f32"
  end)
end)

describe("clipping", function()
  it("scales by the norm of all gradients", function()
    local p = { a = pl.state(pl.tensor { 3.0 }), b = pl.state(pl.tensor { 4.0 }) }
    pl.step(function()
      ((p.a ^ 2 + p.b ^ 2):sum() / 2):backward()
      local norm = optim.clip_grad_norm(p, 1)
      pl.keep(norm, p.a.grad, p.b.grad)
      expect(norm:item()):to_be_near(5)
      expect(p.a.grad):to_be_near({ 0.6 }, 1e-5)
      expect(p.b.grad):to_be_near({ 0.8 }, 1e-5)
    end)
  end)

  it("bounds values", function()
    local p = { pl.state(pl.tensor { 3.0, -0.1 }) }
    pl.step(function()
      (p[1] ^ 2):sum():backward()
      optim.clip_grad_value(p, 1)
      expect(p[1].grad):to_be_near { 1, -0.2 }
    end)
  end)
end)

describe("schedules", function()
  it("one_cycle as PyTorch", function()
    local s = optim.one_cycle { peak = 0.1, steps = 20 }
    for i, want in ipairs(rates.one_cycle) do expect(s(i - 1)):to_be_near(want, 1e-9) end
  end)

  it("cosine as PyTorch, behind its warm-up", function()
    local s = optim.cosine { peak = 1.0, floor = 0.1, steps = 10 }
    for i, want in ipairs(rates.cosine) do expect(s(i - 1)):to_be_near(want, 1e-9) end
    local w = optim.cosine { peak = 1.0, warmup = 3, steps = 10 }
    expect({ w(0), w(1), w(2), w(3), w(10), w(99) }):to_be_near { 0.25, 0.5, 0.75, 1, 0, 0 }
  end)

  it("constant, linear_warmup, wsd, piecewise", function()
    expect(optim.constant(0.3)(1000)):to_be(0.3)
    local up = optim.linear_warmup { peak = 1, warmup = 4 }
    expect({ up(0), up(3), up(4), up(50) }):to_be_near { 0.2, 0.8, 1, 1 }
    local wsd = optim.wsd { peak = 1, warmup = 1, steps = 10, decay = 4 }
    expect({ wsd(0), wsd(1), wsd(6), wsd(8), wsd(10) }):to_be_near { 0.5, 1, 1, 0.5, 0 }
    local steps = optim.piecewise { { 0, 1 }, { 10, 0.1 } }
    expect({ steps(0), steps(9), steps(10), steps(99) }):to_be_near { 1, 1, 0.1, 0.1 }
    local lines = optim.piecewise { { 0, 1 }, { 10, 0 }, linear = true }
    expect({ lines(0), lines(5), lines(10), lines(20) }):to_be_near { 1, 0.5, 0, 0 }
  end)
end)

describe("EMA", function()
  it("averages, swaps and copies", function()
    local model = nn.module { w = pl.state(pl.zeros { 1 }), forward = function() end }
    local ema = optim.EMA(model, 0.9)
    local average = 0
    for i = 1, 5 do
      model.w:assign(i)
      ema:update()
      average = 0.9 * average + 0.1 * i
    end
    expect(ema:states()[1].state:item()):to_be_near(average)
    ema:swap()
    expect(model.w:item()):to_be_near(average)
    ema:swap()
    expect(model.w:item()):to_be(5.0)
    ema:copy_to()
    expect(model.w:item()):to_be_near(average)
  end)

  it("warms up", function()
    local model = nn.module { w = pl.state(pl.ones { 1 }), forward = function() end }
    local ema = optim.EMA(model, 0.999, { warmup = true })
    model.w:assign(11)
    ema:update()
    expect(ema:states()[1].state:item()):to_be_near(0.1 * 1 + 0.9 * 11)
  end)
end)

describe("LossScaler", function()
  -- Takes one step with the loss sum(w * g), whose gradient is g for every w.
  local function stepper(make, opts)
    local w = pl.state(pl.tensor { 1.0, -2.0, 3.0 })
    local opt, scaler = make { w }, opts and optim.LossScaler(opts)
    return w, function(g)
      local loss = (w * g):sum();
      (scaler and scaler:scale(loss) or loss):backward()
      opt:step { scaler = scaler }
    end, scaler, opt
  end
  local function adamw(target) return optim.AdamW(target, { lr = 0.1, weight_decay = 0.1, clip_norm = 1 }) end
  local g1, g2 = pl.tensor { 0.5, -1.0, 2.0 }, pl.tensor { 1.0, 0.25, -3.0 }

  it("divides by its factor exactly", function()
    local plain, step = stepper(function(target) return optim.SGD(target, { lr = 0.1 }) end)
    local scaled, scaled_step = stepper(function(target) return optim.SGD(target, { lr = 0.1 }) end, {})
    for _, g in ipairs { g1, g2, g1 } do step(g); scaled_step(g) end
    expect(scaled:tolist()):to_be_near(plain:tolist(), 0)
  end)

  it("makes an update void whose gradients overflowed: as if it had not been", function()
    local with, step, scaler, opt = stepper(adamw, { init = 1024, growth_interval = 2 })
    local without, other = stepper(adamw, { init = 1024, growth_interval = 2 })
    step(g1); other(g1)
    for _, bad in ipairs { math.huge, -math.huge, 0 / 0 } do step(pl.tensor { 1.0, bad, 0.0 }) end
    expect(scaler.factor:item()):to_be(128.0)
    expect(scaler.updates:item()):to_be(1.0)
    step(g2); other(g2)
    expect(with:tolist()):to_be_near(without:tolist(), 0)
    expect(opt.count):to_be(5)
    step(g1)
    expect(scaler.factor:item()):to_be(256.0) -- two good ones in a row
    expect(scaler.good:item()):to_be(0.0)
  end)

  it("never grows to infinity", function()
    local _, step, scaler = stepper(adamw, { init = 2.0 ^ 127, growth_interval = 1 })
    step(pl.tensor { 0.0, 0.0, 0.0 })
    expect(scaler.factor:item()):to_be(2.0 ^ 127)
  end)

  it("refuses what it cannot be", function()
    expect(function() optim.LossScaler { init = 0 } end):to_raise "init is 0"
    expect(function() optim.LossScaler { backoff = 1.5 } end):to_raise "backoff is 1.5"
    expect(function() optim.LossScaler { growht = 2 } end):to_raise "growth"
    local w = pl.state(pl.ones { 1 })
    local opt = optim.SGD({ w }, {})
    w:sum():backward()
    expect(function() opt:step { scaler = {} } end):to_raise "optim.LossScaler()"
  end)
end)

describe("options of optimizers", function()
  it("refuses what would train backwards or not at all", function()
    local w = pl.state(pl.ones { 1 })
    for _, bad in ipairs { -1, 0, 0 / 0 } do
      expect(function() optim.SGD({ w }, { lr = 0.1, clip_norm = bad }) end):to_raise "clip_norm is"
      expect(function() optim.AdamW({ w }, { clip_value = bad }) end):to_raise "clip_value is"
    end
    expect(function() optim.SGD({ w }, { lr = -1 }) end):to_raise "lr is -1"
    expect(function() optim.SGD({ w }, { lr = 0.1, momentum = -0.9 }) end):to_raise "momentum is -0.9"
    expect(function() optim.AdamW({ w }, { weight_decay = -0.1 }) end):to_raise "weight_decay is -0.1"
    expect(function() optim.AdamW({ w }, { lr = 0 / 0 }) end):to_raise "lr is"
    expect(function() optim.AdamW({ w }, { lr = 1 / 0 }) end):to_raise "lr is inf"
    expect(function() optim.AdamW({ { params = { w }, eps = -1 } }) end):to_raise "eps is -1"
    expect(function() optim.RMSprop({ w }, { alpha = 1.5 }) end):to_raise "alpha is 1.5"
  end)

  it("refuses a schedule's rate that is not finite", function()
    local w = pl.state(pl.ones { 1 })
    local opt = optim.SGD({ w }, { lr = function(step) return 1 / step end })
    w:sum():backward()
    expect(function() opt:step() end):to_raise "the schedule returned inf at step 0"
  end)

  it("refuses a negative rate of a schedule or a function", function()
    for _, make in ipairs {
      function() return optim.constant(-1) end,
      function() return optim.cosine { peak = -1, steps = 10 } end,
      function() return optim.cosine { peak = 1, floor = -1, steps = 10 } end,
      function() return optim.linear_warmup { peak = -1, warmup = 2 } end,
      function() return optim.wsd { peak = -1, steps = 10, decay = 2 } end,
      function() return optim.one_cycle { peak = -1, steps = 10 } end,
    } do
      expect(make):to_raise "-1"
    end
    for _, lr in ipairs { function() return -1 end, optim.piecewise { { 0, -1 } } } do
      local w = pl.state(pl.ones { 1 })
      local opt = optim.SGD({ w }, { lr = lr })
      w:sum():backward()
      expect(function() opt:step() end):to_raise "the schedule returned -1"
    end
  end)

  it("uses the rate of a group that is changed later, and refuses a bad one", function()
    local w = pl.state(pl.ones { 1 })
    local opt = optim.SGD({ w }, { lr = 0.5 })
    local function step()
      w:sum():backward()
      opt:step()
    end
    step()
    expect(w):to_equal { 0.5 }
    opt.groups[1].options.lr = 0
    expect(opt:lr()):to_be(0)
    step()
    expect(w):to_equal { 0.5 }
    opt.groups[1].options.lr = -1
    w:sum():backward()
    expect(function() opt:step() end):to_raise "lr is -1 at step 2"
  end)

  it("refuses to replace a method by a value", function()
    local opt = optim.AdamW({ pl.state(pl.ones { 1 }) }, {})
    expect(function() opt.lr = 0 end):to_raise "lr is a method, and cannot be set to 0"
    expect(function() opt.step = false end):to_raise "step is a method"
    expect(opt:lr()):to_be(1e-3)
    opt.note = "kept"
    expect(opt.note):to_be "kept"
  end)
end)

describe("counts of updates", function()
  -- Trains a from the first step on and b only from step `late`, with one optimizer, and b with an optimizer made at that step.
  -- Both must end with the same bits of b, which is where PyTorch's count for each parameter ends.
  local function compare(make, late, steps, scaled)
    local start = { 1.0, -2.0, 0.5, 3.0 }
    local function state() return pl.state(pl.tensor(start)) end
    local a, b, alone = state(), state(), state()
    local both, own = make { a, b }, nil
    local scalers = scaled and { optim.LossScaler(), optim.LossScaler() } or {}
    local function take(opt, scaler, loss)
      (scaler and scaler:scale(loss) or loss):backward()
      opt:step { scaler = scaler }
    end
    for i = 1, steps do
      -- With a scaler, the gradients of some steps overflow and the update is void.
      local weight = scaled and i % 4 == 2 and math.huge or 0.5 + i % 3
      local used = i >= late and (i < late + 2 or i > late + 3) -- later, b misses two more
      local loss = (a ^ 2):sum() * weight
      if used then loss = loss + (b ^ 2):sum() * weight end
      take(both, scalers[1], loss)
      if used then
        own = own or make { alone }
        take(own, scalers[2], (alone ^ 2):sum() * weight)
      end
    end
    return b, alone, both, own
  end
  local makers = {
    Adam = function(p) return optim.Adam(p, { lr = 0.1, weight_decay = 0.1 }) end,
    AdamW = function(p) return optim.AdamW(p, { lr = 0.1 }) end,
    ["SGD with dampening"] = function(p) return optim.SGD(p, { lr = 0.01, momentum = 0.9, dampening = 0.5 }) end,
    Adafactor = function(p) return optim.Adafactor(p, { lr = 0.5 }) end,
  }
  for _, name in ipairs(pl.tree.names(makers)) do
    for _, scaled in ipairs { false, true } do
      it(("are those of each parameter: %s%s"):format(name, scaled and " with a loss scaler" or ""), function()
        local late, alone, both, own = compare(makers[name], 6, 14, scaled)
        expect(late:tolist()):to_be_near(alone:tolist(), 0)
        expect(both.count):to_be(14)
        expect(own.count):to_be(7)
        expect(late:tolist()[1] ~= 1.0):to_be(true)
      end)
    end
  end

  it("gives a parameter whose first gradient comes after 10,000 steps a first step of the rate", function()
    local a, b = pl.state(pl.ones { 1 }), pl.state(pl.ones { 1 })
    local opt = optim.Adam({ a, b }, { lr = 1e-3 })
    for _ = 1, 10000 do
      pl.step(function() (a ^ 2):sum():backward(); opt:step() end)
    end
    pl.step(function() (b ^ 2):sum():backward(); opt:step() end)
    expect(1 - b:item()):to_be_near(0.001, 1e-6)
  end)

  it("do not count a step that failed", function()
    local a, b = pl.state(pl.ones { 1 }), pl.state(pl.ones { 1 })
    local opt = optim.AdamW({ a, b }, { lr = 1e-3 })
    local function step(x) x:sum():backward(); opt:step() end
    step(a)
    local counts = opt:counts()
    step(b)
    opt:set_counts(counts)
    expect({ opt.count, opt.absences, opt.groups[1].params[2].missed }):to_equal { 1, 1, 1 }
    step(a + b)
    opt:set_counts { count = 0 }
    expect({ opt.count, opt.absences, opt.groups[1].params[2].missed }):to_equal { 0, 0, 0 }
  end)
end)

describe("zero_grad", function()
  it("drops the gradients of an optimizer's parameters and of no others", function()
    local a, b = pl.state(pl.ones { 1 }), pl.state(pl.ones { 1 })
    local opt = optim.SGD({ a }, { lr = 1 })
    pl.step(function()
      ((a + b) * 5):sum():backward()
      opt:zero_grad();
      (a * 2):sum():backward()
      opt:step()
      expect(b.grad ~= nil):to_be(true)
    end)
    expect(a):to_equal { -1 } -- 1 - 2, without the 5 of the first loss
  end)

  it("drops the gradients of a module", function()
    local model = nn.Linear(2, 1, { bias = false })
    pl.step(function()
      model(pl.ones { 1, 2 }):sum():backward()
      expect(model.weight.grad ~= nil):to_be(true)
      model:zero_grad()
      expect(model.weight.grad):to_be(nil)
    end)
  end)
end)
