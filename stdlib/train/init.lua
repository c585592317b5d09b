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
-- step.lua is the default training step. recipe.lua defines what a recipe may contain, run.lua what a run offers.

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local check = require "perilune.check"
local tree = require "perilune.tree"
local optimizers = require "perilune.train.optimizers"
local experts = require "perilune.train.experts"
local options = require "perilune.train.options"
local mesh = require "perilune.train.mesh"
local parts = require "perilune.train.recipe"
local preference = require "perilune.train.preference"
local runs = require "perilune.train.run"

local train = { answer_log_probs = preference.answer_log_probs, dpo_loss = preference.dpo_loss }

local function build_data(recipe, params)
  local data = parts.part(recipe, "data", true)(params)
  if type(data) ~= "table" or not parts.is_loader(data.train) then
    local got = type(data) == "table" and "data.train as " .. check.show(data.train) or check.show(data)
    parts.fault(recipe, "data", "it returned " .. got, "return { train = set:batch(64), valid = ... } with loaders from :batch(n) or :windows{}")
  end
  return data
end

local function build_model(recipe, params, data, precision)
  local model = parts.part(recipe, "model", true)(params, data)
  if type(model) ~= "table" or #tree.states(model) == 0 then
    local got = check.show(model) .. (type(model) == "table" and " without any State" or "")
    parts.fault(recipe, "model", "it returned " .. got, "return a module: nn.Sequential { ... } or nn.module(t)")
  end
  if precision == "fp8" then
    if not require("perilune.nn.module").is_module(model) then parts.fault(recipe, "model", "it returned a table that is not a module", "precision = \"fp8\" needs one: nn.module(t)") end
    require("perilune.nn.fp8").use_fp8(model)
  end
  return model
end

---@return perilune.Optimizer|table<string, perilune.Optimizer>|nil opt as the recipe returned it
---@return perilune.train.NamedOptimizer[]
local function build_optimizers(recipe, params, model, scaled)
  local optimizer = parts.part(recipe, "optimizer", recipe.step == nil)
  if not optimizer then return nil, {} end
  local opt = optimizer(params, model)
  if opt == nil then parts.fault(recipe, "optimizer", "it returned nothing", "end it with `return optim.AdamW(model, { lr = p.lr })`") end
  local list = optimizers.list(recipe, opt)
  if scaled then
    for _, o in ipairs(list) do o.opt:count_on_device() end
  end
  return opt, list
end

local function build_ema(recipe, params, model)
  local ema = recipe.ema
  if not ema then return nil end
  if type(ema) == "number" then return require("perilune.optim.ema").EMA(model, ema) end
  return ema(params, model)
end

---Builds the data, model and optimizer of a recipe as a run at step 0.
---All random numbers derive from the seed. Raises if a part of the recipe is missing or has the wrong type.
---@param recipe perilune.Recipe
---@param params table? the final value of every param; recipe.params by default
---@param opts {seed?: integer, precision?: string, memory_budget?: string|integer}? seed: params.seed or 0 by default; precision: recipe.precision or "f32" by default
---@return perilune.Run
function train.new(recipe, params, opts)
  local op = "train.new"
  if type(recipe) ~= "table" then pl.error(op, "the recipe is " .. check.show(recipe), "pass the table that pl.recipe returned") end
  parts.check_names(recipe)
  params = params or recipe.params or {}
  local o = check.options(op, opts, {}, { seed = "number", precision = "string", memory_budget = "string|number" })
  mesh.open(recipe, params)
  if recipe.strict ~= nil and type(recipe.strict) ~= "boolean" then
    pl.error("recipe", "recipe.strict is " .. check.show(recipe.strict), "write recipe.strict = true, or omit it")
  end
  local seed = check.whole(op, "seed", o.seed or params.seed or 0, 0)
  local precision = o.precision or recipe.precision or "f32"
  check.word(op, "precision", precision, parts.precisions)
  local run = { recipe = recipe, params = params, seed = seed, count = 0, stopped = false, early_stop = options.early_stop(recipe),
                precision = precision, keep = options.keep(recipe) }
  local budget = o.memory_budget or params.memory_budget or recipe.memory_budget
  if budget then pl.memory_budget(budget) end
  if recipe.states ~= nil and type(recipe.states) ~= "table" then
    pl.error("recipe", "recipe.states is " .. check.show(recipe.states), "write recipe.states = { level = pl.state(pl.zeros {}) }")
  end

  pl.seed(seed)
  run.data = build_data(recipe, params)
  pl.seed(seed) -- random numbers drawn by the data must not change the initial weights
  run.model = build_model(recipe, params, run.data, precision)
  run.opt, run.optimizers = build_optimizers(recipe, params, run.model, precision == "fp16")
  if precision == "fp16" then run.scaler = require("perilune.optim.scaler").LossScaler() end
  run.ema = build_ema(recipe, params, run.model)
  local loss = parts.part(recipe, "loss", recipe.step == nil)
  local loop = recipe.step or loss ---@type any
  parts.part(recipe, "after_step")
  if recipe.sample_log ~= nil and not check.is(recipe.sample_log, "boolean") then
    pl.error("recipe", "recipe.sample_log is " .. check.show(recipe.sample_log), "write recipe.sample_log = true")
  end
  if recipe.sample_log then run.log = native.sample_log() end
  run.place = type(loop) == "function" and native.written_at(loop) or 0
  options.schedule(run)
  local made = runs.new(run)
  experts.start(made)
  mesh.place(made)
  return made
end

---Overfits the first training batch, as a test of model and loss.
---Trains on batch 0 until its loss is at most `threshold`. A model that fails has an error that more data does not correct.
---@param recipe perilune.Recipe
---@param params table?
---@param opts {steps?: integer, threshold?: number, seed?: integer}? at most 300 steps, to a loss of 0.05 by default
---@return {ok: boolean, first: number, last: number, steps: integer}
function train.memorise(recipe, params, opts)
  local o = check.options("train.memorise", opts, { steps = 300, threshold = 0.05 }, { seed = "number" })
  local run = train.new(recipe, params, { seed = o.seed })
  run.log = nil -- it does not go through the stream of samples
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
