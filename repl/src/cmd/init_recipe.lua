-- recipe.lua: classifies points of two spirals with a small network
--
--   perilune check recipe.lua
--   perilune run recipe.lua --set hidden=64

local pl = require "perilune"
local nn, optim, data, metrics = pl.nn, pl.optim, pl.data, pl.metrics

local recipe = pl.recipe {
  name = "spirals",
  params = { points = 1000, hidden = 32, batch = 64, lr = 1e-2, steps = 500, seed = 1 },
}

function recipe.data(p)
  local label = pl.bernoulli(pl.full({ p.points }, 0.5))         -- 0 or 1: which spiral
  local turn = pl.rand { p.points } * 2 * math.pi
  local angle = turn + label * math.pi
  local x = pl.stack({ angle:cos(), angle:sin() }, 1) * (turn / 6):unsqueeze(1) + 0.02 * pl.randn { p.points, 2 }
  local set = data.tensors { x = x, y = label:to("i64") }
  return { train = set:split("train", 0.8, p.seed):shuffle(p.seed):batch(p.batch), valid = set:split("valid", 0.2, p.seed):batch(256) }
end

function recipe.model(p)
  return nn.Sequential { nn.Linear(2, p.hidden), nn.GELU(), nn.Linear(p.hidden, p.hidden), nn.GELU(), nn.Linear(p.hidden, 2) }
end

function recipe.optimizer(p, model)
  return optim.AdamW(model, { lr = optim.cosine { peak = p.lr, warmup = 20, steps = p.steps } })
end

function recipe.loss(model, batch)
  local logits = model(batch.x)
  return pl.cross_entropy(logits, batch.y), { accuracy = metrics.accuracy(logits, batch.y) }
end

return recipe
