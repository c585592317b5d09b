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

---Returns the length of a run in steps. Raises if nothing sets it.
---@param recipe perilune.Recipe
---@param params table
---@param train perilune.Loader
---@param accumulate integer
---@return integer
local function length(recipe, params, train, accumulate)
  local steps = params.steps or recipe.steps
  if params.epochs and not params.steps then
    if not check.is(params.epochs, "number") or params.epochs <= 0 then
      pl.error("recipe", "epochs is " .. check.show(params.epochs), "give a positive number, such as epochs = 3")
    end
    steps = math.ceil(params.epochs * train:batches() / accumulate)
  end
  if not steps then pl.error("recipe", "neither params.steps nor params.epochs sets the length of the run", "add `steps = 1000` to recipe.params") end
  return check.whole("recipe", "steps", steps, 0)
end

---Returns the steps between two evaluations: by default those of an epoch, or more for at most 20 evaluations; nil for none but the last.
---@param run table
---@return integer?
local function interval(run)
  local given = run.params.eval_every or run.recipe.eval_every
  if given ~= nil then
    local every = check.whole("recipe", "eval_every", given, 0)
    return every > 0 and every or nil
  end
  local epoch = math.ceil(run.data.train:batches() / run.accumulate)
  local every = math.max(epoch, math.ceil(run.steps / 20), 1)
  return every < run.steps and every or nil
end

---Sets the length of a run, its micro-batches, its evaluation interval and its policies for bad losses. Where `epochs` sets the length,
---params.steps becomes the number of steps, for schedules of the learning rate.
---@param run table the fields of the run, with recipe, params and data
function options.schedule(run)
  local recipe, params = run.recipe, run.params
  run.accumulate = check.whole("recipe", "accumulate", params.accumulate or recipe.accumulate or 1)
  if recipe.step and run.accumulate > 1 then
    pl.error("recipe", ("accumulate is %d, but recipe.step gets one batch a step: it would lose the others"):format(run.accumulate),
      "use the default step, which divides by all batches, or set accumulate = 1 and split the batch in recipe.step", recipe.step)
  end
  run.steps = length(recipe, params, run.data.train, run.accumulate)
  if params.epochs and not params.steps then params.steps = run.steps end
  run.eval_every = interval(run)
  run.on_nan, run.on_spike = params.on_nan or recipe.on_nan or "stop", params.on_spike or recipe.on_spike or "warn"
  check.word("recipe", "on_nan", run.on_nan, { "stop", "skip", "warn" })
  check.word("recipe", "on_spike", run.on_spike, { "warn", "skip", "stop", "off" })
end

return options
