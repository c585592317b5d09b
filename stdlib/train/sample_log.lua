-- train/sample_log.lua: records which samples each step trained on, with their losses, and answers queries about them.
--
--   recipe.sample_log = true
--
--   function recipe.after_step(run)
--     if run.count % 500 == 0 then print(run:worst(1)[1].row) end
--   end
--
-- A sample has its mean loss over the targets that count and, with cross_entropy, the norm of the loss's gradient with respect to the
-- logits. Both are computed with the loss, in the step's kernels, and read when the next step has been issued. A sample is named
-- by its source and row: the file and the row of a record, the row of a table, the number of an image. A record that packs
-- several is named by the first.

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local check = require "perilune.check"
local position = require "perilune.train.position"
local recipes = require "perilune.train.recipe"
local tree = require "perilune.tree"

local sample_log = {}

---@class perilune.train.SampleValues
---@field loss perilune.Tensor (samples)
---@field weight perilune.Tensor? (samples)
---@field gradient perilune.Tensor? (samples)

---@class perilune.Sample a sample in a step
---@field source string the file of a record; else the unit of `row`: "rows", "windows"
---@field row integer from 0
---@field sub integer its number among the samples made of the row
---@field loss number? nil if it has no target
---@field weight number? what the recipe multiplied the loss by; 1 if it returned none
---@field gradient number? the norm of the loss's gradient with respect to the logits; nil if it is not known

---@class perilune.SampleStats: perilune.Sample the values of the last step that trained on it, and over all steps:
---@field count integer how often it was trained on
---@field step integer the last step that trained on it
---@field mean number? of its losses
---@field deviation number? standard deviation of its losses

---Returns the values of the samples of a micro-batch. A recipe gives them as the fourth result of `loss` (the third of `step`): a tensor
---(samples), or { loss =, weight =, gradient = }. Else they follow from a loss of the library.
---@param run perilune.Run
---@param name "loss"|"step" the recipe's function
---@param samples integer
---@param loss perilune.Tensor
---@param given any
---@return perilune.train.SampleValues
function sample_log.values(run, name, samples, loss, given)
  local function fault(message, hint) recipes.fault(run.recipe, name, message, hint) end
  if given == nil then
    local losses, gradient = native.sample_losses(loss, samples)
    if not losses then
      fault("the sample log needs the loss of each sample, which this loss does not show",
        name == "loss" and "return it fourth: return loss, metrics, nil, losses  -- a tensor (samples)" or "return it third: return loss, metrics, losses")
    end
    return { loss = losses, gradient = gradient }
  end
  if pl.is_tensor(given) then given = { loss = given } end
  local values = check.options("the samples of recipe." .. name, given, {}, { loss = "tensor", weight = "tensor", gradient = "tensor" })
  check.required("the samples of recipe." .. name, values, { "loss" })
  -- In one order, so that all processes record the same plan.
  for _, key in ipairs(tree.names(values)) do
    local value = values[key]
    if value:numel() ~= samples then
      fault(("the %s of its samples is a tensor of shape {%s}"):format(key, table.concat(value.shape, ", ")),
        ("give a tensor with one element for each of the %d samples"):format(samples))
    end
    values[key] = value:detach()
  end
  return values --[[@as perilune.train.SampleValues]]
end

---Stores the values of the last step, which are read when the next one has been issued.
---@param run perilune.Run
---@param parts perilune.train.SampleValues[] of its micro-batches
function sample_log.push(run, parts)
  for i, part in ipairs(parts) do
    for key, value in pairs(position.origins(run, run.count - 1, i - 1, part.loss:numel())) do part[key] = value end
  end
  sample_log.settle(run)
  run.unread = { step = run.count, parts = parts }
end

---Reads the values of the last step.
---@param run perilune.Run
function sample_log.settle(run)
  local unread = run.unread
  run.unread = nil
  if unread then (run.sample_log --[[@as table]]):add(unread.step, unread.parts) end
end

---@class (partial) perilune.Run
---@field sample_log table? the sample log, with recipe.sample_log
---@field unread table? the values of the last step
local Run = {}

---@param run perilune.Run
---@param op string
---@return table log
local function log_of(run, op)
  if not run.sample_log then pl.error(op, "the run has no sample log", "set recipe.sample_log = true") end
  sample_log.settle(run)
  return run.sample_log --[[@as table]]
end

---Reads the values of the last step into the sample log.
function Run:settle_sample_log() sample_log.settle(self) end

---Lists the samples that a step trained on, with their losses, in the order of its batches. Needs recipe.sample_log.
---@param step integer from 1
---@return perilune.Sample[]
function Run:samples(step)
  check.whole("run:samples", "step", step)
  return log_of(self, "run:samples"):samples(step)
end

---Lists the `k` samples with the largest losses, the largest first. Needs recipe.sample_log.
---  for _, s in ipairs(run:worst(10, { by = "mean" })) do print(s.source, s.row, s.mean) end
---@param k integer
---@param opts {by: ("last"|"mean"|"gradient")?}? by: "last" the loss when it was trained on last, "mean" over all steps, "gradient" the norm
---@return perilune.SampleStats[]
function Run:worst(k, opts)
  local o = check.options("run:worst", opts, { by = "last" })
  check.word("run:worst", "by", o.by, { "last", "mean", "gradient" })
  return log_of(self, "run:worst"):worst(check.whole("run:worst", "k", k), o.by)
end

---Returns the statistics of a sample, nil if no step has trained on it. Needs recipe.sample_log.
---@param row integer from 0
---@param opts {source: string?, sub: integer?}? source: file of the sample, the first one by default; sub: number of the sample among those of its row
---@return perilune.SampleStats?
function Run:sample(row, opts)
  local op = "run:sample"
  local o = check.options(op, opts, { sub = 0 }, { source = "string" })
  local log = log_of(self, op)
  if o.source then check.word(op, "source", o.source, log:sources()) end
  return log:of(o.source, check.whole(op, "row", row, 0), check.whole(op, "sub", o.sub, 0))
end

sample_log.methods = Run

return sample_log
