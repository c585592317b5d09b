-- nn/linear.lua: defines the linear layer y = x W^T + b, over the last dim of x.
--
-- Shape (out, in), initialization and names of the weights are PyTorch's, so weights can be copied by name.

local pl = require "perilune"
local check = require "perilune.check"
local init = require "perilune.initializers"
local fp8 = require "perilune.nn.fp8"
local module = require("perilune.nn.module").module

local function forward(self, x)
  if self.fp8 then return fp8.linear(self, x) end
  return pl.linear(x, self.weight, self.bias)
end

---Maps x (..., in) -> (..., out). weight (out, in) and bias (out) start uniform in +-1/sqrt(in).
---`fp8` computes its products in fp8 (nn/fp8.lua); false excludes the layer from precision = "fp8".
---@param in_dim integer
---@param out_dim integer
---@param opts {bias?: boolean, fp8?: boolean|{history?: integer, margin?: integer}}? bias: whether a bias is added; fp8: true or options for products in 8 bits, false to exclude the layer from nn.use_fp8
---@return perilune.Module
local function Linear(in_dim, out_dim, opts)
  check.whole("nn.Linear", "in_dim", in_dim)
  check.whole("nn.Linear", "out_dim", out_dim)
  local o = check.options("nn.Linear", opts, { bias = true }, { fp8 = "boolean|table" })
  local bound = 1 / math.sqrt(in_dim)
  local self = module {
    kind = "Linear", info = ("%d -> %d"):format(in_dim, out_dim), forward = forward,
    in_dim = in_dim, out_dim = out_dim,
    weight = pl.state(init.kaiming_uniform({ out_dim, in_dim }, { a = math.sqrt(5) })),
    bias = o.bias and pl.state(init.uniform({ out_dim }, { a = -bound, b = bound })) or nil,
  }
  if o.fp8 then
    fp8.enable(self, o.fp8)
  elseif opts and opts.fp8 == false then
    self.fp8 = false
  end
  return self
end

return { Linear = Linear }
