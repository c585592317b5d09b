-- train/stages.lua: cuts a model into the pipeline stages of a mesh, and sets the schedule by which they take turns.
--
-- A step is recorded once, without running, and cut by its work (Huang et al., GPipe, arXiv:1811.06965): each State of the model belongs to the
-- stage that reads it first. A schedule names the device of each stage, of which a device may have several. The micro-batches are those
-- of `accumulate`. The planner follows the places of States in every step.

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local check = require "perilune.check"
local optimizers = require "perilune.train.optimizers"
local record = require "perilune.train.record"
local scope = require "perilune.train.scope"

local stages = {}

---Reads recipe.pipeline, and sets the schedule of the run's stages.
---@param run perilune.Run
---@param n integer the number of devices along pp
---@return integer[] devices of the stages, in their order
function stages.set_schedule(run, n)
  local given = run.params.pipeline ---@type any
  if given == nil then given = run.recipe.pipeline end
  if type(given) == "string" then given = { schedule = given } end
  if given ~= nil and type(given) ~= "table" then
    pl.error("recipe.pipeline", "it is " .. check.show(given), "write { schedule = \"1f1b\" }")
  end
  local o = check.options("recipe.pipeline", given or {}, {}, { schedule = "string", chunks = "number" })
  local schedule = o.schedule
  if o.chunks ~= nil then
    local chunks = check.whole("recipe.pipeline", "chunks", o.chunks, 2)
    if not schedule then pl.error("recipe.pipeline", ("chunks = %d, and no schedule"):format(chunks), "name the one that has chunks: { schedule = \"interleaved\", chunks = 2 }") end
    schedule = ("%s,chunks=%d"):format(schedule, chunks)
  end
  if run.accumulate < n then
    pl.error("mesh", ("pp=%d: a step has %d micro-batch%s, fewer than devices along pp, most of which would wait"):format(n, run.accumulate, run.accumulate == 1 and "" or "es"),
      ("accumulate at least %d micro-batches: --set accumulate=%d; a multiple of that waits less"):format(n, n))
  end
  return native.schedule(schedule, n, run.accumulate)
end

---Spreads weights evenly over stages, by their sizes.
---@param weights perilune.Entry[] the States of the model
---@param n integer the number of stages
---@return table<any, integer> stages by State and by path
function stages.spread(weights, n)
  local total, before, sizes, out = 0, 0, {}, {}
  for i, entry in ipairs(weights) do
    local size = 1
    for _, d in ipairs(entry.state.shape) do size = size * d end
    sizes[i], total = size, total + size
  end
  for i, entry in ipairs(weights) do
    local stage = math.min(n - 1, (2 * before + sizes[i]) * n // (2 * math.max(total, 1)))
    out[entry.state], out[entry.path] = stage, stage
    before = before + sizes[i]
  end
  return out
end

---Cuts the model of a run into stages.
---@param run perilune.Run
---@param n integer the number of stages
---@param weights perilune.Entry[] the States of the model
---@return table<any, integer> stages by State and by path; a State that no forward pass reads has none
function stages.cut(run, n, weights)
  local counts = optimizers.counts(run)
  local measured = optimizers.measure(run, run.on_nan == "skip")
  local _back <close> = scope.finally(function()
    optimizers.set_counts(run, counts)
    optimizers.measure(run, measured)
    run.model:train()
  end)
  run.model:train()
  local states = {}
  for i, entry in ipairs(weights) do states[i] = entry.state end
  local _placed <close> = scope.at_place(run)
  local places = native.cut_stages(function()
    local values = record.guarded_step(run, function() return record.next_batches(run) end)
    local _, list = scope.unzip(values)
    return table.unpack(list)
  end, n, states)
  local out = {}
  for i, entry in ipairs(weights) do
    local stage = places[i] or nil
    out[entry.state], out[entry.path] = stage, stage
  end
  return out
end

return stages
