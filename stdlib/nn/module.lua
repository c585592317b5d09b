-- nn/module.lua: defines modules: plain tables with a `forward` function.
--
-- The States and sub-modules of a module are its fields, or parts of lists among its fields. `nn.module(t)` only sets a metatable:
-- `m(x)` calls `m:forward(x)`, and the methods below become available. There is no class registry, no list of parameters and no
-- inheritance. Two fields control printing: `kind` (the name) and `info` (details in brackets).

local pl = require "perilune"
local tree = require "perilune.tree"

---@class perilune.Module
---@field kind string?
---@field info string?
---@field training boolean mode of layers such as Dropout and BatchNorm
---@field forward fun(self: perilune.Module, ...): ...
---@overload fun(...: any): any ...
---@field [string] any States, sub-modules and settings
local methods = { training = true }
local meta = { __index = methods }

---Wraps every call of a module while `watch` is active.
---@type (fun(module: perilune.Module, call: fun(): ...): ...)?
local watcher

---Whether a value is a module, made by nn.module or a layer.
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

---Runs `body` with every call of a module replaced by `around(module, call)`, which calls `call` and returns its results.
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

---Lists every trainable State as { path =, state = }, in path order. Frozen weights are excluded.
---@return perilune.Entry[]
function methods:parameters()
  return select_states(self, true)
end

---Lists every State that is not trained: running statistics and frozen weights.
---@return perilune.Entry[]
function methods:buffers()
  return select_states(self, false)
end

---Lists every State in path order, as a checkpoint stores them.
---@return perilune.Entry[]
function methods:states()
  return tree.states(self)
end

---Drops the gradients of all parameters, as `opt:zero_grad()` does for those of an optimizer.
function methods:zero_grad()
  for _, entry in ipairs(self:parameters()) do entry.state.grad = nil end
end

---The number of trained values.
---@return integer
function methods:num_parameters()
  local count = 0
  for _, entry in ipairs(self:parameters()) do count = count + entry.state:numel() end
  return count
end

---Calls `fn(module, path)` for every sub-module, then for the module itself.
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

---Sets training mode, or with false evaluation mode, in the module and its sub-modules.
---@param mode boolean? true by default
---@return self
function methods:train(mode)
  if mode == nil then mode = true end
  return self:apply(function(module) module.training = mode end)
end

---Sets evaluation mode: no dropout, running statistics in BatchNorm.
---@return self
function methods:eval()
  return self:train(false)
end

local function grouped(n) -- 26122 -> "26,122"
  local text = tostring(n):reverse():gsub("(%d%d%d)", "%1,"):reverse()
  return (text:gsub("^,", ""))
end

---Prints one line for each module: name, kind, shapes of its own States, number of trainable values below it.
function meta.__tostring(root)
  local lines, seen = {}, {}
  local function own(module, own_states, below, prefix, table_, depth)
    tree.check_depth(prefix, depth)
    for _, k in ipairs(tree.keys(table_)) do
      local name, value = tree.join(prefix, k), table_[k]
      if not seen[value] then
        seen[value] = true
        if pl.is_state(value) then
          own_states[#own_states + 1] = ("%s {%s}%s"):format(name, table.concat(value.shape, ", "), value.trainable and "" or " fixed")
        elseif is_module(value) then
          below[#below + 1] = { name = name, module = value }
        else
          own(module, own_states, below, name, value, depth + 1)
        end
      end
    end
  end
  local function show(name, module, depth)
    local own_states, below = {}, {}
    tree.check_depth(name or "", depth)
    own(module, own_states, below, "", module, 0)
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

---Makes a table a module, in place, and returns it.
---@generic T: table
---@param t T a table with a `forward(self, ...)` function, now or before its first call
---@return T & perilune.Module
local function module(t)
  if type(t) ~= "table" or pl.is_tensor(t) then
    pl.error("nn.module", ("the argument is a %s"):format(type(t)), "give a table: nn.module { weight = ..., forward = ... }")
  end
  local old = getmetatable(t)
  if old ~= nil and old ~= meta then
    pl.error("nn.module", "the table already has a metatable", "a module must be a table without a metatable; store additions in its fields")
  end
  return setmetatable(t, meta)
end

return { module = module, is_module = is_module, grouped = grouped, watch = watch }
