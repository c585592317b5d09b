-- recipes/clean.lua: finds mislabelled samples from the sample log and trains without them, on digits with flipped labels
--
-- A share of the training labels is flipped on purpose (`--set flip=0.05`). A network fits correct labels first and wrong ones late
-- (Arpit et al., arXiv:1706.05394), so after some epochs the network gives a wrong label a low probability, both on average and when
-- the sample was trained on last. `after_step` gives such samples a low weight; one whose label the others confirm is no longer
-- suspected.
--
-- For data of one's own: replace recipe.data, and read the list that recipe.finish prints.

local pl = require "perilune"
local nn, optim, data, metrics = pl.nn, pl.optim, pl.data, pl.metrics

local recipe = pl.recipe {
  name = "clean",
  description = "digits with flipped labels, found by their losses",
  params = {
    flip = 0.05,            -- share of the training labels that are flipped
    review = 200,           -- steps between two reviews of the samples; the first comes after twice as many
    below = 0.2,            -- a label is suspected if its probability is below this
    low = 0.0,              -- weight of a suspected sample
    channels = 16, dropout = 0.2, batch = 64, lr = 1e-3, steps = 1500, seed = 1,
    shown = 5,              -- suspected samples that the report at the end lists; 0: no report
  },
  sample_log = true,
}

function recipe.data(p)
  local digits = data.csv("data/digits.csv.gz"):tensors { x = { columns = {0, 64}, scale = 1 / 16 }, y = { column = 64, dtype = "i64" } }
  local x, truth = digits.columns.x, digits.columns.y
  local n = digits:size()
  -- A flipped label is one of the nine others.
  local other = (truth + 1 + pl.uniform({ n }, 0, 9):floor():to("i64")) % 10
  local y = pl.where(pl.uniform({ n }):lt(p.flip), other, truth)
  recipe.states = { weight = pl.state(pl.ones { n }) }
  local set = data.tensors { x = x, y = y, truth = truth, row = pl.arange(n) }
  recipe.wrong = (y:ne(truth)):tolist()
  return { train = set:split("train", 0.8, p.seed):shuffle(p.seed):batch(p.batch), valid = set:split("valid", 0.2, p.seed):batch(256) }
end

function recipe.model(p)
  return nn.Sequential { nn.Unflatten(1, {1, 8, 8}), nn.Conv2d(1, p.channels, 3, { padding = 1 }), nn.ReLU(), nn.MaxPool2d(2),
                         nn.Conv2d(p.channels, 2 * p.channels, 3, { padding = 1 }), nn.ReLU(), nn.Dropout(p.dropout), nn.Flatten(),
                         nn.Linear(32 * p.channels, 10) }
end

function recipe.optimizer(p, model)
  return optim.AdamW(model, { lr = optim.cosine { peak = p.lr, warmup = 50, steps = p.steps }, weight_decay = 0.01 })
end

function recipe.loss(model, batch)
  local losses = pl.cross_entropy(model(batch.x), batch.y, { reduction = "none" })
  local weight = recipe.states.weight:index_select(0, batch.row)
  return (losses * weight):sum() / weight:sum():clamp(1e-6), nil, nil, { loss = losses, weight = weight }
end

-- The labels of the validation split are the true ones.
function recipe.evaluate(model, batch)
  local logits = model(batch.x)
  return pl.cross_entropy(logits, batch.truth), { accuracy = metrics.accuracy(logits, batch.truth) }
end

-- The samples whose labels are improbable, on average and when they were trained on last, the least probable first.
local function suspects(run)
  local out, high = {}, -math.log(run.params.below)
  for _, s in ipairs(run:worst(run.data.train.n, { by = "mean" })) do
    if s.mean > high and s.loss > high then out[#out + 1] = s end
  end
  return out
end

function recipe.after_step(run)
  local p = run.params
  if run.count < 2 * p.review or run.count % p.review ~= 0 then return end
  local weights = {}
  for i = 1, #recipe.wrong do weights[i] = 1.0 end
  for _, s in ipairs(suspects(run)) do weights[s.row + 1] = p.low end
  recipe.states.weight:assign(pl.tensor(weights))
end

function recipe.finish(run)
  if run.params.shown == 0 then return end
  local list, hits, flipped = suspects(run), 0, 0
  for _, s in ipairs(list) do
    if recipe.wrong[s.row + 1] then hits = hits + 1 end
  end
  for row, wrong in ipairs(recipe.wrong) do
    if wrong and run:sample(row - 1) then flipped = flipped + 1 end
  end
  print(("%d of %d samples are suspected"):format(#list, run.data.train.n))
  if flipped > 0 then print(("%d of %d flipped labels are among them: recall %.3f, precision %.3f"):format(hits, flipped, hits / flipped, hits / math.max(#list, 1))) end
  for i = 1, math.min(run.params.shown, #list) do print(("  row %d: mean loss %.3f over %d epochs"):format(list[i].row, list[i].mean, list[i].count)) end
end

return recipe
