-- Tests the default training loop: steps, evaluation, accumulation, early stopping, averages, resume, memorise.

local pl = require "perilune"
local nn, optim, data, metrics, train = pl.nn, pl.optim, pl.data, pl.metrics, pl.train
local t = require "support"
local describe, it, expect = t.describe, t.it, t.expect

local function recipe_of(changes)
  local recipe = {
    name = "test",
    params = { steps = 20, batch = 16, lr = 0.05, seed = 3 },
    data = function(p)
      local label = pl.randint(0, 2, { 200 })
      local set = data.tensors { x = pl.randn { 200, 2 } + label:unsqueeze(1) * 4 - 2, y = label }
      return { train = set:split("train", 0.8, 1):shuffle(1):batch(p.batch), valid = set:split("valid", 0.2, 1):batch(15) }
    end,
    model = function() return nn.Sequential { nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2) } end,
    optimizer = function(p, model) return optim.Adam(model, { lr = p.lr }) end,
    loss = function(model, batch)
      local logits = model(batch.x)
      return pl.cross_entropy(logits, batch.y), { accuracy = metrics.accuracy(logits, batch.y) }
    end,
  }
  for k, v in pairs(changes or {}) do recipe[k] = v end
  return recipe
end

local function params(changes)
  local p = { steps = 20, batch = 16, lr = 0.05, seed = 3 }
  for k, v in pairs(changes or {}) do p[k] = v end
  return p
end

local function losses(run, n)
  local out = {}
  for i = 1, n do out[i] = run:step().loss:item() end
  return out
end

local function weights(run)
  local out = {}
  for _, e in ipairs(run:states()) do out[e.path] = e.state:tolist() end
  return out
end

