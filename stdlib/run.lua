-- run.lua: gives a plain script a run directory, a progress bar, and curves that `perilune runs` and `perilune plot` read.
--
--   local run = pl.run { name = "spiral", steps = 1000, params = p }
--   for step in run:each() do
--     run:log { loss = train(step) }
--   end

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local check = require "perilune.check"
local log = require "perilune.train.log"
local tree = require "perilune.tree"

---@class perilune.ScriptRun
---@field name string
---@field dir string? the run directory; nil in a process that does not write it
---@field params table
---@field steps integer? length of the run
---@field count integer the step that runs, from 1; 0 before the first
local ScriptRun = {}

local meta = { __name = "perilune.ScriptRun", __index = ScriptRun }

function meta.__tostring(run)
  return ("run of %s · step %d%s"):format(run.name, run.count, run.steps and (" of %d"):format(run.steps) or "")
end

---Iterates over the steps of the run: 1 to `steps`, or without end if it has no length. Reports each step when it has ended, and ends after
---one at a stop request such as Ctrl-C, so that what follows the loop can save its results.
---@return fun(): integer?
function ScriptRun:each()
  return function()
    if self.count > 0 and not native.script_step(self.count) then return nil end
    if self.steps and self.count >= self.steps then return nil end
    self.count = self.count + 1
    return self.count
  end
end

---Logs values of the present step: numbers and scalar tensors as curves, strings as texts, train.image(x) and train.histogram(x).
---`loss` is shown in the bar. Tensors are read at once.
---@param values table<string, number|string|perilune.Tensor|perilune.LoggedImage|perilune.LoggedHistogram>
---@param step integer? the present one by default
function ScriptRun:log(values, step)
  local op = "run:log"
  log.write(op, step == nil and self.count or check.whole(op, "step", step, 0), values)
end

---Begins the run of a plain script: creates its directory, runs/NAME-DATE-TIME or that of --run-dir, with the script, its params and
---its curves. Raises at the prompt, in a recipe, and if the script has begun a run already.
---@param options {name: string?, steps: integer?, params: table?}? name: that of the script's file; steps: the length, for the bar; params: for `perilune runs`
---@return perilune.ScriptRun
return function(options)
  local op = "run"
  local o = check.options(op, options, {}, { name = "string", steps = "number", params = "table" })
  if o.steps then check.whole(op, "steps", o.steps, 0) end
  local params = {} ---@type table<string, any>
  for name, value in pairs(o.params or {}) do
    if type(name) ~= "string" or not check.is(value, "number|string|boolean") then
      pl.error(op, ("params[%s] is %s"):format(check.show(name), check.show(value)), "params are named numbers, strings and booleans")
    end
    params[name] = value
  end
  local names, values = tree.names(params), {}
  for i, name in ipairs(names) do values[i] = params[name] end
  local name, dir = native.script_open(o.name, o.steps, names, values)
  return setmetatable({ name = name, dir = dir, steps = o.steps, params = o.params or {}, count = 0 }, meta)
end
