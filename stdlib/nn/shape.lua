-- nn/shape.lua: wraps reshaping and pooling as modules, for nn.Sequential.

local pl = require "perilune"
local check = require "perilune.check"
local module = require("perilune.nn.module").module

local function flatten(self, x) return x:flatten(self.start, self.stop) end

---Joins the dims from `start` to `stop`, both included: by default x (B, ...) -> (B, n).
---@param start integer? 1 by default
---@param stop integer? -1 by default
---@return perilune.Module
local function Flatten(start, stop)
  start = check.whole("nn.Flatten", "start", start or 1, false)
  stop = check.whole("nn.Flatten", "stop", stop or -1, false)
  return module { kind = "Flatten", info = ("%d to %d"):format(start, stop), forward = flatten, start = start, stop = stop }
end

local function unflatten(self, x)
  local dim = self.dim < 0 and self.dim + x:dim() or self.dim
  local shape = {}
  for d, size in ipairs(x.shape) do
    if d - 1 == dim then table.move(self.sizes, 1, #self.sizes, #shape + 1, shape) else shape[#shape + 1] = size end
  end
  return x:reshape(shape)
end

---Splits one dim: Unflatten(1, { 1, 8, 8 }) maps (B, 64) to (B, 1, 8, 8). One size may be -1.
---@param dim integer
---@param sizes integer[]
---@return perilune.Module
local function Unflatten(dim, sizes)
  check.whole("nn.Unflatten", "dim", dim, false)
  if type(sizes) ~= "table" then
    pl.error("nn.Unflatten", "sizes is " .. check.show(sizes), "give a list, as in nn.Unflatten(1, { 1, 8, 8 })")
  end
  for _, size in ipairs(sizes) do check.whole("nn.Unflatten", "a size", size, -1) end
  return module { kind = "Unflatten", info = ("%d to {%s}"):format(dim, table.concat(sizes, ", ")), forward = unflatten, dim = dim, sizes = sizes }
end

local function max_pool(self, x) return pl.max_pool2d(x, self.kernel, self.options) end
local function avg_pool(self, x) return pl.avg_pool2d(x, self.kernel, self.options) end

local function pool(kind, forward, kernel, opts, defaults)
  local op = "nn." .. kind
  kernel = check.sizes(op, "kernel", kernel, 2)
  local o = check.options(op, opts, defaults, { stride = "number|table", padding = "number|table" })
  local options = {
    stride = o.stride and check.sizes(op, "stride", o.stride, 2) or { kernel[1], kernel[2] },
    padding = check.sizes(op, "padding", o.padding or 0, 2, 0),
  }
  for name in pairs(defaults) do options[name] = o[name] end
  return module { kind = kind, info = table.concat(kernel, "x"), forward = forward, kernel = kernel, options = options }
end

---@class perilune.PoolOptions
---@field stride integer|integer[]? the kernel size by default
---@field padding integer|integer[]? added to each side; 0 by default
---@field ceil_mode boolean? whether a last window may extend beyond the end; false by default

---@class perilune.AvgPoolOptions: perilune.PoolOptions
---@field count_include_pad boolean? whether the zeros of the padding count; true by default

---Takes the maximum of each window: x (B, C, H, W) -> (B, C, H', W'). The stride is the kernel size by default.
---@param kernel integer|integer[]
---@param opts perilune.PoolOptions?
---@return perilune.Module
local function MaxPool2d(kernel, opts) return pool("MaxPool2d", max_pool, kernel, opts, { ceil_mode = false }) end

---Takes the mean of each window: x (B, C, H, W) -> (B, C, H', W'). Padding counts as zeros unless count_include_pad is false.
---@param kernel integer|integer[]
---@param opts perilune.AvgPoolOptions?
---@return perilune.Module
local function AvgPool2d(kernel, opts)
  return pool("AvgPool2d", avg_pool, kernel, opts, { ceil_mode = false, count_include_pad = true })
end

return { Flatten = Flatten, Unflatten = Unflatten, MaxPool2d = MaxPool2d, AvgPool2d = AvgPool2d }
