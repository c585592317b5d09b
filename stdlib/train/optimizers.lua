-- train/optimizers.lua: holds the optimizers of a run: one, or several by name, as recipe.optimizer returned them.
--
-- An optimizer has States (moments) and counts of updates: those of the optimizer, which its schedule reads, and those of each
-- parameter, which bias correction reads. Checkpoints store the States as optim.PATH, or optim.NAME.PATH with several optimizers,
-- and the counts in the cursor as `updates`, or `optim.NAME.updates`. The count of a parameter that has missed updates is stored
-- as `updates.PATH`.

local pl = require "perilune"
local check = require "perilune.check"
local tree = require "perilune.tree"
local base = require "perilune.optim.base"
local schedule = require "perilune.optim.schedule"
local parts = require "perilune.train.recipe"

local optimizers = {}

---@class perilune.train.NamedOptimizer
---@field name string? nil if the run has one optimizer without a name
---@field opt perilune.Optimizer

---@class perilune.train.Counts counts of updates at one moment, for `set_counts`
---@field [integer] {count: integer, missed: integer[]?} of each optimizer
---@field ema integer?

-- What a run needs of an optimizer, as those of the library have it.
local methods = { "step", "states", "counts", "set_counts", "lr", "count_on_device" }

local function is_optimizer(value)
  if type(value) ~= "table" or type(value.groups) ~= "table" or math.type(value.count) ~= "integer" then return false end
  for _, name in ipairs(methods) do
    if type(value[name]) ~= "function" then return false end
  end
  return true
end

