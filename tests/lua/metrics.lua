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
