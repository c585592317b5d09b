-- augment/noise.lua: disturbs images locally: random erasing, Gaussian noise, Gaussian blur.

local pl = require "perilune"
local check = require "perilune.check"
local geometry = require "perilune.augment.geometry"
local color = require "perilune.augment.color"
local steps = require "perilune.augment.steps"

local noise = {}

---Computes a bool (B, 1, H, W): whether a pixel is in the image's box, rows top to bottom and columns left to right (B, each half-open).
---@param top perilune.Tensor
---@param left perilune.Tensor
---@param bottom perilune.Tensor
---@param right perilune.Tensor
---@param h integer
---@param w integer
---@return perilune.Tensor
function noise.box(top, left, bottom, right, h, w)
  local n = top:size(0)
  local rows, columns = pl.arange(h):reshape(1, 1, h, 1), pl.arange(w):reshape(1, 1, 1, w)
  local function of_sample(x) return x:reshape(n, 1, 1, 1) end
  return rows:ge(of_sample(top)):logical_and(rows:lt(of_sample(bottom))):logical_and(columns:ge(of_sample(left))):logical_and(columns:lt(of_sample(right)))
end

---Erases a random rectangle with probability p. Zhong et al., Random Erasing Data Augmentation (2020).
---@param p number? 0.5 by default
---@param opts {scale?: number[], ratio?: number[], value?: number}? scale: fractions of the area; ratio: ratios of height to width; value: of the rectangle, in [0, 1]
---@return perilune.AugmentStep
function noise.RandomErasing(p, opts)
  local op = "augment.RandomErasing"
  p = check.between(op, "p", p or 0.5, 0, 1)
  local o = check.options(op, opts, { scale = { 0.02, 0.33 }, ratio = { 0.3, 3.3 }, value = 0 })
  local small, large = steps.range(op, "scale", o.scale, 0, 1)
  local flat, tall = steps.range(op, "ratio", o.ratio, 1e-3, 1e3)
  check.between(op, "value", o.value, 0, 1)
  return { name = "RandomErasing", image = function(x, draws)
    local _, _, h, w = x:size()
    local area = steps.between(draws, small, large) * (h * w)
    local ratio = steps.between(draws, math.log(flat), math.log(tall)):exp()
    local u = draws:uniform(3)
    local rows, columns = (area * ratio):sqrt():round():clamp(1, h), (area / ratio):sqrt():round():clamp(1, w)
    rows = pl.where(u:select(1, 2):lt(p), rows, 0.0)
    local top, left = (u:select(1, 0) * (h + 1 - rows)):floor(), (u:select(1, 1) * (w + 1 - columns)):floor()
    return pl.where(noise.box(top, left, top + rows, left + columns, h, w), o.value, x)
  end }
end

---Adds normal noise of a standard deviation to each value, limited to [0, 1].
---@param std number of values in [0, 1]
---@return perilune.AugmentStep
function noise.GaussianNoise(std)
  check.between("augment.GaussianNoise", "std", std, 0, 1)
  ---@param x perilune.Tensor
  ---@param draws perilune.Draws
  local function image(x, draws)
    local n, c, h, w = x:size()
    return (x + draws:normal(c * h * w):reshape(n, c, h, w) * std):clamp(0, 1)
  end
  return { name = "GaussianNoise", image = image }
end

---Checks the size of a blur's kernel.
local function check_kernel(op, size)
  if check.whole(op, "the kernel", size) % 2 == 0 then pl.error(op, ("the kernel has %d pixels"):format(size), "it must be odd: 3, 5, 7") end
  return check.between(op, "the kernel", size, 1, 255)
end

---Filters images with a Gaussian along rows and columns, mirrored at the border.
---@param op string
---@param x perilune.Tensor (B, C, H, W)
---@param size integer
---@param sigma any a number or a tensor (B, 1, 1, 1)
---@return perilune.Tensor
local function filtered(op, x, size, sigma)
  local radius = size // 2
  for dim = 2, 3 do
    local n = x:size(dim)
    if radius >= n then pl.error(op, ("a kernel of %d pixels does not fit images of %d"):format(size, n), "use a smaller kernel") end
    local at = pl.arange(-radius, n + radius):abs()
    local wide = x:index_select(dim, pl.where(at:ge(n), 2 * (n - 1) - at, at))
    local weights = {}
    local total ---@type any
    for i = 0, size - 1 do
      local d = (i - radius) / sigma
      weights[i] = type(d) == "number" and math.exp(-0.5 * d * d) or (d * d * -0.5 --[[@as perilune.Tensor]]):exp()
      total = total and total + weights[i] or weights[i]
    end
    local sum ---@type any
    for i = 0, size - 1 do
      local term = wide:narrow(dim, i, n) * (weights[i] / total)
      sum = sum and sum + term or term
    end
    x = sum
  end
  return x
end

---Blurs images with a Gaussian. As torchvision's gaussian_blur.
---@param x perilune.Tensor (B, C, H, W), u8 or floats
---@param size integer of the kernel in pixels, odd
---@param sigma number|perilune.Tensor deviation in pixels; a number, or (B)
---@return perilune.Tensor
function noise.blur(x, size, sigma)
  local op = "augment.blur"
  local n = geometry.images(op, x)
  check_kernel(op, size)
  local deviation = geometry.entry(op, "sigma", sigma, n) ---@type any
  if type(deviation) == "number" and deviation <= 0 then pl.error(op, ("sigma is %g"):format(deviation), "it must be above 0") end
  if pl.is_tensor(deviation) then deviation = deviation:reshape(n, 1, 1, 1) end
  local y = filtered(op, color.unit(x), size, deviation)
  return x.dtype == "u8" and (y * 255):round():to("u8") or y
end

---Blurs with a Gaussian of a random deviation.
---@param size integer of the kernel in pixels, odd
---@param sigma number[]? lowest and highest deviation in pixels, { 0.1, 2 } by default
---@return perilune.AugmentStep
function noise.GaussianBlur(size, sigma)
  local op = "augment.GaussianBlur"
  check_kernel(op, size)
  local low, high = steps.range(op, "sigma", sigma or { 0.1, 2 }, 1e-3, 1e3)
  return { name = "GaussianBlur", image = function(x, draws)
    return filtered(op, x, size, steps.between(draws, low, high):reshape(draws.n, 1, 1, 1))
  end }
end

return noise
