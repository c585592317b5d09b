-- recipes/gru.lua: classifies handwritten digits with a recurrent network that reads an image row by row
--
-- An 8x8 image is a sequence of 8 rows of 8 pixels; the class is a linear function of the last state of a GRU (Cho et al.,
-- 2014). The validation accuracy is 0.972 to 0.986 with the seeds 1 to 8, after 5 seconds on two cores.

local pl = require "perilune"
local nn, optim, data, metrics = pl.nn, pl.optim, pl.data, pl.metrics

local recipe = pl.recipe {
  name = "gru",
  description = "handwritten digits as sequences of rows, with a GRU",
  params = { hidden = 128, dropout = 0.2, batch = 64, lr = 5e-3, steps = 1000, seed = 1 },
}

function recipe.data(p)
  local rows = data.csv("data/digits.csv.gz")                       -- 1797 rows: 64 pixels (0..16), label
  local set = rows:tensors { x = { columns = {0, 64}, scale = 1 / 16 }, y = { column = 64, dtype = "i64" } }
  return { train = set:split("train", 0.8, p.seed):shuffle(p.seed):batch(p.batch), valid = set:split("valid", 0.2, p.seed):batch(256) }
end

function recipe.model(p)
  local m = { gru = nn.GRU(8, p.hidden, { batch_first = true }), dropout = nn.Dropout(p.dropout), head = nn.Linear(p.hidden, 10) }
  function m:forward(x)                                             -- (B, 64) -> (B, 10)
    local _, last = self.gru(x:unflatten(1, {8, 8}))                -- the state after the last row: (1, B, hidden)
    return self.head(self.dropout(last:squeeze(0)))
  end
  return nn.module(m)
end

function recipe.optimizer(p, model)
  return optim.AdamW(model, { lr = optim.cosine { peak = p.lr, warmup = 50, steps = p.steps }, weight_decay = 0.01, clip_norm = 1.0 })
end

function recipe.loss(model, batch)
  local logits = model(batch.x)
  return pl.cross_entropy(logits, batch.y), { accuracy = metrics.accuracy(logits, batch.y) }
end

return recipe
