-- train/run.lua: drives a recipe one step at a time: the class perilune.Run.
--
-- Evaluation, checkpoint state and dry runs are methods in separate files; see the end of this file.

---@type string, table the name of this module, and what only the library may call
local _, native = ...
local pl = require "perilune"
local check = require "perilune.check"
local experts = require "perilune.train.experts"
local format = require "perilune.train.format"
local log = require "perilune.train.log"
local mixture = require "perilune.train.mixture"
local optimizers = require "perilune.train.optimizers"
local position = require "perilune.train.position"
local pseudo = require "perilune.train.pseudo"
local record = require "perilune.train.record"
local sample_log = require "perilune.train.sample_log"
local scope = require "perilune.train.scope"

---@class (partial) perilune.Run
---@field recipe perilune.Recipe what it was made of
---@field place integer source location of the recipe's loss (or step): that of ops which the loop itself records
---@field params table the value of every param
---@field data table<string, perilune.Loader> what recipe.data returned
---@field model perilune.Module what recipe.model returned
---@field opt any the perilune.Optimizer, or a table of several by name, that recipe.optimizer returned; nil if it has none
---@field optimizers perilune.train.NamedOptimizer[]
---@field ema perilune.EMA? the averages of the weights, if the recipe has `ema`
---@field steps integer length of the run
---@field count integer steps done
---@field accumulate integer micro-batches of a step
---@field segments perilune.train.Segment[] parts of the run with one batch size each
---@field precision string of products
---@field scaler perilune.LossScaler? with precision "fp16"
---@field eval_every integer? steps between two evaluations
---@field seed integer of all random numbers
---@field evaluated table<string, number> metrics of the last evaluation of each split, such as "valid/loss"
---@field on_nan "stop"|"skip"|"warn" with "stop" and "skip" a step whose loss or gradient norm is not finite changes no State
---@field on_spike "warn"|"skip"|"stop"|"off" with "skip" a step whose loss exceeds `loss_limit` changes no State
---@field loss_limit number? of the next step; set by the host that drives the run
---@field looked integer? steps that were searched for States missing from checkpoints
---@field unfinished perilune.train.Counts? counts of updates before a step that failed
---@field stopped boolean whether early stopping has ended the run
---@field early_stop {split: string, metric: string, mode: string, patience: integer, bad: integer, best: number?}?
---@field placements perilune.ExpertPlacement[] of the mixtures whose experts may change devices
---@field dir string? the run directory; nil where no command drives the run
---@field batch table the training batch at the run's position, recorded at every read
local Run = {}

local meta = {}
function meta.__index(run, key)
  if key == "batch" then return (position.batch(run, 0)) end
  if key == "optimizer" then return rawget(run, "opt") end
  if key == "dir" then return native.run_dir() end
  return Run[key]
end
meta.__methods, meta.__made = Run, { "batch", "optimizer", "dir" } -- names for completion

local batch_names = setmetatable({}, { __mode = "k" }) ---@type table<table, string[]>

