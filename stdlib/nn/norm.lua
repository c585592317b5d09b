-- nn/norm.lua: defines normalization over each sample: LayerNorm, RMSNorm, GroupNorm.
--
-- Statistics are computed in f32 for every input dtype.

local pl = require "perilune"
local check = require "perilune.check"
local module = require("perilune.nn.module").module

local function dims_of(op, dims)
  if type(dims) ~= "table" then dims = { dims } end
  for i, d in ipairs(dims) do dims[i] = check.whole(op, "dims", d) end
  return dims
end

local function layer_norm(self, x)
  return pl.layer_norm(x, self.weight, self.bias, { eps = self.eps })
end

local function plain_layer_norm(self, x) -- without a weight the op takes the number of dims
  return pl.layer_norm(x, nil, nil, { eps = self.eps, dims = #self.dims })
end

---Normalizes x (..., dims) to mean 0 and variance 1 over its last dims, then scales and shifts.
---Ba et al., Layer Normalization (2016).
---@param dims integer|integer[] sizes of the last dims
---@param opts {eps?: number, bias?: boolean, affine?: boolean}? eps: added to the variance; bias: whether it shifts; affine: whether it scales and shifts
---@return perilune.Module
local function LayerNorm(dims, opts)
  dims = dims_of("nn.LayerNorm", dims)
  local o = check.options("nn.LayerNorm", opts, { eps = 1e-5, bias = true, affine = true })
  return module {
    kind = "LayerNorm", info = table.concat(dims, ", "), eps = o.eps, dims = dims,
    forward = o.affine and layer_norm or plain_layer_norm,
    weight = o.affine and pl.state(pl.ones(dims)) or nil,
    bias = o.affine and o.bias and pl.state(pl.zeros(dims)) or nil,
  }
end

local function rms_norm(self, x)
  return pl.rms_norm(x, self.weight, { eps = self.eps })
end

---Divides x (..., dim) by its root mean square over the last dim, then scales: x / rms(x) * weight.
---Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
---@param dim integer
---@param opts {eps?: number, affine?: boolean}? eps: added to the mean square; affine: whether it scales
---@return perilune.Module
local function RMSNorm(dim, opts)
  check.whole("nn.RMSNorm", "dim", dim)
  local o = check.options("nn.RMSNorm", opts, { eps = 1e-6, affine = true })
  return module {
    kind = "RMSNorm", info = tostring(dim), forward = rms_norm, eps = o.eps,
    weight = o.affine and pl.state(pl.ones { dim }) or nil,
  }
end

local function group_norm(self, x)
  return pl.group_norm(x, self.groups, self.weight, self.bias, { eps = self.eps })
end

---Normalizes x (B, channels, ...) over each group of channels, then scales and shifts by channel.
---Wu and He, Group Normalization (2018).
---@param groups integer a divisor of channels
---@param channels integer
---@param opts {eps?: number, affine?: boolean}? eps: added to the variance; affine: whether it scales and shifts
---@return perilune.Module
local function GroupNorm(groups, channels, opts)
  check.whole("nn.GroupNorm", "groups", groups)
  check.whole("nn.GroupNorm", "channels", channels)
  if channels % groups ~= 0 then
    pl.error("nn.GroupNorm", ("groups = %d does not divide channels = %d"):format(groups, channels),
      "PyTorch's order: nn.GroupNorm(groups, channels)")
  end
  local o = check.options("nn.GroupNorm", opts, { eps = 1e-5, affine = true })
  return module {
    kind = "GroupNorm", info = ("%d groups of %d"):format(groups, channels // groups), forward = group_norm,
    groups = groups, eps = o.eps,
    weight = o.affine and pl.state(pl.ones { channels }) or nil,
    bias = o.affine and pl.state(pl.zeros { channels }) or nil,
  }
end

return { LayerNorm = LayerNorm, RMSNorm = RMSNorm, GroupNorm = GroupNorm }
