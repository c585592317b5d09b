-- train/scope.lua: runs functions as step scopes of the training loop, with clean-up and source locations.

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local tree = require "perilune.tree"

local scope = {}

---Calls `fn` when the enclosing block ends, also by an error. An interrupt of the run is delivered after it. In a job of several
---processes it is not called after an error that the others have not raised: they would have to compute the same.
---  local _back <close> = scope.finally(function() model:train() end)
---@param fn fun()
---@return table closer
function scope.finally(fn)
  return setmetatable({}, { __close = function(_, failure)
    if failure == nil or native.fails(failure) then native.undisturbed(fn) end
  end })
end

---Attributes ops that the loop itself records to `run.place` until the enclosing block ends.
---No line of the recipe is on the stack then, so the line where the recipe's loss (or step) begins stands for them.
---@param run perilune.Run
---@return table closer
function scope.at_place(run)
  local before = native.at(run.place)
  return setmetatable({}, { __close = function() native.at(before) end })
end

---Puts a run into evaluation mode, with the averaged weights if the recipe has `ema`, until the enclosing block ends, also by an error.
---  local _back <close> = scope.evaluation(run)
---@param run perilune.Run
---@return table closer
function scope.evaluation(run)
  run.model:eval()
  if run.ema then native.undisturbed(function() run.ema:swap() end) end
  -- A hot-reloaded run continues after an error, so its own weights must come back.
  return scope.finally(function()
    if run.ema then run.ema:swap() end
    run.model:train()
  end)
end

---Puts the counters of random numbers back when the enclosing block ends, so that what it draws does not change later steps.
---  local _same <close> = scope.same_random()
---@return table closer
function scope.same_random()
  local seed, step, occurrence = native.random_state()
  return setmetatable({}, { __close = function() native.set_random_state(seed, step, occurrence) end })
end

---Splits a table into its names, in order, and the list of its values.
---@param values table<string, any>
---@return string[] names
---@return any[] list
function scope.unzip(values)
  local names, list = tree.names(values), {}
  for i, name in ipairs(names) do list[i] = values[name] end
  return names, list
end

---Runs `fn` as a step scope and returns its table of tensors and numbers, evaluated.
---@param fn fun(): table<string, any>
---@return table<string, any>
function scope.evaluate(fn)
  local names = {} ---@type string[]
  local results = { pl.step(function()
    local list
    names, list = scope.unzip(fn())
    return table.unpack(list)
  end) }
  local out = {}
  for i, name in ipairs(names) do out[name] = results[i] end
  return out
end

return scope