---Completion of `run.batch.`: the names in one batch, cached.
meta.__names = {
  batch = function(run)
    local names = batch_names[run]
    if not names then
      names = {}
      for name in pairs(run.batch) do
        if type(name) == "string" then names[#names + 1] = name end
      end
      batch_names[run] = names
    end
    return names
  end,
}

function meta.__tostring(run)
  return ("run of %s · step %d of %d · %s parameters"):format(run.recipe.name or "a recipe", run.count, run.steps,
    require("perilune.nn.module").grouped(run.model:num_parameters()))
end

---@class perilune.StepResult
---@field step integer steps done, this one included
---@field loss perilune.Tensor
---@field metrics table<string, perilune.Tensor>
---@field samples integer

local step_meta = { __tostring = function(result) return ("step %d · %s"):format(result.step, format.metrics(result.loss:item(), result.metrics)) end }

---Warns of States that the step assigns and no checkpoint would contain. Checks the first two steps: a State may be created
---when it is first needed.
local function check_states(run)
  local looked = run.looked or 0
  if looked == 2 then return end
  run.looked = looked + 1
  local known = {}
  for _, entry in ipairs(run:states()) do known[#known + 1] = entry.state end
  if native.unsaved(known) then run.looked = 2 end
end

---Records and executes one step over the batches that `get_batches` returns.
---@param run perilune.Run
---@param get_batches fun(): any[][]
---@return perilune.StepResult
local function take_step(run, get_batches)
  -- A step that failed and was caught (out of memory) changed no State: reset its counters too.
  local failed = run.unfinished
  if failed then optimizers.set_counts(run, failed) end
  run.unfinished = optimizers.counts(run)
  if failed then native.at(0) end
  experts.rebalance(run)
  optimizers.measure(run, run.on_nan == "skip")
  local samples = 0
  local values = scope.evaluate(function()
    local _placed <close> = scope.at_place(run)
    local all, n = record.guarded_step(run, get_batches)
    samples = n
    check_states(run)
    return all
  end)
  run.count, run.unfinished = run.count + 1, nil
  local result = setmetatable({ step = run.count, loss = values.loss, metrics = {}, samples = samples }, step_meta)
  local parts = {} ---@type table[]
  for name, value in pairs(values) do
    local i, key = name:match "^#(%d+)%.(.*)$"
    if i then
      local at = math.tointeger(i) --[[@as integer]]
      parts[at] = parts[at] or {}
      parts[at][key] = value
    elseif name ~= "loss" then
      result.metrics[name:sub(2)] = value
    end
  end
  if #parts > 0 then sample_log.push(run, parts) end
  return result
end

---Calls the recipe's `after_step` and executes what it assigned, whose plan is one of its own and no sign of a step that changed.
local function call_hook(run)
  local hook = run.recipe.after_step
  if not hook then return end
  pl.switches({ report_misses = false }, function()
    hook(run)
    pl.step(function() end)
  end)
end

---Takes one optimizer step, or `n` of them.
---@param n integer?
---@return perilune.StepResult # of the last step; its tensors are not read back
function Run:step(n)
  local result ---@type perilune.StepResult
  self.model:train()
  for _ = 1, n and check.whole("run:step", "n", n) or 1 do
    result = take_step(self, function() return record.next_batches(self) end)
    mixture.after_step(self, result)
    pseudo.after_step(self)
    call_hook(self)
  end
  return result
end

---Whether all steps are done, or early stopping has ended the run.
---@return boolean
function Run:finished()
  return self.stopped or self.count >= self.steps
end

---Says why early stopping has ended the run.
---@return string? reason nil if it has not
function Run:stop_reason()
  local es = self.early_stop
  local best = es and es.best
  if not (self.stopped and es and best) then return nil end
  return ("%s/%s has not improved on %s in %d evaluation%s"):format(
    es.split, es.metric, format.number(best), es.bad, es.bad == 1 and "" or "s")
end

---Lists the samples that step `k`, counted from 1, trained on.
---@param k integer
---@return string? what what the numbers count, such as "rows"; nil if the loader does not number its samples
---@return integer[]? ids
function Run:samples_of(k)
  return position.samples(self, k - 1)
end

---Returns the learning rates of the next update, one for each parameter group of each optimizer.
---@return number[]? rates nil without an optimizer that has groups
function Run:rates()
  local out = {}
  for _, o in ipairs(self.optimizers) do
    for i = 1, #o.opt.groups do out[#out + 1] = o.opt:lr(i) end
  end
  return #out > 0 and out or nil
end

for _, part in ipairs { require "perilune.train.evaluate", require "perilune.train.state", require "perilune.train.dry_run",
                        require "perilune.train.packing", require "perilune.train.generate", log, sample_log, pseudo } do
  for name, method in pairs(part.methods) do Run[name] = method end
end

---Gives the fields of a run its methods.
---@param fields table
---@return perilune.Run
local function new(fields)
  local run = setmetatable(fields, meta) --[[@as perilune.Run]]
  position.start(run)
  mixture.start(run)
  pseudo.start(run)
  return run
end

return { new = new, take_step = take_step }
