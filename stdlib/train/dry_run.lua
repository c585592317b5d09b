-- train/dry_run.lua: records steps that change no State: the dry run before a hot reload, and the search for the first NaN.

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local evaluate = require "perilune.train.evaluate"
local record = require "perilune.train.record"
local recipes = require "perilune.train.recipe"
local scope = require "perilune.train.scope"
local step = require "perilune.train.step"

---@class (partial) perilune.Run
local Run = {}

---Records a step and an evaluation of one batch and executes neither.
---Raises what they would raise about shapes, dtypes and names; no State or counter changes. Values that the recipe itself
---reads in mid-step are computed.
---@param plan ("kernels"|"code")? "kernels" also plans the step; "code" also starts to compile the kernels that it lacks
---@return boolean known with "code": whether the step's plan was cached already
function Run:dry_run(plan)
  local updates, ema_updates = record.counts(self)
  local _back <close> = scope.finally(function()
    record.set_counts(self, updates, ema_updates)
    self.model:train()
  end)
  self.model:train()
  local measured = self.opt and self.opt.measured
  if self.opt then self.opt.measured = self.on_nan == "skip" end
  -- Record exactly what a step records, guard and metrics included, so that the plans are equal.
  local known = native.dry_run(function()
    local _placed <close> = scope.at_place(self)
    local values = record.guarded_step(self, function() return record.next_batches(self) end)
    local _, list = scope.unzip(values)
    return table.unpack(list)
  end, plan)
  if self.opt then self.opt.measured = measured end
  local valid = self.data.valid
  if recipes.is_loader(valid) and (self.recipe.evaluate or self.recipe.loss) then
    self.model:eval()
    native.dry_run(function() evaluate.record_batch(self, valid, 0) end)
  end
  return known
end

---Repeats the step at the run's position to find the op that made its first NaN or infinity. No State changes.
---@return {op: string, shape: string, nan: boolean, input: boolean, state: integer?, file: string?, line: integer?}? found nil if every value is finite
function Run:diagnose()
  local updates, ema_updates = record.counts(self)
  local found, done = nil, false
  self.model:train()
  if self.opt then self.opt.measured = not self.scaler end
  local ok, problem = pcall(pl.step, function()
    local loss = step(self, record.next_batches(self))
    local norm = self.opt and not self.scaler and self.opt.norm or nil
    if norm then found = native.not_finite(loss, norm) else found = native.not_finite(loss) end
    done = true
    error("abort the step scope: its assignments must not run")
  end)
  record.set_counts(self, updates, ema_updates)
  if self.opt then self.opt.norm = nil end
  if not (ok or done) then error(problem, 0) end
  return found
end

return { methods = Run }
