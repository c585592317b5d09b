-- train/mixture.lua: asks for the weights of a mixture during a run, and stores which places of the stream had which.
--
-- The weights of a step are decided 16 steps before it, so prefetching never reads a place that is still undecided. They are a function
-- of the step and of metrics, and the list of decisions belongs to the cursor of a checkpoint: a resumed run has the same samples.

local pl = require "perilune"
local check = require "perilune.check"
local position = require "perilune.train.position"
local tree = require "perilune.tree"

local mixture = {}

-- Steps between a decision and the first step that it holds for. It exceeds the batches that a loader prefetches.
local LEAD <const> = 16

---Returns the records of the training data that are those of a mixture.
---@param run perilune.Run
---@return perilune.NativeRecords? records
---@return perilune.LiveMixture? live with weights that are a function
local function mixed(run)
  local train = run.data.train
  local records = train.records
  if type(records) ~= "userdata" or not records:mixture() then return nil end
  return records --[[@as perilune.NativeRecords]], train.live
end

---Asks for the weights of the steps from the one after `LEAD` others on.
local function decide(run, records, live, metrics)
  local weights = live.weights(run.count + LEAD + 1, metrics)
  records:decide(position.sample(run, run.count + LEAD), weights)
end

---Begins the mixture of a new run. Raises if another loader than that of the training data has weights that are a function.
---@param run perilune.Run
function mixture.start(run)
  run.evaluated = {}
  for _, name in ipairs(tree.names(run.data)) do
    if name ~= "train" and type(run.data[name]) == "table" and run.data[name].live then
      pl.error("recipe.data", ("the weights of the mixture in '%s' are a function of the step, which only the training data has"):format(name),
        "give numbers: { web = 1, sft = 0.2 }")
    end
  end
  local records, live = mixed(run)
  if records and live then decide(run, records, live, {}) end
end

---Asks for weights after a step, where they are due.
---@param run perilune.Run
---@param result perilune.StepResult
function mixture.after_step(run, result)
  local records, live = mixed(run)
  if not records or not live or run.count % live.every ~= 0 then return end
  -- A metric is read from the device only if the function asks for it.
  decide(run, records, live, setmetatable({}, { __index = function(_, name)
    local value = name == "loss" and result.loss or result.metrics[name] ---@type any
    if pl.is_tensor(value) then value = value:item() end
    return value or run.evaluated[name]
  end }))
end

---Stores the metrics of an evaluation for later decisions, as "valid/loss". One at the end of a part of the run does not count, since a
---run without this end has none.
---@param run perilune.Run
---@param split string
---@param metrics table<string, number>
function mixture.evaluated(run, split, metrics)
  if not run.eval_every or run.count % run.eval_every ~= 0 then return end
  for name, value in pairs(metrics) do run.evaluated[split .. "/" .. name] = value end
end

---Adds the mixture to the cursor of a checkpoint: names, schedule (runtime/data/src/records/stages/mix_schedule.rs) and metrics.
---@param run perilune.Run
---@param cursor table
function mixture.save(run, cursor)
  local records, live = mixed(run)
  if not records then return end
  local names, text = records:mixture()
  cursor.mixture, cursor.mixture_names = text, table.concat(names --[[@as string[] ]], "\n")
  if not live then return end
  local metrics = {} ---@type string[]
  for _, name in ipairs(tree.names(run.evaluated)) do metrics[#metrics + 1] = ("%s=%.17g"):format(name, run.evaluated[name]) end
  cursor.evaluated = table.concat(metrics, "\n")
end

---Takes the mixture of a cursor. Changed weights hold from its next sample on.
---@param run perilune.Run
---@param cursor table
function mixture.load(run, cursor)
  local records, live = mixed(run)
  for line in tostring(cursor.evaluated or ""):gmatch "[^\n]+" do
    local name, value = line:match "^(.*)=([^=]*)$"
    if name then run.evaluated[name] = tonumber(value) end
  end
  if not records or cursor.mixture == nil or cursor.sample == nil then return end
  local names = {} ---@type string[]
  for name in tostring(cursor.mixture_names):gmatch "[^\n]+" do names[#names + 1] = name end
  records:resume_mixture(names, tostring(cursor.mixture), check.whole("run:seek", "sample", cursor.sample, 0), live ~= nil)
end

return mixture
