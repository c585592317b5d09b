-- nn/module.lua: what makes a plain table a module.
--
-- A module is a table with a `forward` function, whose States and sub-modules are its fields (or lie in lists among its
-- fields). `nn.module(t)` only sets a metatable: `m(x)` then calls `m:forward(x)`, and the methods below are found. There
-- is no class registry, no hidden list of parameters and no inheritance: to learn what a module holds, look at its fields.
-- Two fields have a meaning for printing: `kind` (the name) and `info` (what to show behind it).

local pl = require "perilune"
local tree = require "perilune.tree"

---@class perilune.Module
---@field kind string?
---@field info string?
---@field training boolean whether layers such as Dropout and BatchNorm act as in training
---@field forward fun(self: perilune.Module, ...): ...
---@overload fun(...: any): any ...
---@field [string] any the module's own: its States, its parts, its numbers
local methods = { training = true }
local meta = { __index = methods }

---Called around every call of a module, while `watch` runs something.
---@type (fun(module: perilune.Module, call: fun(): ...): ...)?
local watcher

---Whether a value is a module, as nn.module and the layers make them.
local function is_module(value)
  return type(value) == "table" and getmetatable(value) == meta
end

function meta.__call(self, ...)
  local forward = self.forward
  if not forward then
    pl.error(self.kind or "module", "the module has no forward function", "add `function m:forward(x) ... end` before calling it")
  end
  if watcher then
    local args = table.pack(...)
    return watcher(self, function() return forward(self, table.unpack(args, 1, args.n)) end)
  end
  return forward(self, ...)
end

---Runs `body` with `around(module, call)` in place of every call of a module; it calls `call` and returns its results.
---@param around fun(module: perilune.Module, call: fun(): ...): ...
---@param body fun(): ...
local function watch(around, body)
  local before = watcher
  local restore <close> = setmetatable({}, { __close = function() watcher = before end })
  watcher = around
  return body()
end

local function select_states(self, trainable)
  local out = {}
  for _, entry in ipairs(tree.states(self)) do
    if entry.state.trainable == trainable then out[#out + 1] = entry end
  end
  return out
end

---Every trainable State, as { path =, state = } in path order. Frozen weights are not among them.
---@return perilune.Entry[]
function methods:parameters()
  return select_states(self, true)
end

---Every State that is not trained: running statistics and frozen weights.
---@return perilune.Entry[]
function methods:buffers()
  return select_states(self, false)
end

---Every State, in path order: what a checkpoint holds.
---@return perilune.Entry[]
function methods:states()
  return tree.states(self)
end

---The number of trained values.
---@return integer
function methods:num_parameters()
  local count = 0
  for _, entry in ipairs(self:parameters()) do count = count + entry.state:numel() end
  return count
end

---Calls `fn(module, path)` for every sub-module and at last for the module itself.
---@param fn fun(module: perilune.Module, path: string)
---@return self
function methods:apply(fn)
  local found = {}
  tree.walk(self, function(path, value)
    if is_module(value) then found[#found + 1] = { path = path, module = value } end
  end)
  for i = #found, 1, -1 do fn(found[i].module, found[i].path) end
  return self
end

---Sets training mode (or, with false, evaluation mode) in the module and all below it.
---@param mode boolean? true by default
---@return self
function methods:train(mode)
  if mode == nil then mode = true end
  return self:apply(function(module) module.training = mode end)
end

---Sets evaluation mode: no dropout, running statistics.
---@return self
function methods:eval()
  return self:train(false)
end

local function grouped(n) -- 26122 -> "26,122"
  local text = tostring(n):reverse():gsub("(%d%d%d)", "%1,"):reverse()
  return (text:gsub("^,", ""))
end

---One line a module: its name, what it is, its own States' shapes and how many values are trained below it.
function meta.__tostring(root)
  local lines, seen = {}, {}
  local function own(module, own_states, below, prefix, table_)
    for _, k in ipairs(tree.keys(table_)) do
      local name, value = tree.join(prefix, k), table_[k]
      if not seen[value] then
        seen[value] = true
        if pl.is_state(value) then
          own_states[#own_states + 1] = ("%s {%s}%s"):format(name, table.concat(value.shape, ", "), value.trainable and "" or " fixed")
        elseif is_module(value) then
          below[#below + 1] = { name = name, module = value }
        else
          own(module, own_states, below, name, value)
        end
      end
    end
  end
  local function show(name, module, depth)
    local own_states, below = {}, {}
    own(module, own_states, below, "", module)
    local line = ("  "):rep(depth) .. (name and name .. ": " or "") .. (module.kind or "module")
    if module.info then line = line .. "(" .. module.info .. ")" end
    if #own_states > 0 then line = line .. "  " .. table.concat(own_states, ", ") end
    local count = module:num_parameters()
    if count > 0 then line = line .. ("  · %s parameters"):format(grouped(count)) end
    lines[#lines + 1] = line
    for _, child in ipairs(below) do show(child.name, child.module, depth + 1) end
  end
  show(nil, root, 0)
  return table.concat(lines, "\n")
end

---Makes `t` a module, in place, and returns it.
---@generic T: table
---@param t T a table with a `forward(self, ...)` function, now or before its first call
---@return T & perilune.Module
local function module(t)
  if type(t) ~= "table" or pl.is_tensor(t) then
    pl.error("nn.module", ("the argument is a %s"):format(type(t)), "give a table: nn.module { weight = ..., forward = ... }")
  end
  local old = getmetatable(t)
  if old ~= nil and old ~= meta then
    pl.error("nn.module", "the table has a metatable already", "a module is a plain table; keep what you add in its fields")
  end
  return setmetatable(t, meta)
end

return { module = module, is_module = is_module, grouped = grouped, watch = watch }
