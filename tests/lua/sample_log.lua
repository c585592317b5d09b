-- Tests the sample log of a run: losses and gradient norms of samples, queries, steps that are taken again, the hook after a step.

local pl = require "perilune"
local data, nn, optim, train = pl.data, pl.nn, pl.optim, require "perilune.train"
local t = require "support"
local describe, it, expect = t.describe, t.it, t.expect

---A recipe that classifies 12 points, with the loss that `loss` makes.
local function recipe_of(fields)
  local recipe = pl.recipe { name = "log", params = { steps = 6, seed = 1 } }
  function recipe.data()
    local list = {}
    for i = 0, 11 do list[i + 1] = { x = { math.sin(i), math.cos(2 * i), 1.0 }, y = i % 4 } end
    return { train = data.list(list):shuffle(1):batch(5) }
  end
  function recipe.model() return nn.Sequential { nn.Linear(3, 4) } end
  function recipe.optimizer(_, model) return optim.SGD(model, { lr = 0.1 }) end
  function recipe.loss(model, batch)
    recipe.seen = batch
    return pl.cross_entropy(model(batch.x), batch.y)
  end
  recipe.sample_log = true
  for k, v in pairs(fields or {}) do recipe[k] = v end
  return recipe
end

---What the log should have of a batch on the present weights.
local function expected(run, batch)
  local logits = run.model(batch.x)
  local losses = pl.cross_entropy(logits, batch.y, { reduction = "none" }):tolist()
  local difference = logits:softmax(-1) - pl.one_hot(batch.y, 4):to("f32")
  return losses, (difference * difference):sum(1):sqrt():tolist()
end

