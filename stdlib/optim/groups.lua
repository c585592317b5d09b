-- optim/groups.lua: reads the first argument of an optimizer: a module, a list of States, or a list of parameter groups.

local pl = require "perilune"
local check = require "perilune.check"
local tree = require "perilune.tree"
local clip = require "perilune.optim.clip"

---@class perilune.ParameterGroup
---@field entries perilune.Entry[]
---@field given table<string, any> options of the group alone

local function is_group(value)
  return type(value) == "table" and not pl.is_tensor(value) and not getmetatable(value) and value.state == nil
end

---Whether `target` is a list of groups: one of its parts is a plain table that is neither a State nor { path =, state = }.
local function has_groups(target)
  if type(target) ~= "table" or getmetatable(target) then return false end
  for _, part in ipairs(target) do
    if is_group(part) then return true end
  end
  return false
end

---Resolves groups to { entries =, given = }. The `params` of a group is a list, a module, a function (path, state) -> boolean, or
---nil for all remaining parameters; the last two need the model: { model = model, { params = f, weight_decay = 0 }, {} }.
local function read_groups(op, target)
  local left, out = {}, {}
  if target.model then
    for _, entry in ipairs(clip.entries(op, target.model)) do left[#left + 1] = entry end
  end
  for i, group in ipairs(target) do
    if not is_group(group) then pl.error(op, ("group %d is %s"):format(i, check.show(group)), "a group is { params = ..., lr = ... }") end
    local given, want = {}, group.params
    for k, v in pairs(group) do
      if k ~= "params" then given[k] = v end
    end
    local entries = {}
    if want == nil or check.is(want, "function") and not (getmetatable(want) and want.forward) then
      if not target.model then
        pl.error(op, ("group %d selects by a function, but no model is given"):format(i),
          "add it to the groups: { model = model, { params = function(path, state) ... end }, {} }")
      end
      local rest = {}
      for _, entry in ipairs(left) do
        if want == nil or want(entry.path, entry.state) then entries[#entries + 1] = entry else rest[#rest + 1] = entry end
      end
      left = rest
    else
      local path_of = {}
      for _, entry in ipairs(left) do path_of[entry.state] = entry.path end
      local taken = {}
      for _, entry in ipairs(clip.entries(op, want)) do
        taken[entry.state] = true
        local path = target.model and path_of[entry.state] or tree.join(tostring(i), entry.path)
        entries[#entries + 1] = { path = path, state = entry.state }
      end
      local rest = {}
      for _, entry in ipairs(left) do
        if not taken[entry.state] then rest[#rest + 1] = entry end
      end
      left = rest
    end
    out[i] = { entries = entries, given = given }
  end
  if #left > 0 then
    pl.error(op, ("%d parameters are in no group, the first is '%s'"):format(#left, left[1].path),
      "add a last group without `params`, or freeze them: state.trainable = false")
  end
  return out
end

---Resolves the target of an optimizer. Without groups all parameters form one.
---@param op string
---@param target any
---@return perilune.ParameterGroup[]
local function read(op, target)
  if has_groups(target) then return read_groups(op, target) end
  return { { entries = clip.entries(op, target), given = {} } }
end

return { read = read }
