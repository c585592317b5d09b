-- train/record.lua: records the step at a run's position, for taking it, for a dry run and for a search for NaN.

local pl = require "perilune"
local step = require "perilune.train.step"

local record = {}

---Makes the training batches of the step at the run's position, and reports the time to `perilune profile`.
---@param run perilune.Run
---@return any[][] batches micro-batches as { batch, number of samples }
function record.next_batches(run)
  local batches, start = {}, pl.clock()
  for i = 1, run.accumulate do batches[i] = { run.data.train:batch_at(run.count * run.accumulate + i - 1) } end
  pl.native.waited(pl.clock() - start)
  return batches
end

---Makes every assignment of the step conditional on a finite loss and gradient norm, according to `on_nan` and `on_spike`.
---The condition is evaluated on the device and reads nothing back. The gradient norm counts if the optimizer computes one;
---with fp16 the loss scaler checks the gradients.
local function guard(run, loss)
  local norm = run.opt and not run.scaler and run.opt.norm or nil
  if run.opt then run.opt.norm = nil end
  if loss:dim() > 0 then loss = loss:sum() end
  local ok
  if run.on_nan ~= "warn" then
    ok = loss:isfinite()
    if norm then ok = ok:logical_and(norm:isfinite()) end
  end
  if run.on_spike == "skip" then
    local fits = loss:gt(run.loss_limit or math.huge):logical_not()
    ok = ok and ok:logical_and(fits) or fits
  end
  if ok then pl.native.guard(ok) end
end

---Records a step and its guard.
---@param run perilune.Run
---@param get_batches fun(): any[][]
---@return table<string, any> values { loss =, [".metric"] = }
---@return integer samples
function record.guarded_step(run, get_batches)
  local batches, samples = get_batches(), 0
  for _, b in ipairs(batches) do samples = samples + b[2] end
  local loss, metrics = step(run, batches)
  local values = { loss = loss }
  for name, value in pairs(metrics) do values["." .. name] = value end
  guard(run, loss)
  return values, samples
end

---Returns the counters that recording a step advances and that are not States: updates of the optimizer and of the moving average.
---@param run perilune.Run
---@return integer? updates
---@return integer? ema_updates
function record.counts(run) return run.opt and run.opt.count, run.ema and run.ema.count end

---Sets the counters to what `counts` returned.
---@param run perilune.Run
---@param updates integer?
---@param ema_updates integer?
function record.set_counts(run, updates, ema_updates)
  if run.opt then run.opt.count = updates --[[@as integer]] end
  if run.ema then run.ema.count = ema_updates --[[@as integer]] end
end

return record
