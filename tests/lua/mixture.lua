-- Tests mixtures whose weights change during a run: decisions, positions in the stream, resumes and edits.

local pl = require "perilune"
local data, nn, optim, train = pl.data, pl.nn, pl.optim, require "perilune.train"
local t = require "support"
local describe, it, expect = t.describe, t.it, t.expect

---Records { x } whose numbers begin at `first`.
local function numbers(n, first)
  local list = {}
  for i = 1, n do list[i] = { x = first + i - 1.0 } end
  return data.list(list)
end

---A run over a mixture of `near` (numbers below 1000) and `far`, whose steps are stored in `seen`.
local function run_of(weights, opts, fields)
  local seen = {}
  local recipe = pl.recipe { name = "mixed", params = { steps = 200, seed = 1 } }
  function recipe.data()
    local sets = { near = numbers(500, 0), far = numbers(700, 1000), new = fields and fields.third and numbers(50, 5000) or nil }
    return { train = data.mix(sets, weights, opts):map(function(r) return { x = { r.x } } end):batch(fields and fields.size or 64) }
  end
  function recipe.model() return nn.Linear(1, 1) end
  function recipe.optimizer(_, model) return optim.SGD(model, { lr = 0 }) end
  function recipe.loss(model, batch)
    seen[#seen + 1] = batch.x
    return (model(batch.x) * 0):mean() + 0.5, { far = batch.x:ge(1000):to("f32"):mean() }
  end
  return train.new(recipe), seen
end

---Takes steps and returns the numbers of each.
local function steps(run, seen, n)
  local out = {}
  for i = 1, n do
    run:step()
    out[i] = seen[#seen]:squeeze(1):tolist()
    for j = 1, #seen do seen[j] = nil end
  end
  return out
end

---Share of the numbers of `far` in some steps.
local function share(list, first, last)
  local far, all = 0, 0
  for i = first, last do
    for _, x in ipairs(list[i]) do
      all, far = all + 1, far + (x >= 1000 and 1 or 0)
    end
  end
  return far / all
end

describe("a mixture whose weights are a function of the step", function()
  local function switch(step) return step <= 32 and { near = 1, far = 0 } or { near = 1, far = 3 } end

  it("has the weights of the step, and each record once in its turn", function()
    local run, seen = run_of(switch)
    local list = steps(run, seen, 96)
    expect(share(list, 1, 32)):to_be(0)
    -- 64 steps of 64 are four whole blocks.
    expect(share(list, 33, 96)):to_be(0.75)
    local next_near, next_far = 0, 0
    for _, batch in ipairs(list) do
      for _, x in ipairs(batch) do
        if x >= 1000 then
          expect(x):to_be(1000 + next_far % 700)
          next_far = next_far + 1
        else
          expect(x):to_be(next_near % 500)
          next_near = next_near + 1
        end
      end
    end
  end)

  it("asks every so many steps, 16 steps ahead, with the metrics of the last step and evaluation", function()
    local asked = {}
    local run = run_of(function(step, metrics)
      asked[#asked + 1] = { step, metrics.loss, metrics.far, metrics["valid/loss"], metrics.unknown }
      return { near = 1, far = 1 }
    end, { every = 10 })
    run.evaluated["valid/loss"] = 7
    run:step(20)
    local first, second, third, fourth = asked[1], asked[2], asked[3], asked[4]
    expect(#asked):to_be(4)
    expect({ first[1], #first, second[1], #second }):to_equal { 1, 1, 17, 1 }
    expect({ third[1], third[2], third[4], fourth[1] }):to_equal { 27, 0.5, 7, 37 }
    expect(third[3] >= 0.2 and third[3] <= 0.8):to_be(true)
    expect(third[5]):to_be(nil)
  end)

  it("goes on from its cursor with the same samples", function()
    local function by_metric(step, metrics) return { near = 1 + step % 5, far = metrics.far and metrics.far * 3 or 1 } end
    local run, seen = run_of(by_metric, { every = 3 })
    local whole = steps(run, seen, 60)
    for _, at in ipairs { 1, 17, 30, 41 } do
      local before, own = run_of(by_metric, { every = 3 })
      steps(before, own, at)
      local cursor = before:cursor()
      local again, seen_again = run_of(by_metric, { every = 3 })
      again:seek(cursor)
      local rest = steps(again, seen_again, 60 - at)
      for i = 1, 60 - at do expect(rest[i]):to_equal(whole[at + i]) end
    end
  end)

  it("keeps the order of every set over an edit of the weights, the sets or the batch size", function()
    for _, edit in ipairs { { size = 64 }, { size = 40 }, { size = 64, third = true } } do
      local run, seen = run_of(switch)
      local before = steps(run, seen, 45)
      local function edited() return { near = 2, far = 1, new = edit.third and 1 or nil } end
      local again, seen_again = run_of(edit.third and { near = 2, far = 1, new = 1 } or edited, nil, edit)
      again:seek(run:cursor())
      local after, next = steps(again, seen_again, 40), {}
      for _, list in ipairs { before, after } do
        for _, batch in ipairs(list) do
          for _, x in ipairs(batch) do
            local first, n = 0, 500
            if x >= 5000 then first, n = 5000, 50 elseif x >= 1000 then first, n = 1000, 700 end
            expect(x):to_be(first + (next[first] or 0) % n)
            next[first] = (next[first] or 0) + 1
          end
        end
      end
      expect((next[5000] or 0) > 0):to_be(edit.third == true)
    end
  end)

  it("refuses what it cannot do, with the rule and the cure", function()
    local function half() return { near = 1, far = 1 } end
    expect(function() run_of(function() return { near = 1 } end) end):to_raise "far"
    expect(function() run_of(function() return { near = 0, far = 0 } end) end):to_raise "the sum of the weights is 0"
    expect(function() run_of(function() return { near = 0 / 0, far = 0 } end) end):to_raise "the weight is NaN"
    expect(function() run_of(function() return { nera = 1, far = 0 } end) end):to_raise "near"
    expect(function() run_of({ near = 1, far = 1 }, { every = 2 }) end):to_raise "leave it out"
    local sets = { near = numbers(5, 0), far = numbers(5, 0) }
    local live = data.mix(sets, half)
    expect(function() live:shuffle(1):batch(2) end):to_raise "only map, tokenize, chat, select, rename and pad may follow"
    expect(function() live:take(4):batch(2) end):to_raise "apply it to the datasets"
    expect(function() numbers(3, 0):concat(live) end):to_raise "apply records:concat to the datasets that it mixes"
    expect(function() data.mix({ a = live }, { a = 1 }) end):to_raise "mix all datasets at once"
    local recipe = pl.recipe { name = "valid", params = { steps = 1 } }
    function recipe.data() return { train = numbers(8, 0):batch(2), valid = live:batch(2) } end
    function recipe.model() return nn.Linear(1, 1) end
    function recipe.optimizer(_, model) return optim.SGD(model, { lr = 0 }) end
    function recipe.loss(model, batch) return model(batch.x:unsqueeze(1)):mean() end
    expect(function() train.new(recipe) end):to_raise "which only the training data has"
  end)
end)
