-- nn/activation.lua: wraps activation functions as modules, for nn.Sequential. A `forward` calls the op: `x:relu()`.

local pl = require "perilune"
local check = require "perilune.check"
local module = require("perilune.nn.module").module

local activation = {}

-- Activations without options: module name -> op.
local plain = { ReLU = "relu", SiLU = "silu", Tanh = "tanh", Sigmoid = "sigmoid", Softplus = "softplus", Mish = "mish", Hardswish = "hardswish" }

for kind, op in pairs(plain) do
  local function forward(_, x) return x[op](x) end
  -- Applies the op of the same name elementwise: see its help, such as `?pl.relu`. Takes no options.
  activation[kind] = function(...)
    if select("#", ...) > 0 then pl.error("nn." .. kind, "it takes no arguments", ("write nn.%s()"):format(kind)) end
    return module { kind = kind, forward = forward }
  end
end

local function gelu(self, x) return x:gelu(self.options) end

---Applies GELU elementwise. approximate is "none" (x * Phi(x) by erf) or "tanh".
---Hendrycks and Gimpel, Gaussian Error Linear Units (2016).
---@param opts {approximate?: string}? approximate: "none" by the error function, "tanh" as GPT-2
---@return perilune.Module
function activation.GELU(opts)
  local o = check.options("nn.GELU", opts, { approximate = "none" })
  check.word("nn.GELU", "approximate", o.approximate, { "none", "tanh" })
  return module { kind = "GELU", info = o.approximate == "tanh" and "tanh" or nil, forward = gelu, options = o }
end

local function leaky_relu(self, x) return x:leaky_relu(self.slope) end

---Applies leaky ReLU elementwise: x if positive, else slope * x.
---@param slope number? 0.01 by default
---@return perilune.Module
function activation.LeakyReLU(slope)
  slope = check.between("nn.LeakyReLU", "slope", slope or 0.01, 0, math.huge)
  return module { kind = "LeakyReLU", info = tostring(slope), forward = leaky_relu, slope = slope }
end

local function elu(self, x) return x:elu(self.alpha) end

---Applies ELU elementwise: x if positive, else alpha * (exp(x) - 1).
---@param alpha number? 1 by default
---@return perilune.Module
function activation.ELU(alpha)
  alpha = check.between("nn.ELU", "alpha", alpha or 1.0, 0, math.huge)
  return module { kind = "ELU", info = tostring(alpha), forward = elu, alpha = alpha }
end

local function softmax(self, x) return x:softmax(self.dim) end

---Applies softmax along a dim: exp(x) / sum(exp(x)).
---@param dim integer? the last one by default
---@return perilune.Module
function activation.Softmax(dim)
  dim = check.whole("nn.Softmax", "dim", dim or -1, false)
  return module { kind = "Softmax", info = tostring(dim), forward = softmax, dim = dim }
end

return activation
