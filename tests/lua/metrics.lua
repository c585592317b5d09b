-- Tests metrics against values computed by hand.

local pl = require "perilune"
local metrics = pl.metrics
local t = require "support"
local describe, it, expect = t.describe, t.it, t.expect

local scores = pl.tensor { { 0.1, 0.7, 0.2 }, { 0.5, 0.3, 0.2 }, { 0.2, 0.3, 0.5 }, { 0.6, 0.1, 0.3 } } -- 1, 0, 2, 0
local labels = pl.tensor { 1, 2, 2, 0 }

describe("classes", function()
  it("accuracy, of scores and of labels", function()
    expect(metrics.accuracy(scores, labels):item()):to_be_near(0.75)
    expect(metrics.accuracy(pl.tensor { 1, 0, 2, 0 }, labels):item()):to_be_near(0.75)
    expect(metrics.accuracy(scores, pl.tensor { 1, -100, 2, 1 }, { ignore_index = -100 }):item()):to_be_near(2 / 3)
  end)

  it("top_k", function()
    expect(metrics.top_k(scores, labels, 1):item()):to_be_near(0.75)
    expect(metrics.top_k(scores, labels, 2):item()):to_be_near(0.75)
    expect(metrics.top_k(scores, labels, 3):item()):to_be_near(1)
  end)

  it("confusion_matrix", function()
    expect(metrics.confusion_matrix(scores, labels)):to_equal { { 1, 0, 0 }, { 0, 1, 0 }, { 1, 0, 1 } }
    expect(metrics.confusion_matrix(pl.tensor { 0, 1 }, pl.tensor { 0, 0 }, 2)):to_equal { { 1, 1 }, { 0, 0 } }
    expect(function() metrics.confusion_matrix(labels, labels) end):to_raise "number of classes"
    local part = pl.tensor { 1, -100, 2, 0 }
    expect(metrics.confusion_matrix(scores, part, nil, { ignore_index = -100 })):to_equal { { 1, 0, 0 }, { 0, 1, 0 }, { 0, 0, 1 } }
    expect(metrics.f1(scores, part, { ignore_index = -100 }):item()):to_be_near(1)
    expect(function() metrics.confusion_matrix(scores, part):tolist() end):to_raise "class -100"
  end)

  it("f1", function()
    -- by class: 2*1/(1+2), 2*1/(1+1), 2*1/(2+1)
    expect(metrics.f1(scores, labels, { average = "none" })):to_be_near { 2 / 3, 1, 2 / 3 }
    expect(metrics.f1(scores, labels):item()):to_be_near(7 / 9)
    expect(metrics.f1(scores, labels, { average = "micro" }):item()):to_be_near(0.75)
    expect(metrics.f1(scores, labels, { average = "weighted" }):item()):to_be_near((2 / 3 + 1 + 2 * 2 / 3) / 4)
  end)
end)

describe("auc", function()
  local cases = require("golden.tables").auc

  it("is scikit-learn's, with ties and rare classes", function()
    for _, case in ipairs(cases) do
      local scores, labels = pl.tensor(case.scores, { dtype = "f32" }), pl.tensor(case.labels, { dtype = "i64" })
      expect(metrics.auc(scores, labels):item()):to_be_near(case.area, 1e-6)
      expect(metrics.auc(scores:exp(), labels:eq(1)):item()):to_be_near(case.area, 1e-6)
      expect(metrics.auc(-scores, labels:to("f32")):item()):to_be_near(1 - case.area, 1e-6)
    end
    expect(metrics.auc(pl.zeros { 2, 5 }, pl.arange(10):view(2, 5) % 2):item()):to_be(0.5)
  end)

  it("over batches is that of all samples", function()
    local case = cases[3]
    local scores, labels = pl.tensor(case.scores, { dtype = "f32" }), pl.tensor(case.labels, { dtype = "i64" })
    local mean, at = metrics.Mean(), 0
    for _, n in ipairs { 7, 100, 93 } do
      mean:add({ auc = metrics.auc(scores:narrow(0, at, n), labels:narrow(0, at, n)), loss = n }, n)
      at = at + n
    end
    local result = mean:result()
    expect(result.auc):to_be_near(case.area, 1e-6)
    expect(result.loss):to_be_near((7 * 7 + 100 * 100 + 93 * 93) / 200)
    expect(next(result, next(result, next(result)))):to_be(nil)
  end)

  it("counts labels of 0 and 1 only, and is NaN where it has no meaning", function()
    local scores = pl.tensor { 0.1, 0.9, 0.5, 0.7 }
    expect(metrics.auc(scores, pl.tensor { 0, 0, 1, -100 }):item()):to_be(0.5)
    local function nan(value) return value ~= value end
    expect(nan(metrics.auc(scores, pl.tensor { 1, 1, 1, 1 }):item())):to_be(true)
    expect(nan(metrics.auc(scores, pl.tensor { 0, 0, 0, 0 }):item())):to_be(true)
    expect(nan(metrics.auc(pl.tensor { 0.1, 0 / 0 }, pl.tensor { 0, 1 }):item())):to_be(true)
    expect(nan(metrics.auc(pl.tensor { 0.1 }, pl.tensor { 1 }):item())):to_be(true)
    expect(function() metrics.auc(scores:unsqueeze(1), pl.tensor { 0, 0, 1, 1 }) end):to_raise "scores of shape {4, 1} and labels of shape {4} differ"
    expect(function() metrics.auc(scores, 1) end):to_raise "the labels are 1"
    expect(function() metrics.auc(pl.zeros { 0 }, pl.zeros { 0 }) end):to_raise "there are no samples"
  end)

  it("is that of all samples in evaluations and over micro-batches", function()
    local case = cases[3]
    local set = pl.data.tensors { x = pl.tensor(case.scores, { dtype = "f32" }), y = pl.tensor(case.labels, { dtype = "i64" }) }
    local recipe = pl.recipe { name = "auc", params = { steps = 2 } }
    recipe.accumulate = 4
    function recipe.data() return { train = set:batch(50), valid = set:batch(64) } end
    function recipe.model() return pl.nn.module { w = pl.state(pl.ones { 1 }), forward = function(m, x) return m.w * x end } end
    function recipe.optimizer(_, model) return pl.optim.SGD(model, { lr = 0 }) end
    function recipe.loss(model, batch)
      local scores = model(batch.x)
      return scores:mean(), { auc = metrics.auc(scores, batch.y) }
    end
    local run = pl.train.new(recipe)
    expect(run:step().metrics.auc:item()):to_be_near(case.area, 1e-6)
    expect(run:evaluate("valid").auc):to_be_near(case.area, 1e-6)
  end)
end)

