-- nn/sequential.lua: modules (or plain functions) in a row. Part k of the list has path part k.

local pl = require "perilune"
local check = require "perilune.check"
local module = require("perilune.nn.module").module

local function forward(self, x)
  for i = 1, #self do x = self[i](x) end
  return x
end

---nn.Sequential { nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10) }
---@param list (perilune.Module|fun(x: perilune.Tensor): perilune.Tensor)[]
---@return perilune.Module
local function Sequential(list)
  if type(list) ~= "table" or #list == 0 then
    pl.error("nn.Sequential", "it got " .. (type(list) == "table" and "an empty list" or check.show(list)),
      "give a list of modules: nn.Sequential { nn.Linear(64, 32), nn.ReLU() }")
  end
  local self = { kind = "Sequential", forward = forward }
  for k, part in pairs(list) do
    if math.type(k) ~= "integer" or not check.is(part, "function") then
      local hint = type(part) == "function" and nil or "a part is a module, such as nn.ReLU() with its brackets, or a function of a tensor"
      pl.error("nn.Sequential", ("part %s is %s"):format(tostring(k), check.show(part)), hint)
    end
    self[k] = part
  end
  return module(self)
end

return { Sequential = Sequential }
