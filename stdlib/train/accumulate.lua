-- train/accumulate.lua: accumulates losses, metrics and gradients over the micro-batches of a step.
--
-- The loss of a step is sum(weight_i * loss_i) / sum(weight_i), so that n micro-batches give the mean that one batch of all
-- their samples would give. The weight of a micro-batch is what the recipe's loss returned third, else the number of targets
-- that count in a cross_entropy or nll_loss, else the number of samples. Such a weight may be known on the device only, so
-- gradients are accumulated undivided, and the optimizer multiplies them by `scale()`. A single batch needs no weight: its
-- loss and metrics pass through unchanged.

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local combine = require "perilune.train.combine"
local tree = require "perilune.tree"

---@class perilune.Accumulator
---@field single boolean whether the step has one batch only
---@field fp16 boolean
---@field loss any sum of weight * loss; with a single batch the loss
---@field metrics table<string, any> sums of weight * metric; with a single batch the metrics
---@field rules table<string, perilune.train.Rule> of metrics that are functions of means
---@field total any sum of the weights
---@field unit any fp16: the first weight, which every loss is divided by before the backward pass
---@field weight any of the current micro-batch
---@field sum any weight * loss of the current micro-batch
local Accumulator = {}
local meta = { __index = Accumulator }

---Adds weight * value to a sum, without its gradient.
local function add(sum, value, weight)
  local v = value * weight ---@type any
  if pl.is_tensor(v) then v = v:detach() end
  return sum and sum + v or v
end

---Returns the term of the step's loss that a micro-batch contributes: call backward() on it.
---@param loss perilune.Tensor mean over the micro-batch
---@param weight number|perilune.Tensor? nil: derived from the loss
---@param samples integer
---@return perilune.Tensor
function Accumulator:term(loss, weight, samples)
  if self.single then
    self.loss = loss
    return loss
  end
  local sum, w = nil, weight ---@type any, any
  if w == nil then
    sum, w = native.loss_sum(loss)
    w = w or samples
  end
  if pl.is_tensor(w) then w = w:to("f32") end
  self.weight, self.sum = w, sum or loss * w
  if not self.fp16 then return self.sum end
  -- A sum over thousands of tokens times the loss scale would overflow fp16 gradients: divide by the first weight.
  self.unit = self.unit or (pl.is_tensor(w) and w:clamp(1) or math.max(w, 1))
  return self.sum / self.unit --[[@as perilune.Tensor]]
end

---Adds the loss and the metrics of the micro-batch to the sums, after its backward pass.
---@param metrics table<string, perilune.Tensor|number>
function Accumulator:add(metrics)
  if self.single then
    self.metrics = metrics
    return
  end
  self.loss = add(self.loss, self.sum, 1)
  metrics = combine.split(metrics, self.rules)
  for _, name in ipairs(tree.names(metrics)) do
    if combine.is_joined(name) then
      local list = self.metrics[name] or {}
      list[#list + 1] = metrics[name]:detach()
      self.metrics[name] = list
    else
      self.metrics[name] = add(self.metrics[name], metrics[name], self.weight)
    end
  end
  self.total = self.total and self.total + self.weight or self.weight
end

---Returns the factor that turns the accumulated gradients into those of the mean; nil stands for 1.
---@return number|perilune.Tensor?
function Accumulator:scale()
  if self.single then return nil end
  return (self.unit or 1) / self.total
end

---Computes the weighted means over all micro-batches.
---@return perilune.Tensor loss
---@return table<string, any> metrics
function Accumulator:means()
  if self.single then return self.loss, self.metrics end
  local loss, metrics = self.loss / self.total --[[@as perilune.Tensor]], {} ---@type perilune.Tensor, table<string, any>
  for _, name in ipairs(tree.names(self.metrics)) do metrics[name] = combine.is_joined(name) and self.metrics[name] or self.metrics[name] / self.total end
  return loss, combine.join(metrics, self.rules)
end

---Starts the sums of a step of `n` micro-batches.
---@param n integer
---@param fp16 boolean whether a loss scaler multiplies the terms
---@return perilune.Accumulator
return function(n, fp16)
  return setmetatable({ single = n == 1, fp16 = fp16, metrics = {}, rules = {} }, meta)
end
