local pl = require "perilune"
local nn, optim, data = pl.nn, pl.optim, pl.data

local recipe = pl.recipe { name = "r", params = { steps = 4, lr = 0.1, hidden = 8 } }

function recipe.data(p)
  local set = data.tensors { x = pl.randn({16, 4}), y = pl.randn({16, 1}) }
  return { train = set:batch(8), valid = set:batch(8) }
end

function recipe.model(p) return nn.Linear(4, 1) end

function recipe.optimizer(p, model) return optim.SGD(model, { lr = p.lr }) end

function recipe.loss(model, batch)
  local y = model(batch.x)
  return pl.cross_entropy(y, batch.y:squeeze(-1):to("i64"):unsqueeze(0))
end

return recipe