describe("numbers", function()
  local y, target = pl.tensor { 1.0, 2.0, 4.0 }, pl.tensor { 1.0, 3.0, 2.0 }

  it("mse, rmse, mae, r2", function()
    expect(metrics.mse(y, target):item()):to_be_near(5 / 3)
    expect(metrics.rmse(y, target):item()):to_be_near(math.sqrt(5 / 3))
    expect(metrics.mae(y, target):item()):to_be_near(1)
    expect(metrics.r2(y, target):item()):to_be_near(1 - 5 / 2)
    expect(metrics.r2(target, target):item()):to_be_near(1)
    expect(function() metrics.mse(y:unsqueeze(1), target) end):to_raise "differ"
    expect(function() metrics.mse(y:unsqueeze(1), target:unsqueeze(0)) end):to_raise "{3, 1} and {1, 3} differ"
  end)

  it("perplexity and throughput", function()
    expect(metrics.perplexity(pl.tensor(1.5)):item()):to_be_near(math.exp(1.5))
    expect(metrics.throughput(100, 4)):to_be(25.0)
    expect(metrics.throughput(100, 0)):to_be(0)
  end)

  it("metrics that are functions of means combine as such", function()
    local mean = metrics.Mean()
    for _, loss in ipairs { 0.0, 3.0 } do
      local own = metrics.new { mean = { a = pl.tensor(loss), b = pl.tensor(2.0) }, finish = function(m) return m.a / m.b end }
      expect(own:item()):to_be_near(loss / 2)
      mean:add({ perplexity = metrics.perplexity(pl.tensor(loss)), own = own, twice = metrics.perplexity(pl.tensor(loss)) * 2 }, 1 + loss)
    end
    local result = mean:result()
    expect(result.perplexity):to_be_near(math.exp(12 / 5), 1e-4)
    expect(result.own):to_be_near(12 / 10)
    expect(result.twice):to_be_near((2 + 8 * math.exp(3)) / 5, 1e-2)
  end)

  it("errors of metrics.new", function()
    expect(function() metrics.new { mean = pl.ones { 2 }, finish = function(m) return m end } end):to_raise "mean is a tensor of shape {2}"
    expect(function() metrics.new { mean = {}, finish = function(m) return m end } end):to_raise "mean is a table"
    expect(function() metrics.new { mean = { pl.tensor(1.0) }, finish = function(m) return m end } end):to_raise "mean has the key 1"
    expect(function() metrics.new { mean = pl.tensor(1.0) } end):to_raise "option 'finish' is missing"
    expect(function() metrics.new { mean = pl.tensor(1.0), finish = function() return 1 end } end):to_raise "finish returned 1"
    expect(function() metrics.new { means = pl.tensor(1.0), finish = function(m) return m end } end):to_raise "Did you mean 'mean'"
  end)

  it("means over batches of several sizes", function()
    local mean = metrics.Mean()
    mean:add({ loss = pl.tensor(1.0), accuracy = 0.5 }, 10)
    mean:add({ loss = 4.0 }, pl.tensor(20.0))
    local result, n = mean:result()
    expect(result.loss):to_be_near(3)
    expect(result.accuracy):to_be_near(0.5)
    expect(n):to_be_near(30)
  end)
end)
