-- nn/conv.lua: defines 1-d, 2-d and transposed 2-d convolutions.
--
-- Layouts and initialization are PyTorch's: images (B, C, H, W), weights (out, in / groups, kernel...), transposed
-- (in, out / groups, kernel...). `padding` is the number of zeros on each side, "same" (stride 1) or "valid"; `pl.pad` has others.

local pl = require "perilune"
local check = require "perilune.check"
local init = require "perilune.initializers"
local module = require("perilune.nn.module").module

local function list(sizes) return table.concat(sizes, "x") end

---Checks the arguments and makes the module, with PyTorch's initial weight and bias.
local function conv(kind, dims, forward, in_dim, out_dim, kernel, opts, transposed)
  local op = "nn." .. kind
  check.whole(op, "in_dim", in_dim)
  check.whole(op, "out_dim", out_dim)
  kernel = check.sizes(op, "kernel", kernel, dims)
  local defaults = { groups = 1, bias = true }
  local loose = { stride = "number|table", padding = transposed and "number|table" or "number|table|string", dilation = "number|table" }
  if transposed then loose.output_padding = "number|table" end
  local o = check.options(op, opts, defaults, loose)
  check.whole(op, "groups", o.groups)
  if in_dim % o.groups ~= 0 or out_dim % o.groups ~= 0 then
    pl.error(op, ("groups = %d does not divide both in_dim = %d and out_dim = %d"):format(o.groups, in_dim, out_dim))
  end
  local padding = o.padding or 0
  if type(padding) == "string" then
    check.word(op, "padding", padding, { "same", "valid" })
  else
    padding = check.sizes(op, "padding", padding, dims, 0)
  end
  local conv_opts = {
    stride = check.sizes(op, "stride", o.stride or 1, dims),
    padding = padding,
    dilation = check.sizes(op, "dilation", o.dilation or 1, dims),
    groups = o.groups,
  }
  if padding == "same" then
    for _, stride in ipairs(conv_opts.stride) do
      if stride ~= 1 then
        pl.error(op, ("padding is 'same' and stride is %d"):format(stride), "\"same\" requires stride 1: give padding as numbers")
      end
    end
  end
  if transposed then conv_opts.output_padding = check.sizes(op, "output_padding", o.output_padding or 0, dims, 0) end

  local shape = transposed and { in_dim, out_dim // o.groups } or { out_dim, in_dim // o.groups }
  table.move(kernel, 1, dims, 3, shape)
  local bound = 1 / math.sqrt((init.fans(shape)))
  local info = ("%d -> %d, kernel %s"):format(in_dim, out_dim, list(kernel))
  for _, name in ipairs { "stride", "padding", "dilation" } do
    local value = conv_opts[name]
    value = type(value) == "string" and value or list(value)
    if value:find(name == "padding" and "[^0x]" or "[^1x]") then info = info .. (", %s %s"):format(name, value) end
  end
  if o.groups > 1 then info = info .. ", groups " .. o.groups end
  return module {
    kind = kind, info = info, forward = forward, options = conv_opts,
    weight = pl.state(init.kaiming_uniform(shape, { a = math.sqrt(5) })),
    bias = o.bias and pl.state(init.uniform({ out_dim }, { a = -bound, b = bound })) or nil,
  }
end

local function forward1d(self, x) return pl.conv1d(x, self.weight, self.bias, self.options) end
local function forward2d(self, x) return pl.conv2d(x, self.weight, self.bias, self.options) end
local function forward_transpose2d(self, x) return pl.conv_transpose2d(x, self.weight, self.bias, self.options) end

---@class perilune.ConvOptions
---@field stride integer|integer[]? distance of two windows; 1 by default
---@field padding integer|integer[]|"same"|"valid"? zeros added to each side, or "same" or "valid"; 0 by default
---@field dilation integer|integer[]? distance of two elements of the kernel; 1 by default
---@field groups integer? parts of the channels that are convolved apart; 1 by default
---@field bias boolean? whether a bias is added; true by default

---Convolves x (B, in, T) -> (B, out, T'), T' = (T + 2 padding - dilation (kernel - 1) - 1) // stride + 1; with padding "same", T' = T.
---@param in_dim integer
---@param out_dim integer
---@param kernel integer
---@param opts perilune.ConvOptions?
---@return perilune.Module
local function Conv1d(in_dim, out_dim, kernel, opts)
  return conv("Conv1d", 1, forward1d, in_dim, out_dim, kernel, opts, false)
end

---Convolves x (B, in, H, W) -> (B, out, H', W'), H' = (H + 2 padding - dilation (kernel - 1) - 1) // stride + 1; with padding "same", H' = H.
---@param in_dim integer
---@param out_dim integer
---@param kernel integer|integer[]
---@param opts perilune.ConvOptions?
---@return perilune.Module
local function Conv2d(in_dim, out_dim, kernel, opts)
  return conv("Conv2d", 2, forward2d, in_dim, out_dim, kernel, opts, false)
end

---Convolves x transposed, (B, in, H, W) -> (B, out, H', W'), H' = (H - 1) stride - 2 padding + dilation (kernel - 1) + output_padding + 1.
---@param in_dim integer
---@param out_dim integer
---@param kernel integer|integer[]
---@param opts perilune.ConvOptions|{output_padding: integer|integer[]}? output_padding: rows and columns added at the end of the result
---@return perilune.Module
local function ConvTranspose2d(in_dim, out_dim, kernel, opts)
  return conv("ConvTranspose2d", 2, forward_transpose2d, in_dim, out_dim, kernel, opts, true)
end

return { Conv1d = Conv1d, Conv2d = Conv2d, ConvTranspose2d = ConvTranspose2d }
