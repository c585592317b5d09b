-- train/dry_run.lua: records steps that change no State: the dry run before a hot reload, the digests of a step's tensors,
-- and the search for the first NaN.

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local evaluate = require "perilune.train.evaluate"
local optimizers = require "perilune.train.optimizers"
local record = require "perilune.train.record"
local recipes = require "perilune.train.recipe"
local scope = require "perilune.train.scope"
local step = require "perilune.train.step"

---@class (partial) perilune.Run
local Run = {}

---Records a step and an evaluation of one batch and executes neither.
---Raises what they would raise about shapes, dtypes and names; no State or counter changes. Values that the recipe itself
---reads in mid-step are computed.
---@param plan ("kernels"|"code"|"tensors")? "kernels" also plans the step; "code" also starts to compile the kernels that it lacks;
--- "tensors" computes and hashes all tensors of the step, and records no evaluation
---@return boolean known with "code": whether the step's plan was cached already
function Run:dry_run(plan)
  local counts = optimizers.counts(self)
  local measured = optimizers.measure(self, self.on_nan == "skip")
  local _back <close> = scope.finally(function()
    optimizers.set_counts(self, counts)
    optimizers.measure(self, measured)
    self.model:train()
  end)
  self.model:train()
  -- Record exactly what a step records, guard and metrics included, so that the plans are equal.
  local known = native.dry_run(function()
    local _placed <close> = scope.at_place(self)
    local values = record.guarded_step(self, function() return record.next_batches(self) end)
    local _, list = scope.unzip(values)
    return table.unpack(list)
  end, plan)
  local valid = self.data.valid
  if plan ~= "tensors" and recipes.is_loader(valid) and (self.recipe.evaluate or self.recipe.loss) then
    self.model:eval()
    native.dry_run(function() evaluate.record_batch(self, valid, 0) end)
  end
  return known
end

---Repeats step `k` on the current States to find the op that made its first NaN or infinity. No State or counter changes.
---@param k integer
---@return {op: string, shape: string, nan: boolean, input: boolean, state: integer?, file: string?, line: integer?}? found nil if every value is finite
function Run:diagnose(k)
  local counts, count = optimizers.counts(self), self.count
  local measured = optimizers.measure(self, not self.scaler)
  local found, done = nil, false
  self.model:train()
  optimizers.go_back(self, count - (k - 1))
  self.count = k - 1
  local ok, problem = pcall(pl.step, function()
    local loss = step(self, record.next_batches(self))
    local norms = optimizers.take_norms(self)
    if self.scaler then norms = {} end
    found = native.not_finite(loss, table.unpack(norms))
    done = true
    error("abort the step scope: its assignments must not run")
  end)
  self.count = count
  optimizers.set_counts(self, counts)
  optimizers.measure(self, measured)
  optimizers.take_norms(self)
  if not (ok or done) then error(problem, 0) end
  return found
end

return { methods = Run }
