-- A recipe that logs every kind of value, for read_back.py.

local pl = require "perilune"
local nn, optim, data, train = pl.nn, pl.optim, pl.data, pl.train

local recipe = pl.recipe { name = "logged values", params = { steps = 40, lr = 0.1, note = "a b", seed = 1 } }

function recipe.data(p)
  local x = pl.randn { 200, 4 }
  local set = data.tensors { x = x, y = x:sum(1) }
  return { train = set:split("train", 0.8, p.seed):shuffle(p.seed):batch(16), valid = set:split("valid", 0.2, p.seed):batch(40) }
end

function recipe.model() return nn.Sequential { nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1) } end

function recipe.optimizer(p, model) return optim.SGD(model, { lr = p.lr }) end

function recipe.loss(model, batch)
  local off = model(batch.x):squeeze(-1) - batch.y
  return (off * off):mean(), { off = off:abs():mean() }
end

function recipe.on_step(run, event)
  if event.step % 10 ~= 0 then return end
  run:log {
    ["weights/first"] = train.histogram(run.model[1].weight),
    grid = train.image(pl.rand { 5, 3, 6, 8 }, { columns = 3 }),
    text = ("**step** %d\nü"):format(event.step),
    largest = run.model[1].weight:abs():max(),
  }
end

function recipe.on_eval(run, event) run:log { ["gap/" .. event.split] = event.loss, wrong = 0 / 0 } end

return recipe