describe("edits of the batch", function()
  local function edited(drop_last)
    return recipe_of {
      data = function(p)
        local set = data.tensors { x = pl.randn { 50, 2 }, y = pl.zeros({ 50 }, { dtype = "i64" }) }
        return { train = set:shuffle(1):batch(p.batch, { drop_last = drop_last }) }
      end,
    }
  end

  ---Takes steps with each batch size and accumulation in turn, as a run that is edited does; returns the samples of all steps.
  local function samples(drop_last, parts)
    local cursor, run, all, steps = nil, nil, {}, 0
    for _, part in ipairs(parts) do
      run = train.new(edited(drop_last), params { batch = part[1], accumulate = part[2] })
      if cursor then run:seek(cursor) end
      if part[3] > 0 then run:step(part[3]) end
      steps, cursor = steps + part[3], run:cursor()
      -- A resume without an edit goes on with the same segments.
      local again = train.new(edited(drop_last), params { batch = part[1], accumulate = part[2] })
      again:seek(cursor)
      expect(again:cursor()):to_equal(cursor)
    end
    for step = 1, steps do
      local _, ids = run:samples_of(step)
      for _, id in ipairs(ids) do all[#all + 1] = id end
    end
    return all, cursor
  end

  local function stream(count)
    return select(2, data.tensors({ x = pl.zeros { 50 } }):shuffle(1):batch(1):ids_at(0, 0, count))
  end

  it("neither repeat nor skip a sample", function()
    local all, cursor = samples(false, { { 8, 1, 5 }, { 12, 1, 3 }, { 4, 3, 2 }, { 4, 3, 2 }, { 16, 1, 2 } })
    expect(#all):to_be(40 + 36 + 48 + 32)
    expect(all):to_equal(stream(#all))
    expect({ cursor.sample, cursor.epoch, cursor.index }):to_equal { 156, 3, 6 }
    expect(cursor.segments):to_be "0 0 8 1; 5 40 12 1; 8 76 4 3; 12 124 16 1"
  end)

  it("omit only the samples that do not fill a batch, with drop_last", function()
    local all = samples(true, { { 16, 1, 2 }, { 15, 1, 2 }, { 10, 2, 3 } })
    local want = stream(200)
    -- 32 of the first epoch, and one batch of 15; the second epoch to its 45th sample; the fourth from its first on.
    local places = { { 1, 47 }, { 51, 65 }, { 66, 95 }, { 101, 130 } }
    local expected = {}
    for _, range in ipairs(places) do table.move(want, range[1], range[2], #expected + 1, expected) end
    expect(#all):to_be(32 + 30 + 60)
    expect(all):to_equal(expected)
  end)

  it("before the first step of another edit leave no segment", function()
    local _, cursor = samples(false, { { 8, 1, 2 }, { 12, 1, 0 }, { 10, 1, 1 } })
    expect(cursor.segments):to_be "0 0 8 1; 2 16 10 1"
  end)
end)

describe("a run", function()
  it("learns, counts, and evaluates", function()
    local run = train.new(recipe_of())
    expect(run:finished()):to_be(false)
    local before = run:evaluate "valid"
    while not run:finished() do run:step() end
    expect(run.count):to_be(20)
    local after = run:evaluate "valid"
    expect(after.loss):to_be_below(before.loss)
    expect(after.accuracy):to_be_above(0.9)
  end)

  it("gives the same bits again", function()
    local a, b = train.new(recipe_of()), train.new(recipe_of())
    expect(losses(a, 10)):to_equal(losses(b, 10))
    expect(weights(a)):to_equal(weights(b))
    expect(losses(train.new(recipe_of(), params { seed = 4 }), 1)[1] == losses(train.new(recipe_of()), 1)[1]):to_be(false)
  end)

  it("names its States as checkpoints do", function()
    local run = train.new(recipe_of { ema = 0.9 })
    local names = {}
    for _, e in ipairs(run:states()) do names[e.path] = true end
    for _, name in ipairs { "model.1.weight", "model.3.bias", "optim.adam.m.1.weight", "optim.adam.v.3.bias", "ema.1.weight" } do
      expect(names[name]):to_be(true)
    end
  end)

  it("metrics that are functions of means combine over batches and micro-batches", function()
    local function loss(model, batch)
      local logits = model(batch.x)
      local mean = pl.cross_entropy(logits, batch.y)
      local square = (logits ^ 2):mean()
      return mean, { perplexity = metrics.perplexity(mean * 5), rms = metrics.new { mean = { square = square }, finish = function(m) return m.square:sqrt() end } }
    end
    local split = train.new(recipe_of { loss = loss })
    local result = split:evaluate "valid"
    expect(result.perplexity):to_be_near(math.exp(5 * result.loss), 1e-3)
    local evaluated = train.new(recipe_of { evaluate = function(model, batch) return (select(2, loss(model, batch))) end }):evaluate "valid"
    expect(evaluated.perplexity):to_be(result.perplexity)
    expect(evaluated.rms):to_be(result.rms)
    expect(evaluated.loss):to_be(nil)
    local step = train.new(recipe_of { loss = loss, accumulate = 3 }):step()
    expect(step.metrics.perplexity:item()):to_be_near(math.exp(5 * step.loss:item()), 1e-3)
    local one = train.new(recipe_of { loss = loss }):step()
    expect(one.metrics.perplexity:item()):to_be_near(math.exp(5 * one.loss:item()), 1e-3)
  end)

  it("evaluates the mean over samples, not over batches", function()
    local run = train.new(recipe_of())
    local whole = recipe_of { data = function(p)
      local d = recipe_of().data(p)
      local set = d.valid
      return { train = d.train, valid = { batch_at = function() return set.make(0, 40), 40 end, batches = function() return 1 end } }
    end }
    expect(run:evaluate("valid").loss):to_be_near(train.new(whole):evaluate("valid").loss, 1e-6)
    expect(run:evaluate("valid", 1).loss > 0):to_be_true()
  end)

  it("accumulates to the gradient of the large batch", function()
    local large = train.new(recipe_of(), params { batch = 32 })
    local small = train.new(recipe_of(), params { batch = 8, accumulate = 4 })
    local a, b = losses(large, 5), losses(small, 5)
    expect(b):to_be_near(a, 1e-5)
    local wa, wb = weights(large), weights(small)
    for path, value in pairs(wa) do
      if path:find "^model" then expect(wb[path]):to_be_near(value, 1e-5) end
    end
    expect(small:step().samples):to_be(32)
  end)

  it("refuses to accumulate with a step of the recipe, which gets one batch", function()
    local function own(run, batch)
      local loss = run.recipe.loss(run.model, batch)
      loss:backward()
      run.opt:step()
      return loss
    end
    expect(function() train.new(recipe_of { step = own }, params { accumulate = 4 }) end):to_raise "accumulate is 4, but recipe.step gets one batch"
    expect(train.new(recipe_of { step = own }, params { accumulate = 1 }):step().samples):to_be(16)
  end)

  it("weighs micro-batches by the weights that the loss gives", function()
    -- A ragged loss: the mean over the samples with y = 1 alone.
    local function ragged(model, batch)
      local counted = batch.y:to("f32")
      local each = pl.cross_entropy(model(batch.x), batch.y, { reduction = "none" })
      local n = counted:sum()
      return (each * counted):sum() / n:clamp(1), nil, n
    end
    local large = train.new(recipe_of { loss = ragged }, params { batch = 32 })
    local small = train.new(recipe_of { loss = ragged }, params { batch = 8, accumulate = 4 })
    expect(losses(small, 4)):to_be_near(losses(large, 4), 1e-5)
  end)

  it("divides by the tokens that count, without being told", function()
    -- Sequences with ignored targets; in some micro-batches all are ignored.
    local V, T = 5, 6
    local function recipe(seed, weight)
      return {
        name = "ragged", params = {},
        data = function(p)
          pl.seed(seed)
          local y = pl.randint(0, V, { 32, T })
          local some = pl.rand({ 32, T }):lt(0.6):logical_and(pl.arange(32):lt(20):unsqueeze(1))
          y = pl.where(some, y, pl.full({ 32, T }, -100, { dtype = "i64" }))
          return { train = data.tensors { x = pl.randn { 32, T, 3 }, y = y }:batch(p.batch) }
        end,
        model = function() return nn.Linear(3, V) end,
        optimizer = function(p, model) return optim.SGD(model, { lr = p.lr }) end,
        loss = function(model, batch)
          return pl.cross_entropy(model(batch.x):flatten(0, 1), batch.y:flatten(), { weight = weight })
        end,
      }
    end
    for seed, weight in ipairs { false, pl.eval(pl.rand { V } + 0.5) } do
      local large = train.new(recipe(seed, weight or nil), params { batch = 32 })
      local small = train.new(recipe(seed, weight or nil), params { batch = 4, accumulate = 8 })
      expect(losses(small, 4)):to_be_near(losses(large, 4), 1e-5)
      local wa, wb = weights(large), weights(small)
      for path, value in pairs(wa) do
        if path:find "^model" then expect(wb[path]):to_be_near(value, 1e-5) end
      end
      large.data.valid, small.data.valid = large.data.train, small.data.train
      expect(large:evaluate("valid").loss):to_be_below(10)
    end
  end)

  it("stops early", function()
    local run = train.new(recipe_of {
      early_stop = { metric = "valid/score", patience = 2, mode = "max" },
      evaluate = function() return { score = pl.tensor(1.0) } end,
    })
    run:evaluate "valid"
    expect(run:finished()):to_be(false)
    run:evaluate "valid"
    expect(run:finished()):to_be(false)
    run:evaluate "valid"
    expect(run:finished()):to_be(true)
  end)

  it("evaluates with averaged weights and goes on with its own", function()
    local run = train.new(recipe_of { ema = 0.9 })
    losses(run, 5)
    local own = run.model[1].weight:tolist()
    run:evaluate "valid"
    expect(run.model[1].weight):to_equal(own)
    expect(#run.ema:states()):to_be(4)
  end)

  it("leaves nothing behind where an evaluation raises", function()
    local fails = true
    local run = train.new(recipe_of {
      ema = 0.9,
      evaluate = function(model, batch)
        if fails then error "no" end
        return pl.cross_entropy(model(batch.x), batch.y)
      end,
    })
    losses(run, 5)
    local before = weights(run)
    expect(function() run:evaluate "valid" end):to_raise "no"
    expect(run.model.training):to_be(true)
    for path, value in pairs(weights(run)) do expect(value):to_equal(before[path]) end
    fails = false
    expect(run:evaluate("valid").loss > 0):to_be_true()
  end)

  it("records a dry run of a step without taking it", function()
    local function recipe()
      return recipe_of { ema = 0.9, model = function()
        return nn.Sequential { nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2) }
      end }
    end
    local straight = train.new(recipe())
    losses(straight, 6)
    local run = train.new(recipe())
    losses(run, 3)
    local before = weights(run)
    run:dry_run()
    expect(run.count):to_be(3)
    expect(run.opt.count):to_be(3)
    expect(run.ema.count):to_be(3)
    for path, value in pairs(weights(run)) do expect(value):to_equal(before[path]) end
    losses(run, 3)
    local b = weights(run)
    for path, value in pairs(weights(straight)) do expect(b[path]):to_equal(value) end
  end)

  it("knows in a dry run whether such a step has been planned, whatever guards it", function()
    for _, options in ipairs { {}, { precision = "bf16" }, { precision = "fp16" }, { on_nan = "skip" }, { on_nan = "warn", accumulate = 2 } } do
      local run = train.new(recipe_of(options))
      losses(run, 3)
      expect(run:dry_run("code")):to_be(true)
      run.opt.groups[1].options.lr = 0.5
      expect(run:dry_run("code")):to_be(true)
      expect(run:dry_run()):to_be(false)
    end
    local other = train.new(recipe_of { loss = function(model, batch) return model(batch.x):tan():cos():tan():mean() end })
    expect(other:dry_run("code")):to_be(false)
  end)

  it("raises in a dry run what a step or an evaluation would raise", function()
    local run = train.new(recipe_of { loss = function(model, batch) return model(batch.x):matmul(pl.zeros { 3, 1 }):mean() end })
    expect(function() run:dry_run() end):to_raise "matmul"
    expect(run.opt.count):to_be(0)
    run = train.new(recipe_of { evaluate = function(model, batch) return model(batch.x):matmul(pl.zeros { 3, 1 }):mean() end })
    expect(function() run:dry_run() end):to_raise "matmul"
    expect(run.model.training):to_be(true)
    expect(function() train.new(recipe_of { keep = { lst = 3 } }) end):to_raise "last"
    expect(function() train.new(recipe_of { keep = { last = 3, mode = "best" } }) end):to_raise "mode"
  end)

  it("goes on from a cursor with the same bits", function()
    local straight = train.new(recipe_of())
    losses(straight, 12)
    local first = train.new(recipe_of())
    losses(first, 6)
    local cursor, saved = first:cursor(), weights(first)
    local second = train.new(recipe_of())
    for _, e in ipairs(second:states()) do e.state:assign(pl.tensor(saved[e.path])) end
    second:seek(cursor)
    pl.end_step()
    losses(second, 6)
    expect(second.count):to_be(12)
    local a, b = weights(straight), weights(second)
    for path, value in pairs(a) do
      if path:find "^model" then expect(b[path]):to_equal(value) end
    end
  end)

  it("takes a step of the recipe's own", function()
    local run = train.new(recipe_of { step = function(r, batch)
      local loss = pl.cross_entropy(r.model(batch.x), batch.y)
      loss:backward()
      r.opt:step()
      return loss, { twice = loss * 2 }
    end })
    local result = run:step()
    expect(result.metrics.twice:item()):to_be_near(result.loss:item() * 2)
  end)

  it("takes the same default step as its short form in a recipe", function()
    local recipe = recipe_of()
    recipe.step = function(run, batch)
      local loss, values = recipe.loss(run.model, batch)
      loss:backward()
      run.opt:step()
      return loss, values
    end
    local own, default = train.new(recipe), train.new(recipe_of())
    expect(losses(own, 5)):to_equal(losses(default, 5))
    expect(weights(own)):to_equal(weights(default))
  end)

  -- A recipe of two optimizers: G updates the first layer in every second step, D the last layer in every step.
  local function pair(changes)
    local all = {
      optimizer = function(p, model)
        return { G = optim.AdamW(model[1], { lr = optim.linear_warmup { peak = p.lr, warmup = 8 } }), D = optim.Adam(model[3], { lr = p.lr }) }
      end,
      step = function(run, batch)
        local loss = pl.cross_entropy(run.model(batch.x), batch.y)
        loss:backward()
        if run.count % 2 == 0 then run.opt.G:step() end
        run.opt.D:step()
        return loss
      end,
    }
    for k, v in pairs(changes or {}) do all[k] = v end
    return recipe_of(all)
  end

  it("saves and restores several optimizers by name", function()
    local straight, first, second = train.new(pair()), train.new(pair()), train.new(pair())
    losses(straight, 9)
    losses(first, 5)
    local names, cursor, saved = {}, first:cursor(), weights(first)
    for i, e in ipairs(first:states()) do names[i] = e.path end
    local text = table.concat(names, " ")
    expect(text):to_contain "optim.D.adam.m.weight"
    expect(text):to_contain "optim.G.adamw.v.bias"
    expect({ cursor["optim.G.updates"], cursor["optim.D.updates"], cursor.updates }):to_equal { 3, 5 }
    for _, e in ipairs(second:states()) do e.state:assign(pl.tensor(saved[e.path])) end
    second:seek(cursor)
    pl.end_step()
    losses(second, 4)
    expect(weights(second)):to_equal(weights(straight))
    expect({ second.opt.G.count, second.opt.D.count }):to_equal { 5, 9 }
    expect(#second:rates()):to_be(2)
  end)

  it("guards and repeats steps of several optimizers", function()
    local run, plain = train.new(pair { on_nan = "skip" }), train.new(pair())
    expect(losses(run, 4)):to_equal(losses(plain, 4))
    run:dry_run()
    expect({ run.opt.G.count, run.opt.D.count }):to_equal { 2, 4 }
    expect(run:diagnose(4)):to_be(nil)
    expect({ run.count, run.opt.G.count, run.opt.D.count }):to_equal { 4, 2, 4 }
    local half = train.new(pair { precision = "fp16", step = function(r, batch)
      local loss = pl.cross_entropy(r.model(batch.x), batch.y)
      r.scaler:scale(loss):backward()
      r.opt.G:step { scaler = r.scaler }
      r.opt.D:step { scaler = r.scaler }
      return loss
    end })
    losses(half, 3)
    expect(weights(half)["optim.G.adamw.step.weight"]):to_be(3.0)
    expect(weights(half)["optim.D.adam.step.bias"]):to_be(3.0)
  end)

  it("refuses an optimizer that the run would not save, at its step", function()
    local hidden
    local function recipe()
      return recipe_of {
        optimizer = function(p, model)
          hidden = optim.SGD(model[3], { lr = p.lr })
          return optim.Adam(model[1], { lr = p.lr })
        end,
        step = function(run, batch)
          local loss = pl.cross_entropy(run.model(batch.x), batch.y)
          loss:backward()
          run.opt:step()
          hidden:step()
          return loss
        end,
      }
    end
    expect(function() train.new(recipe()):step() end):to_raise "the run does not save, made at lua/train.lua"
    expect(function() train.new(recipe()):dry_run() end):to_raise "return { G = ..., D = ... }"
    -- One that lives for a step alone has nothing to save.
    local inner = recipe_of { step = function(run, batch)
      local w = pl.state(pl.zeros { 2 })
      local opt = optim.SGD({ w }, { lr = 0.1 })
      local loss = pl.cross_entropy(run.model(batch.x + w), batch.y)
      loss:backward()
      opt:step()
      run.opt:step()
      return loss
    end }
    expect(train.new(inner):step().loss:item() > 0):to_be_true()
  end)

  it("refuses what recipe.optimizer may not return", function()
    local function refused(value, message, own)
      local recipe = own and pair() or recipe_of()
      recipe.optimizer = function(p, model) return type(value) == "function" and value(p, model) or value end
      expect(function() train.new(recipe) end):to_raise(message)
    end
    refused(nil, "it returned nothing")
    refused(3, "it returned 3")
    refused({}, "it returned")
    refused({ G = 3 }, "G is 3", true)
    refused(function(p, model) return { ["a.b"] = optim.Adam(model, { lr = p.lr }) } end, "not a word", true)
    refused(function(p, model) return { G = optim.Adam(model, { lr = p.lr }) } end, "the default step uses one")
  end)

  it("keeps the counts of parameters that have missed updates", function()
    local whole = false
    local function recipe()
      return recipe_of {
        optimizer = function(p, model) return optim.AdamW(model, { lr = p.lr }) end,
        loss = function(model, batch)
          local h = model[1](batch.x)
          return pl.cross_entropy(whole and model[3](h:tanh()) or h[{ {}, { 0, 2 } }], batch.y)
        end,
      }
    end
    local run = train.new(recipe())
    losses(run, 5)
    whole = true
    losses(run, 2)
    local cursor = run:cursor()
    expect({ cursor.updates, cursor["updates.3.weight"], cursor["updates.1.weight"] }):to_equal { 7, 2 }
    local again = train.new(recipe())
    again:seek(cursor)
    expect(again:cursor()):to_equal(cursor)
    -- New moments start at no update, those put back have their own.
    again:seek(cursor, { ["optim.adamw.m.1.weight"] = 0, ["optim.adamw.v.3.bias"] = 4 })
    local other = again:cursor()
    expect({ other["updates.1.weight"], other["updates.3.bias"], other["updates.3.weight"], again.opt.absences }):to_equal { 0, 4, 2, 15 }
  end)

  it("clips and reports the norm", function()
    local run = train.new(recipe_of { optimizer = function(_, model) return optim.SGD(model, { lr = 0.1, clip_norm = 1 }) end })
    expect(run:step().metrics.grad_norm:item()):to_be_above(0)
  end)

  it("counts epochs", function()
    local run = train.new(recipe_of { params = {} }, { batch = 16, lr = 0.1, epochs = 2 })
    expect(run.steps):to_be(20)
  end)

  it("memorises a batch, or says that it cannot", function()
    local fine = train.memorise(recipe_of(), nil, { steps = 200 })
    expect(fine.ok):to_be(true)
    expect(fine.last):to_be_below(fine.first)
    local broken = recipe_of { loss = function(model, batch) return pl.cross_entropy(model(batch.x * 0), batch.y) end }
    expect(train.memorise(broken, nil, { steps = 30 }).ok):to_be(false)
  end)

  it("trains in fp16 with a scaler of its own", function()
    local run, full = train.new(recipe_of { precision = "fp16" }), train.new(recipe_of())
    local low, high = losses(run, 20), losses(full, 20)
    expect(low[20]):to_be_near(high[20], 0.02)
    expect(run:step().metrics.loss_scale:item()):to_be(65536.0)
    local names = {}
    for i, entry in ipairs(run:states()) do names[i] = entry.path end
    expect(table.concat(names, " ")):to_contain "scaler.factor scaler.good scaler.updates"
  end)

  it("accumulates in fp16", function()
    local run = train.new(recipe_of { precision = "fp16" }, params { batch = 8, accumulate = 2 })
    local full = train.new(recipe_of(), params { batch = 16 })
    expect(losses(run, 5)[5]):to_be_near(losses(full, 5)[5], 0.01)
  end)

  it("keeps memory and plans flat", function()
    local run = train.new(recipe_of(), params { steps = 400 })
    losses(run, 50)
    local before = pl.stats()
    for _ = 1, 200 do run:step() end
    local after = pl.stats()
    expect(after.misses):to_be(before.misses)
    expect(after.held_bytes):to_be_below(before.held_bytes + 1024 * 1024)
  end)
end)
