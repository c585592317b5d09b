-- recipes/regression.lua: predicts one column of a CSV file from the others with an MLP
--
-- Numeric columns are normalized. A column of at most `max_words` distinct words is one-hot encoded; one of more words (a name) is
-- omitted. The default table is UCI's Auto MPG: the fuel consumption of 392 cars from weight, power and so on, with a validation r2
-- of about 0.85 after a few seconds. Another table:
--
--   perilune run recipes/regression.lua --set csv=/path/table.csv --set target=price

local pl = require "perilune"
local nn, optim, data, metrics = pl.nn, pl.optim, pl.data, pl.metrics

local recipe = pl.recipe {
  name = "regression",
  description = "predict one column of a CSV file from the others",
  params = {
    csv = "data/auto_mpg.csv",
    target = "",                -- name of the column; the last one if empty
    max_words = 10,
    hidden = 32, dropout = 0.1, batch = 32, lr = 3e-3, weight_decay = 0.1, steps = 1000, seed = 1,
  },
}

local function column_names(rows)
  local names, _, num = rows:names(), rows:size()
  if names then return names end
  names = {}
  for c = 1, num do names[c] = c - 1 end     -- no header: name columns by their numbers
  return names
end

function recipe.data(p)
  local rows = data.csv(p.csv)
  local names = column_names(rows)
  local target = p.target ~= "" and p.target or names[#names]
  local inputs = {}                          -- (rows, 1) of a number, (rows, words) of a word
  local y                                    ---@type perilune.Tensor
  for _, name in ipairs(names) do
    local words = rows:words(name)
    if name == target then
      y = rows:tensors { y = { column = name } }.columns.y
    elseif not words then
      inputs[#inputs + 1] = rows:tensors { v = { columns = { name } } }.columns.v
    elseif #words <= p.max_words then
      local codes = rows:tensors { v = { column = name, labels = words } }.columns.v
      inputs[#inputs + 1] = pl.one_hot(codes, #words):to("f32")
    end
  end
  if not y then pl.error("regression", ("there is no column '%s'"):format(target), "columns: " .. table.concat(names, ", ")) end

  local set = data.tensors { x = pl.cat(inputs, 1), y = y }
  local train, valid = set:split("train", 0.8, p.seed), set:split("valid", 0.2, p.seed)

  -- Normalize every column to mean 0 and standard deviation 1, by the statistics of the training split.
  local ids = pl.tensor(train.index, { dtype = "i64" })
  local x_train, y_train = set.columns.x:index_select(0, ids), y:index_select(0, ids) ---@type perilune.Tensor, perilune.Tensor
  local scale = {
    x_mean = pl.state(x_train:mean(0), { trainable = false }), x_std = pl.state(x_train:std(0) + 1e-6, { trainable = false }),
    y_mean = pl.state(y_train:mean(), { trainable = false }), y_std = pl.state(y_train:std() + 1e-6, { trainable = false }),
  }
  return { train = train:shuffle(p.seed):batch(p.batch), valid = valid:batch(valid:size()), scale = scale, num_inputs = set.columns.x:size(1) }
end

function recipe.model(p, d)
  local m = {
    scale = d.scale,            -- a part of the model, so that checkpoints contain it
    net = nn.Sequential { nn.Linear(d.num_inputs, p.hidden), nn.GELU(), nn.Dropout(p.dropout),
                          nn.Linear(p.hidden, p.hidden), nn.GELU(), nn.Dropout(p.dropout), nn.Linear(p.hidden, 1) },
  }
  function m:forward(x)         -- (B, columns) -> (B), in the units of the target
    local s = self.scale
    return self.net((x - s.x_mean) / s.x_std):squeeze(-1) * s.y_std + s.y_mean
  end
  return nn.module(m)
end

function recipe.optimizer(p, model)
  return optim.AdamW(model, { lr = optim.cosine { peak = p.lr, warmup = 20, steps = p.steps }, weight_decay = p.weight_decay })
end

function recipe.loss(model, batch)
  local y = model(batch.x)                                    ---@type perilune.Tensor
  local y_std = model.scale.y_std                             -- loss in standard deviations: lr is independent of the units
  return (((y - batch.y) / y_std) ^ 2):mean(), { r2 = metrics.r2(y, batch.y), rmse = metrics.rmse(y, batch.y) }
end

return recipe
