-- nn/sequential.lua: chains modules or plain functions. Part k of the list has path component k.

local pl = require "perilune"
local check = require "perilune.check"
local module = require("perilune.nn.module").module

local function run(self, from, to, x)
  for i = from, to do x = self[i](x) end
  return x
end

local function forward(self, x)
  local n = self.checkpoint
  if not n then return run(self, 1, #self, x) end
  for from = 1, #self, n do x = pl.checkpoint(run, self, from, math.min(from + n - 1, #self), x) end
  return x
end

---Chains modules: nn.Sequential { nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10) }
---`checkpoint = n` recomputes the activations of n parts at a time in the backward pass instead of storing them; true means 1.
---@param list (perilune.Module|fun(x: perilune.Tensor): perilune.Tensor)[]
---@param opts {checkpoint: integer|boolean}? checkpoint: recomputes n parts at a time in the backward pass instead of storing activations, true means 1
---@return perilune.Module
local function Sequential(list, opts)
  if type(list) ~= "table" or #list == 0 then
    pl.error("nn.Sequential", "it got " .. (type(list) == "table" and "an empty list" or check.show(list)),
      "give a list of modules: nn.Sequential { nn.Linear(64, 32), nn.ReLU() }")
  end
  local o = check.options("nn.Sequential", opts, {}, { checkpoint = "number|boolean" })
  local n = o.checkpoint or nil
  if n == true then n = 1 end
  if n then check.whole("nn.Sequential", "checkpoint", n) end
  local self = { kind = "Sequential", forward = forward, checkpoint = n }
  for k, part in pairs(list) do
    if math.type(k) ~= "integer" or not check.is(part, "function") then
      local hint = type(part) == "function" and nil or "a part must be a module, such as nn.ReLU() with its parentheses, or a function of a tensor"
      pl.error("nn.Sequential", ("part %s is %s"):format(tostring(k), check.show(part)), hint)
    end
    self[k] = part
  end
  return module(self)
end

return { Sequential = Sequential }
