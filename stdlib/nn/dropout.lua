-- nn/dropout.lua: zeroes values at random in training. Srivastava et al., Dropout (2014).
--
-- The mask is not stored: the counter-based generator recomputes it in the backward pass.

local pl = require "perilune"
local check = require "perilune.check"
local module = require("perilune.nn.module").module

local function forward(self, x)
  if not self.training or self.p == 0 then return x end
  return pl.dropout(x, self.p)
end

---Zeroes each value with probability p and scales the others by 1 / (1 - p), in training; the identity in evaluation.
---@param p number? 0.5 by default
---@return perilune.Module
local function Dropout(p)
  p = check.between("nn.Dropout", "p", p or 0.5, 0, 1)
  return module { kind = "Dropout", info = tostring(p), forward = forward, p = p }
end

return { Dropout = Dropout }
