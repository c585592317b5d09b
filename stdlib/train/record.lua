-- train/record.lua: records the step at a run's position, for taking it, for a dry run and for a search for NaN.

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local experts = require "perilune.train.experts"
local optimizers = require "perilune.train.optimizers"
local position = require "perilune.train.position"
local step = require "perilune.train.step"

local record = {}

---Makes the training batches of the step at the run's position, and reports the time to `perilune profile`.
---@param run perilune.Run
---@return any[][] batches micro-batches as { batch, number of samples }
function record.next_batches(run)
  local batches, start = {}, pl.clock()
  for i = 1, run.accumulate do batches[i] = { position.batch(run, i - 1) } end
  native.waited(pl.clock() - start)
  return batches
end

---Makes every assignment of the step conditional on a finite loss and gradient norm, according to `on_nan` and `on_spike`.
---The condition is evaluated on the device and reads nothing back. The gradient norm counts if the optimizer computes one;
---with fp16 the loss scaler checks the gradients.
local function guard(run, loss)
  local norms = optimizers.take_norms(run)
  if loss:dim() > 0 then loss = loss:sum() end
  local ok
  if run.on_nan ~= "warn" then
    ok = loss:isfinite()
    for _, norm in ipairs(run.scaler and {} or norms) do ok = ok:logical_and(norm:isfinite()) end
  end
  if run.on_spike == "skip" then
    local fits = loss:gt(run.loss_limit or math.huge):logical_not()
    ok = ok and ok:logical_and(fits) or fits
  end
  if ok then native.guard(ok) end
end

---Records a step and its guard.
---@param run perilune.Run
---@param get_batches fun(): any[][]
---@return table<string, any> values { loss =, [".metric"] =, ["#1.loss"] = } for the sample log
---@return integer samples
function record.guarded_step(run, get_batches)
  local batches, samples = get_batches(), 0
  for _, b in ipairs(batches) do samples = samples + b[2] end
  local loss, metrics, each = step(run, batches)
  local values = { loss = loss }
  for name, value in pairs(metrics) do values["." .. name] = value end
  for i, part in ipairs(run.sample_log and each or {}) do
    for name, value in pairs(part) do values[("#%d.%s"):format(i, name)] = value end
  end
  values[".expert_load"] = values[".expert_load"] or experts.busiest(run)
  guard(run, loss)
  return values, samples
end

return record
