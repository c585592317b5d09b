-- train/options.lua: reads the plain settings of a recipe: early stopping, checkpoint retention, length of the run, policies.
--
-- A param of the same name overrides the recipe's field, since params are what the command line can set.

local pl = require "perilune"
local check = require "perilune.check"

local options = {}

---Reads `recipe.early_stop`, with the counters that `Run:evaluate` updates.
---@param recipe perilune.Recipe
---@return table? early_stop nil if the recipe has none
function options.early_stop(recipe)
  if not recipe.early_stop then return nil end
  local o = check.options("recipe.early_stop", recipe.early_stop, { metric = "valid/loss", patience = 5, mode = "min" })
  check.word("recipe.early_stop", "mode", o.mode, { "min", "max" })
  check.whole("recipe.early_stop", "patience", o.patience)
  local split, metric = o.metric:match "^([^/]+)/(.+)$"
  return { split = split or "valid", metric = metric or o.metric, mode = o.mode, patience = o.patience, bad = 0 }
end

---Reads `recipe.keep`, the retention policy of checkpoints.
---@param recipe perilune.Recipe
---@return table? keep nil if the recipe has none
function options.keep(recipe)
  if not recipe.keep then return nil end
  local o = check.options("recipe.keep", recipe.keep, {}, { last = "number", every = "number", best = "string", mode = "string" })
  if o.last then check.whole("recipe.keep", "last", o.last, 0) end
  if o.every then check.whole("recipe.keep", "every", o.every) end
  if o.mode then check.word("recipe.keep", "mode", o.mode, { "min", "max" }) end
  return o
end

---Sets the length of a run, its micro-batches, its evaluation interval and its policies for bad losses.
---@param run table the fields of the run, with recipe, params and data
function options.schedule(run)
  local recipe, params = run.recipe, run.params
  run.accumulate = check.whole("recipe", "accumulate", params.accumulate or recipe.accumulate or 1)
  if recipe.step and run.accumulate > 1 then
    pl.error("recipe", ("accumulate is %d, but recipe.step gets one batch a step: it would lose the others"):format(run.accumulate),
      "use the default step, which divides by all batches, or set accumulate = 1 and split the batch in recipe.step", recipe.step)
  end
  local steps = params.steps or recipe.steps
  if not steps and params.epochs then steps = math.ceil(params.epochs * run.data.train:batches() / run.accumulate) end
  if not steps then pl.error("recipe", "neither params.steps nor params.epochs sets the length of the run", "add `steps = 1000` to recipe.params") end
  run.steps = check.whole("recipe", "steps", steps, 0)
  run.eval_every = params.eval_every or recipe.eval_every
  run.on_nan, run.on_spike = params.on_nan or recipe.on_nan or "stop", params.on_spike or recipe.on_spike or "warn"
  check.word("recipe", "on_nan", run.on_nan, { "stop", "skip", "warn" })
  check.word("recipe", "on_spike", run.on_spike, { "warn", "skip", "stop", "off" })
end

return options
