-- train/init.lua: builds training runs from recipes.
--
--   local run = train.new(recipe, params, { seed = 1 })
--   while not run:finished() do run:step() end
--   print(run:evaluate("valid").loss)
--
-- The command line, the prompt and scripts drive a run through the same methods. A run prints nothing and reads no tensor back
-- except in `evaluate`. Its state at step k is a function of the recipe, the params, the seed and its States: a batch is a
-- function of its number, a learning rate of the count of updates.
--
-- step.lua is the default training step. recipe.lua defines what a recipe may contain, run.lua what a run offers; build.lua makes a run of a
-- recipe.

local pl = require "perilune"
local check = require "perilune.check"
local build = require "perilune.train.build"
local log = require "perilune.train.log"
local preference = require "perilune.train.preference"
local runs = require "perilune.train.run"

local train = { answer_log_probs = preference.answer_log_probs, dpo_loss = preference.dpo_loss,
                image = log.image, histogram = log.histogram }

---Builds the data, model and optimizer of a recipe as a run at step 0.
---All random numbers derive from the seed. Raises if a part of the recipe is missing or has the wrong type.
---@param recipe perilune.Recipe
---@param params table? the final value of every param; recipe.params by default
---@param opts {seed?: integer, precision?: string, memory_budget?: string|integer}? seed: params.seed or 0 by default; precision: recipe.precision or "f32" by default; memory_budget: device memory of a step, such as "20GiB"
---@return perilune.Run
function train.new(recipe, params, opts)
  local op = "train.new"
  if type(recipe) ~= "table" then pl.error(op, "the recipe is " .. check.show(recipe), "pass the table that pl.recipe returned") end
  local o = check.options(op, opts, {}, { seed = "number", precision = "string", memory_budget = "string|number" })
  return build(recipe, params or recipe.params or {}, o)
end

---Overfits the first training batch, as a test of model and loss.
---Trains on batch 0 until its loss is at most `threshold`. A model that fails has an error that more data does not correct.
---@param recipe perilune.Recipe
---@param params table?
---@param opts {steps?: integer, threshold?: number, seed?: integer}? steps: at most so many; threshold: loss at which it ends; seed: of all random numbers, params.seed or 0 by default
---@return {ok: boolean, first: number, last: number, steps: integer}
function train.memorise(recipe, params, opts)
  local o = check.options("train.memorise", opts, { steps = 300, threshold = 0.05 }, { seed = "number" })
  local run = train.new(recipe, params, { seed = o.seed })
  run.sample_log = nil -- it does not go through the stream of samples
  run.model:train()
  local first, last, done = math.huge, math.huge, 0
  while done < o.steps and last > o.threshold do
    local result = runs.take_step(run, function() return { { run.data.train:batch_at(0) } } end)
    done = done + 1
    if done == 1 then first = result.loss:item() end
    if done % 10 == 0 or done == o.steps then last = result.loss:item() end
  end
  return { ok = last <= o.threshold, first = first, last = last, steps = done }
end

return train
