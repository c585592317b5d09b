-- nn/activation.lua: activations as modules, for nn.Sequential. In a forward of your own, call the op: `x:relu()`.

local pl = require "perilune"
local check = require "perilune.check"
local module = require("perilune.nn.module").module

local activation = {}

-- Those without options: module name -> op name.
local plain = { ReLU = "relu", SiLU = "silu", Tanh = "tanh", Sigmoid = "sigmoid", Softplus = "softplus", Mish = "mish", Hardswish = "hardswish" }

for kind, op in pairs(plain) do
  local function forward(_, x) return x[op](x) end
  -- An activation without options: as the op of its name (`?pl.relu`), for nn.Sequential.
  activation[kind] = function(...)
    if select("#", ...) > 0 then pl.error("nn." .. kind, "it takes no arguments", ("write nn.%s()"):format(kind)) end
    return module { kind = kind, forward = forward }
  end
end

local function gelu(self, x) return x:gelu(self.options) end

---Hendrycks and Gimpel, Gaussian Error Linear Units (2016); approximate is "none" (by erf) or "tanh".
---@param opts {approximate?: string}?
---@return perilune.Module
function activation.GELU(opts)
  local o = check.options("nn.GELU", opts, { approximate = "none" })
  check.word("nn.GELU", "approximate", o.approximate, { "none", "tanh" })
  return module { kind = "GELU", info = o.approximate == "tanh" and "tanh" or nil, forward = gelu, options = o }
end

local function leaky_relu(self, x) return x:leaky_relu(self.slope) end

---x where it is positive, slope * x elsewhere.
---@param slope number? of the negative side, 0.01 by default
---@return perilune.Module
function activation.LeakyReLU(slope)
  slope = check.between("nn.LeakyReLU", "slope", slope or 0.01, 0, math.huge)
  return module { kind = "LeakyReLU", info = tostring(slope), forward = leaky_relu, slope = slope }
end

local function elu(self, x) return x:elu(self.alpha) end

---x where it is positive, alpha * (exp(x) - 1) elsewhere.
---@param alpha number? 1 by default
---@return perilune.Module
function activation.ELU(alpha)
  alpha = check.between("nn.ELU", "alpha", alpha or 1.0, 0, math.huge)
  return module { kind = "ELU", info = tostring(alpha), forward = elu, alpha = alpha }
end

local function softmax(self, x) return x:softmax(self.dim) end

---exp(x), by its sum along a dim.
---@param dim integer? the last by default
---@return perilune.Module
function activation.Softmax(dim)
  dim = check.whole("nn.Softmax", "dim", dim or -1, false)
  return module { kind = "Softmax", info = tostring(dim), forward = softmax, dim = dim }
end

return activation