---Checks what recipe.optimizer returned.
---@param recipe perilune.Recipe
---@param value any
---@return perilune.train.NamedOptimizer[] list in a fixed order
function optimizers.list(recipe, value)
  if value == nil then return {} end
  if is_optimizer(value) then return { { opt = value } } end
  local out, cure = {}, "return an optimizer, as in `return optim.AdamW(model, { lr = p.lr })`, or several by name: { G = ..., D = ... }"
  local function fault(message) parts.fault(recipe, "optimizer", message, cure) end
  if type(value) ~= "table" or next(value) == nil then fault("it returned " .. check.show(value)) end
  for _, name in ipairs(tree.names(value)) do
    if type(name) ~= "string" or not name:find "^[%a_][%w_]*$" then
      fault(("the name %s of an optimizer is not a word of letters, digits and underscores"):format(check.show(name)))
    end
    if not is_optimizer(value[name]) then fault(("%s is %s"):format(name, check.show(value[name]))) end
    out[#out + 1] = { name = name, opt = value[name] }
  end
  if recipe.step == nil then
    parts.fault(recipe, "optimizer", "it returned several optimizers, and the default step uses one",
      "write recipe.step(run, batch), with run.opt." .. out[1].name .. ":step()")
  end
  return out
end

---Lists the States of all optimizers by their names in a checkpoint, without the leading `optim.`.
---@param run perilune.Run
---@return perilune.Entry[]
function optimizers.states(run)
  local out = {}
  for _, o in ipairs(run.optimizers) do
    for _, entry in ipairs(o.opt:states()) do
      out[#out + 1] = { path = o.name and tree.join(o.name, entry.path) or entry.path, state = entry.state }
    end
  end
  return out
end

---Returns the counts of updates, which recording a step advances and which are not States.
---@param run perilune.Run
---@return perilune.train.Counts
function optimizers.counts(run)
  local out = { ema = run.ema and run.ema.count } ---@type perilune.train.Counts
  for i, o in ipairs(run.optimizers) do out[i] = o.opt:counts() end
  return out
end

---Sets the counts of updates to those that `counts` returned.
---@param run perilune.Run
---@param counts perilune.train.Counts
function optimizers.set_counts(run, counts)
  for i, o in ipairs(run.optimizers) do
    o.opt:set_counts(counts[i])
  end
  if run.ema then run.ema.count = counts.ema --[[@as integer]] end
end

---Moves the counts of updates back to those before the last `n` steps, for repeating a step.
---@param run perilune.Run
---@param n integer
function optimizers.go_back(run, n)
  for _, o in ipairs(run.optimizers) do
    o.opt.count = math.max(0, o.opt.count - n)
  end
end

local function key(o, path)
  local name = o.name and "optim." .. o.name .. ".updates" or "updates"
  return path and name .. "." .. path or name
end

---Calls `visit` for each parameter of an optimizer of the library.
local function each_parameter(o, visit)
  for _, group in ipairs(o.opt.groups) do
    for _, p in ipairs(group.params) do visit(p) end
  end
end

---Stores the counts of updates in a cursor.
---@param run perilune.Run
---@param cursor table
function optimizers.save(run, cursor)
  for _, o in ipairs(run.optimizers) do
    cursor[key(o)] = o.opt.count
    each_parameter(o, function(p)
      if p.missed > 0 then cursor[key(o, p.path)] = o.opt.count - p.missed end
    end)
  end
end

---Lists the updates that each State of the optimizers has had, by its name in a checkpoint.
---@param run perilune.Run
---@return table<string, integer>
function optimizers.updates_of_states(run)
  local out = {}
  for _, o in ipairs(run.optimizers) do
    each_parameter(o, function(p)
      for name in pairs(p.slots) do
        out[optimizers.slot_path(o, p, name)] = o.opt.count - p.missed
      end
    end)
  end
  return out
end

---Returns the name in a checkpoint of a slot of a parameter.
---@param o perilune.train.NamedOptimizer
---@param p perilune.Parameter
---@param slot string
---@return string
function optimizers.slot_path(o, p, slot)
  return ("optim.%s%s.%s.%s"):format(o.name and o.name .. "." or "", p.rule.name, slot, p.path)
end

---Lists the names in a checkpoint of the States that count updates on the device.
---@param run perilune.Run
---@return string[]
function optimizers.counters(run)
  local out = {}
  for _, o in ipairs(run.optimizers) do
    each_parameter(o, function(p)
      if p.slots.step then out[#out + 1] = optimizers.slot_path(o, p, "step") end
    end)
  end
  return out
end

---Restores the counts of updates from a cursor. A parameter whose slots were not restored starts anew; the count that is then a
---State on the device is set here.
---@param run perilune.Run
---@param cursor table
---@param slots table<string, integer>? updates of the States that are not those of the cursor: 0 for new ones
function optimizers.load(run, cursor, slots)
  slots = slots or {}
  for _, o in ipairs(run.optimizers) do
    local opt = o.opt
    opt.count = cursor[key(o)] or run.count
    opt.absences, opt.batches = 0, nil
    each_parameter(o, function(p)
      local updates = cursor[key(o, p.path)] or opt.count
      local counter = p.slots.step
      for name in pairs(p.slots) do
        local other = slots[optimizers.slot_path(o, p, name)]
        if other and name ~= "step" then updates = other end
      end
      p.missed = math.max(0, opt.count - updates) --[[@as integer]]
      opt.absences = opt.absences + p.missed
      if counter and slots[optimizers.slot_path(o, p, "step")] then counter:assign(pl.full({}, updates)) end
    end)
  end
end

---Begins a step in which only the optimizers of the run, and those made in it, may step; ends it when the block ends.
---@param run perilune.Run
---@return table closer
function optimizers.scope(run)
  local before, known = base.scope, {}
  for _, o in ipairs(run.optimizers) do known[o.opt] = true end
  base.scope = { known = known }
  return setmetatable({}, { __close = function() base.scope = before end })
end

-- The largest rate of a schedule over the steps of a run; long runs are sampled.
local function peak(op, rate, steps)
  if type(rate) == "number" then return rate end
  local top = 0.0
  for step = 0, steps - 1, math.max(1, steps // 2000) do top = math.max(top, schedule.at(op, rate, step)) end
  return top
end

---@class perilune.train.RateRamp
---@field peak number the largest rate of the first group that has one above 0, with the recipe's own schedule
---@field rate fun(step: integer): number the rate of that group at a step of the ramp, from 0
---@field stands fun(): boolean whether no step has replaced a rate of the ramp

---Replaces the rates of all groups by a geometric ramp from `from` to `to` over `steps` updates. The groups keep the ratios of
---their largest rates: that of the first group with a rate above 0 follows the ramp itself. The counts of updates go on.
---@param run perilune.Run
---@param from number
---@param to number
---@param steps integer at least 2
---@return perilune.train.RateRamp
function optimizers.ramp(run, from, to, steps)
  local owners, peaks, first = {}, {}, nil ---@type {table: table, from: integer}[], table<any, number>, number?
  local function add(o, owner)
    local rate = owner.lr
    peaks[rate] = peaks[rate] or peak("optim." .. o.opt.kind, rate, run.steps)
    if not first and peaks[rate] > 0 then first = peaks[rate] end
    owners[#owners + 1] = { table = owner, from = o.opt.count }
  end
  for _, o in ipairs(run.optimizers) do
    for _, group in ipairs(o.opt.groups) do
      if #group.params > 0 then add(o, group.options) end
      for _, p in ipairs(group.params) do
        if p.lr then add(o, p) end
      end
    end
  end
  if not first then
    local message = #owners == 0 and "the recipe has no optimizer" or "all learning rates are 0"
    pl.error("recipe", message, "a ramp of rates needs an optimizer with a rate above 0, returned by recipe.optimizer")
  end
  local reference = first --[[@as number]]
  local function at(step) return from * (to / from) ^ (step / (steps - 1)) end
  -- Parameters of the same rate keep one function, so that they are updated together.
  local ramps, set = {}, {} ---@type table<any, function>, table<table, function>
  for _, owner in ipairs(owners) do
    local rate, start = owner.table.lr, owner.from
    local ratio = peaks[rate] / reference
    ramps[rate] = ramps[rate] or function(count) return ratio * at(count - start) end
    set[owner.table] = ramps[rate]
  end
  for owner, ramp in pairs(set) do owner.lr = ramp end
  local function stands()
    for owner, ramp in pairs(set) do
      if owner.lr ~= ramp then return false end
    end
    return true
  end
  return { peak = reference, rate = at, stands = stands }
end

---Sets whether the next step computes the norm of all gradients although nothing is clipped. Returns what was set before.
---@param run perilune.Run
---@param measured (boolean?)[]|boolean
---@return (boolean?)[]
function optimizers.measure(run, measured)
  local before = {}
  for i, o in ipairs(run.optimizers) do
    before[i] = o.opt.measured or false
    if type(measured) == "table" then o.opt.measured = measured[i] else o.opt.measured = measured end
  end
  return before
end

---Returns the norms of the gradients in the step being recorded, and forgets them.
---@param run perilune.Run
---@return perilune.Tensor[]
function optimizers.take_norms(run)
  local out = {}
  for _, o in ipairs(run.optimizers) do
    out[#out + 1] = o.opt.norm
    o.opt.norm = nil
  end
  return out
end

return optimizers
