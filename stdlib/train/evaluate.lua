-- train/evaluate.lua: evaluates a split: weighted means of loss and metrics over its batches, and early stopping.

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local check = require "perilune.check"
local combine = require "perilune.train.combine"
local format = require "perilune.train.format"
local mixture = require "perilune.train.mixture"
local position = require "perilune.train.position"
local recipes = require "perilune.train.recipe"
local scope = require "perilune.train.scope"

---@class (partial) perilune.Run
local Run = {}

---Updates the early-stopping counters with the result of an evaluation.
local function watch(run, split, result)
  local es = run.early_stop
  if not es or es.split ~= split then return end
  local value = result[es.metric]
  if value == nil then
    pl.error("recipe.early_stop", ("there is no metric '%s/%s'"):format(split, es.metric), "name one that recipe.loss or recipe.evaluate returns")
  end
  local better = es.best == nil or (es.mode == "min" and value < es.best) or (es.mode == "max" and value > es.best)
  if better then es.best, es.bad = value, 0 else es.bad = es.bad + 1 end
  run.stopped = es.bad >= es.patience
end

---Records the evaluation of batch `k` by recipe.evaluate, or by recipe.loss if there is none.
---@param run perilune.Run
---@param loader perilune.Loader
---@param k integer
---@return table<string, any> values { loss =, [".metric"] = }; without loss if the recipe returned metrics alone
---@return any weight of the batch, a number or a scalar tensor
local function record_batch(run, loader, k)
  local fn, name = run.recipe.evaluate, "evaluate"
  if not fn then fn, name = recipes.part(run.recipe, "loss", true), "loss" end
  return pl.no_grad(function()
    local batch, samples = position.named(loader:batch_at(k))
    local first, second, third = recipes.call(run, fn, run.model, batch)
    local values = {} ---@type table<string, any>
    if type(first) == "table" and not pl.is_tensor(first) then -- metrics, weight
      for key, value in pairs(first) do values["." .. key] = value end
      return values, second or samples
    end
    local loss, metrics, weight = recipes.check_loss(run.recipe, name, samples, first, second, third)
    values.loss = loss
    if weight == nil then weight = select(2, native.loss_sum(loss)) or samples end
    for key, value in pairs(metrics) do values["." .. key] = value end
    return values, weight
  end)
end

---Computes the loss and metrics over a whole split, as plain numbers.
---Means over its batches, weighted as micro-batches are, and functions of means (`metrics.new`); without gradients, in evaluation
---mode, with the averaged weights if the recipe has `ema`. Weights, modes and random numbers are restored, also after an error: a step after
---an evaluation has the bits of one without.
---@param split string? "valid" by default
---@param limit integer? maximum number of batches
---@return table<string, number>
function Run:evaluate(split, limit)
  split = split or "valid"
  local loader = self.data[split]
  if not recipes.is_loader(loader) then
    local names = {}
    for name, value in pairs(self.data) do
      if recipes.is_loader(value) then names[#names + 1] = name end
    end
    table.sort(names)
    pl.error("run:evaluate", ("there is no split '%s'"):format(tostring(split)), "this recipe's data has " .. table.concat(names, ", "))
  end
  local mean = require("perilune.metrics").Mean()
  local _same <close> = scope.same_random()
  local _back <close> = scope.evaluation(self)
  local batches = loader:batches()
  if limit then batches = math.min(batches, check.whole("run:evaluate", "limit", limit)) end
  local rules = {} ---@type table<string, perilune.train.Rule>
  for k = 0, batches - 1 do
    local weight
    local values = scope.evaluate(function()
      local _placed <close> = scope.at_place(self)
      local all, w = record_batch(self, loader, k)
      all, weight = combine.split(all, rules), w
      if pl.is_tensor(weight) then all.weight, weight = weight, nil end
      return all
    end)
    weight, values.weight = weight or values.weight, nil
    mean:add(values, weight)
  end
  local means = combine.join(mean:result(), rules)
  local result = { loss = means.loss } ---@type table<string, number>
  for key, value in pairs(means) do
    if key ~= "loss" then result[key:sub(2)] = value end
  end
  watch(self, split, result)
  mixture.evaluated(self, split, result)
  return setmetatable(result, { __tostring = function(r) return ("%s %s"):format(split, format.metrics(r.loss, r)) end })
end

return { methods = Run, record_batch = record_batch }
