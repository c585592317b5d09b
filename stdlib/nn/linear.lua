-- nn/linear.lua: y = x W^T + b, over the last dim of x.
--
-- Weights have PyTorch's shape (out, in) and default initialisation, so that weights can be carried over by name.

local pl = require "perilune"
local check = require "perilune.check"
local init = require "perilune.init"
local module = require("perilune.nn.module").module

local function forward(self, x)
  return pl.linear(x, self.weight, self.bias)
end

---x (..., in) -> (..., out). weight (out, in) and bias (out) start uniform in +-1/sqrt(in).
---@param in_dim integer
---@param out_dim integer
---@param opts {bias?: boolean}?
---@return perilune.Module
local function Linear(in_dim, out_dim, opts)
  check.whole("nn.Linear", "in_dim", in_dim)
  check.whole("nn.Linear", "out_dim", out_dim)
  local o = check.options("nn.Linear", opts, { bias = true })
  local bound = 1 / math.sqrt(in_dim)
  return module {
    kind = "Linear", info = ("%d -> %d"):format(in_dim, out_dim), forward = forward,
    in_dim = in_dim, out_dim = out_dim,
    weight = pl.state(init.kaiming_uniform({ out_dim, in_dim }, { a = math.sqrt(5) })),
    bias = o.bias and pl.state(init.uniform({ out_dim }, { a = -bound, b = bound })) or nil,
  }
end

return { Linear = Linear }
