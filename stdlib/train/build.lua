-- train/build.lua: builds the data, the model and the optimizers of a recipe as a run at step 0.

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
local runs = require "perilune.train.run"

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

---Builds a run. Raises if a part of the recipe is missing or has the wrong type. With `beside`, the mesh and the memory budget of the process
---stay as they are: it has another run.
---@param recipe perilune.Recipe
---@param params table the final value of every param
---@param o {seed?: integer, precision?: string, memory_budget?: string|integer, beside?: boolean}
---@return perilune.Run
local function build(recipe, params, o)
  local op = "train.new"
  parts.check_names(recipe)
  if not o.beside then mesh.open(recipe, params) end
  if recipe.strict ~= nil and type(recipe.strict) ~= "boolean" then
    pl.error("recipe", "recipe.strict is " .. check.show(recipe.strict), "write recipe.strict = true, or omit it")
  end
  local seed = check.whole(op, "seed", o.seed or params.seed or 0, 0)
  local precision = o.precision or recipe.precision or "f32"
  check.word(op, "precision", precision, parts.precisions)
  local run = { recipe = recipe, params = params, seed = seed, count = 0, stopped = false, early_stop = options.early_stop(recipe),
                precision = precision, keep = options.keep(recipe) }
  local budget = o.memory_budget or params.memory_budget or recipe.memory_budget
  if budget and not o.beside then pl.memory_budget(budget) end
  if recipe.states ~= nil and type(recipe.states) ~= "table" then
    pl.error("recipe", "recipe.states is " .. check.show(recipe.states), "write recipe.states = { level = pl.state(pl.zeros {}) }")
  end

  pl.seed(seed)
  run.data = build_data(recipe, params)
  options.schedule(run)
  pl.seed(seed) -- random numbers drawn by the data must not change the initial weights
  run.model = build_model(recipe, params, run.data, precision)
  run.opt, run.optimizers = build_optimizers(recipe, params, run.model, precision == "fp16")
  if precision == "fp16" then run.scaler = require("perilune.optim.scaler").LossScaler() end
  run.ema = build_ema(recipe, params, run.model)
  local loss = parts.part(recipe, "loss", recipe.step == nil)
  local loop = recipe.step or loss ---@type any
  for _, name in ipairs { "after_step", "sample", "on_step", "on_eval", "on_end" } do parts.part(recipe, name) end
  parts.check_sinks(recipe)
  if recipe.sample_log ~= nil and not check.is(recipe.sample_log, "boolean") then
    pl.error("recipe", "recipe.sample_log is " .. check.show(recipe.sample_log), "write recipe.sample_log = true")
  end
  if recipe.sample_log then run.sample_log = native.sample_log() end
  run.place = type(loop) == "function" and native.written_at(loop) or 0
  local made = runs.new(run)
  experts.start(made)
  mesh.place(made)
  return made
end

return build