describe("the sample log", function()
  it("has the losses of the samples of every step, and the norms of their gradients", function()
    local run = train.new(recipe_of())
    for step = 1, 4 do
      local losses, norms = expected(run, run.batch)
      local loss = run:step().loss:item()
      local samples, sum = run:samples(step), 0
      expect(#samples):to_be(5)
      local _, ids = run:samples_of(step)
      for i, s in ipairs(samples) do
        expect({ s.source, s.row, s.sub, s.weight }):to_equal { "list", ids[i], 0, 1 }
        expect(s.loss):to_be_near(losses[i], 1e-5)
        expect(s.gradient):to_be_near(norms[i], 1e-5)
        sum = sum + s.loss
      end
      expect(sum / 5):to_be_near(loss, 1e-5)
    end
    expect(#run:samples(5)):to_be(0)
  end)

  it("lists the worst samples and the history of one", function()
    local run = train.new(recipe_of())
    run:step(6)
    local all = {}
    for step = 1, 6 do
      for _, s in ipairs(run:samples(step)) do
        local of = all[s.row] or { sum = 0, count = 0 }
        of.sum, of.count, of.last, of.step, of.gradient = of.sum + s.loss, of.count + 1, s.loss, step, s.gradient
        all[s.row] = of
      end
    end
    local rows = {}
    for row in pairs(all) do rows[#rows + 1] = row end
    expect(#rows):to_be(12)
    for by, value in pairs { last = function(o) return o.last end, mean = function(o) return o.sum / o.count end, gradient = function(o) return o.gradient end } do
      table.sort(rows, function(a, b) return value(all[a]) > value(all[b]) end)
      local worst = run:worst(3, { by = by })
      for i = 1, 3 do
        expect(worst[i].row):to_be(rows[i])
        expect({ worst[i].count, worst[i].step }):to_equal { all[rows[i]].count, all[rows[i]].step }
        expect(worst[i].mean):to_be_near(all[rows[i]].sum / all[rows[i]].count, 1e-9)
      end
    end
    expect(run:sample(rows[1], { source = "list" }).count):to_be(all[rows[1]].count)
    expect(run:sample(99)):to_be(nil)
    expect(function() run:sample(0, { source = "lists" }) end):to_raise "list"
    expect(function() run:worst(0) end):to_raise "k"
    expect(function() run:worst(1, { by = "los" }) end):to_raise "last"
  end)

  it("replaces the steps that are taken again", function()
    local run = train.new(recipe_of())
    run:step(3)
    local cursor = run:cursor()
    run:step(2)
    local before = run:samples(4)
    run:seek(cursor)
    run:step()
    local again = run:samples(4)
    expect(#run:samples(5)):to_be(0)
    for i, s in ipairs(again) do expect(s.row):to_be(before[i].row) end
  end)

  it("covers micro-batches, sequences with ignored targets, and other losses", function()
    local run = train.new(recipe_of { accumulate = 2 })
    run:step(2)
    expect(#run:samples(2)):to_be(10)

    local sequences = recipe_of {
      data = function()
        local list = {}
        for i = 0, 5 do list[i + 1] = { x = { { 1.0, i / 6, 0.5 }, { 0.0, 1.0, i / 3 } }, y = { i % 4, i % 2 == 0 and -100 or 1 } } end
        list[6].y = { -100, -100 }
        return { train = data.list(list):batch(6) }
      end,
    }
    run = train.new(sequences)
    local logits = run.model(run.batch.x)
    local rows = pl.cross_entropy(logits, run.batch.y, { reduction = "none" }):tolist()
    run:step()
    for i, s in ipairs(run:samples(1)) do
      if i == 6 then
        expect({ s.loss, s.gradient }):to_equal {}
      else
        expect(s.loss):to_be_near(i % 2 == 1 and rows[i][1] or (rows[i][1] + rows[i][2]) / 2, 1e-5)
      end
    end

    local pairs_of = recipe_of { loss = function(model, batch) return pl.mse_loss(model(batch.x), pl.one_hot(batch.y, 4):to("f32")) end }
    run = train.new(pairs_of)
    local difference = run.model(run.batch.x) - pl.one_hot(run.batch.y, 4):to("f32")
    local errors = (difference * difference):mean(1):tolist()
    run:step()
    for i, s in ipairs(run:samples(1)) do
      expect(s.loss):to_be_near(errors[i], 1e-5)
      expect(s.gradient):to_be(nil)
    end
  end)

  it("takes the losses that a recipe gives", function()
    local own = recipe_of()
    function own.loss(model, batch)
      local losses = pl.cross_entropy(model(batch.x), batch.y, { reduction = "none" })
      local weight = (batch.y + 1):to("f32")
      return (losses * weight):sum() / weight:sum(), nil, nil, { loss = losses, weight = weight }
    end
    local run = train.new(own)
    local y = run.batch.y:tolist()
    run:step()
    for i, s in ipairs(run:samples(1)) do expect(s.weight):to_be(y[i] + 1.0) end

    local hidden = recipe_of { loss = function(model, batch) return pl.cross_entropy(model(batch.x), batch.y) * 2 end }
    expect(function() train.new(hidden):step() end):to_raise "return it fourth"
    local short = recipe_of { loss = function(model, batch)
      local loss = pl.cross_entropy(model(batch.x), batch.y)
      return loss, nil, nil, loss
    end }
    expect(function() train.new(short):step() end):to_raise "one element for each of the 5 samples"
  end)

  it("belongs to a recipe that asks for it, and changes no weights", function()
    local without = recipe_of { sample_log = false }
    local run = train.new(without)
    run:step(3)
    expect(function() run:worst(1) end):to_raise "recipe.sample_log = true"
    local logged = train.new(recipe_of())
    logged:step(3)
    expect(logged.model[1].weight:tolist()):to_equal(run.model[1].weight:tolist())
    expect(function() train.new(recipe_of { sample_log = 1 }) end):to_raise "recipe.sample_log is 1"
  end)
end)

describe("recipe.after_step", function()
  it("is called after every step and may assign States", function()
    local seen = {}
    local recipe = recipe_of()
    recipe.states = { weight = pl.state(pl.ones { 4 }) }
    function recipe.loss(model, batch)
      local losses = pl.cross_entropy(model(batch.x), batch.y, { reduction = "none" })
      local weight = recipe.states.weight:index_select(0, batch.y)
      return (losses * weight):sum() / weight:sum(), nil, nil, { loss = losses, weight = weight }
    end
    function recipe.after_step(run)
      seen[#seen + 1] = run.count
      if run.count == 2 then recipe.states.weight:assign(pl.tensor { 1, 0, 0.5, 2 }) end
    end
    local run = train.new(recipe)
    run:step(3)
    expect(seen):to_equal { 1, 2, 3 }
    local weights = { [0] = 1, 0, 0.5, 2 }
    for _, s in ipairs(run:samples(2)) do expect(s.weight):to_be(1.0) end
    for _, s in ipairs(run:samples(3)) do expect(s.weight):to_be(weights[s.row % 4] + 0.0) end
  end)

  it("is a function", function()
    expect(function() train.new(recipe_of { after_step = 3 }) end):to_raise "recipe.after_step is 3"
  end)
end)
