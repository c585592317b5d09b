local pl = require "perilune"
local nn, optim = pl.nn, pl.optim

local data, train = pl.data, pl.train
local set = data.tensors { x = pl.zeros({8, 2}) }
local run = train.new {
  name = "r", steps = 2,
  data = function() return { train = set:batch(4), valid = set:batch(4) } end,
  model = function() return nn.Linear(2, 1) end,
  optimizer = function(_, model) return optim.SGD(model, { lr = 0.1 }) end,
  loss = function(model, batch) return model(batch.x):mean() end,
}
print(run:evaluate("test").loss)
