-- augment/color.lua: changes the colours of images: brightness, contrast, saturation, hue, solarize, posterize, normalize.
--
-- Functions are those of torchvision v2 for floats in [0, 1]: each limits its result to that range. Factors are numbers or tensors (B).
-- u8 images are computed as floats and rounded; torchvision rounds down, so the two differ by at most 1. All are elementwise but
-- contrast, which has one reduction, the mean of the grey image.

local pl = require "perilune"
local check = require "perilune.check"
local geometry = require "perilune.augment.geometry"

local color = {}

---Weights of red, green and blue in grey (ITU-R BT.601).
local RED <const>, GREEN <const>, BLUE <const> = 0.2989, 0.587, 0.114

---Splits images into the planes that changes of colours take: three of RGB, each (B, 1, H, W), else the image itself.
---Planes are views, so a chain of changes reads stored images only, and is one map.
---@param x perilune.Tensor (B, C, H, W)
---@return perilune.Tensor[]
function color.split(x)
  if x:size(1) ~= 3 then return { x } end
  return { x:narrow(1, 0, 1), x:narrow(1, 1, 1), x:narrow(1, 2, 1) }
end

---Returns the planes of red, green and blue.
---@param planes table
---@return perilune.Tensor, perilune.Tensor, perilune.Tensor
local function rgb(planes)
  return planes[1], planes[2], planes[3]
end

---Joins planes to images. A choice by the number of the channel fuses with what makes the planes; a copy would not.
---@param planes perilune.Tensor[]
---@return perilune.Tensor (B, C, H, W)
function color.join(planes)
  if #planes == 1 then return planes[1] end
  local channel = pl.arange(3):reshape(3, 1, 1)
  local red, green, blue = rgb(planes)
  return pl.where(channel:eq(0), red, pl.where(channel:eq(1), green, blue))
end

---Makes a plane from each value of a list.
---@generic T
---@param list T[]
---@param fn fun(value: T): perilune.Tensor
---@return perilune.Tensor[]
local function each(list, fn)
  local out = {}
  for i, value in ipairs(list) do out[i] = fn(value) end
  return out
end

---Computes the grey image, (B, 1, H, W). Images of one channel are grey.
---@param planes perilune.Tensor[]
---@return perilune.Tensor
local function grey(planes)
  if #planes == 1 then return planes[1] end
  local red, green, blue = rgb(planes)
  return RED * red + GREEN * green + BLUE * blue
end

---Returns a factor as a number or (B, 1, 1, 1).
local function factor_of(op, value, n)
  local factor = geometry.entry(op, "the factor", value, n) ---@type any
  return pl.is_tensor(factor) and factor:reshape(n, 1, 1, 1) or factor
end

---Changes the colours of images: checks x and the factor, computes in floats, and returns x's dtype if it is u8.
---@param name string of the public function
---@param x perilune.Tensor (B, C, H, W)
---@param channels "any"|"rgb"|"grey or rgb"
---@param change fun(planes: perilune.Tensor[], factor: any): perilune.Tensor[] of floats in [0, 1]
---@param factor any a number, or (B)
---@param check_factor fun(op: string, factor: number) raises for a number out of range
---@return perilune.Tensor
local function change_images(name, x, channels, change, factor, check_factor)
  local op = "augment." .. name
  local n, c = geometry.images(op, x)
  if channels ~= "any" and c ~= 3 and (c ~= 1 or channels == "rgb") then
    pl.error(op, ("x has %d channels"):format(c), "it needs the three of RGB" .. (channels == "rgb" and "" or ", or one of grey"))
  end
  factor = factor_of(op, factor, n)
  if type(factor) == "number" then check_factor(op, factor) end
  local y = color.join(change(color.split(color.unit(x)), factor))
  return x.dtype == "u8" and (y * 255):round():to("u8") or y
end

---Raises unless a factor is 0 or more.
local function not_negative(op, factor)
  if factor < 0 then pl.error(op, ("the factor is %g"):format(factor), "it must be 0 or more; 1 changes nothing") end
end

---Returns a function that raises unless a number is in [low, high].
---@return fun(op: string, factor: number)
local function within(name, low, high)
  return function(op, factor) check.between(op, name, factor, low, high) end
end

---Returns images as floats: u8 divided by 255.
---@param x perilune.Tensor
---@return perilune.Tensor
function color.unit(x)
  if x.dtype == "u8" then return x:to("f32") * (1 / 255) end
  return x
end

---Mixes planes with `other`: factor 1 is the planes, 0 is the other, and beyond 1 they are exaggerated.
---@param planes perilune.Tensor[]
---@param other perilune.Tensor
---@param factor any
---@return perilune.Tensor[]
local function blend(planes, other, factor)
  return each(planes, function(x) return (x * factor + other * (1 - factor)):clamp(0, 1) end)
end

---@type table<string, fun(planes: perilune.Tensor[], factor: any): perilune.Tensor[]> changes of floats in [0, 1]
local changes = {}

function changes.brightness(planes, factor)
  return each(planes, function(x) return (x * factor):clamp(0, 1) end)
end

function changes.contrast(planes, factor)
  return blend(planes, grey(planes):mean({ 1, 2, 3 }, { keepdim = true }), factor)
end

function changes.saturation(planes, factor)
  return blend(planes, grey(planes), factor)
end

---Turns the hue of HSV by a fraction of the circle.
function changes.hue(planes, factor)
  local r, g, b = rgb(planes)
  local value, least = r:maximum(g):maximum(b), r:minimum(g):minimum(b)
  local range = value - least
  local is_grey = range:eq(0)
  local over = 1 / pl.where(is_grey, 1.0, range)
  local hue = pl.where(value:eq(r), (g - b) * over, pl.where(value:eq(g), 2 + (b - r) * over, 4 + (r - g) * over))
  hue = pl.where(is_grey, 0.0, hue) * (1 / 6) + factor
  -- A channel of RGB is v - range * max(0, min(k, 4 - k, 1)) with k = (n + 6 hue) mod 6 and n = 5, 3, 1.
  return each({ 5, 3, 1 }, function(n)
    local k = hue * 6 + n
    k = k - 6 * (k * (1 / 6)):floor()
    return value - range * k:minimum(4 - k):clamp(0, 1)
  end)
end

---Inverts what is at or above a threshold in [0, 1].
function changes.solarize(planes, threshold)
  return each(planes, function(x) return pl.where(x:ge(threshold), 1 - x, x) end)
end

---Keeps so many of the 8 bits of each value.
function changes.posterize(planes, bits)
  local step = type(bits) == "number" and 2.0 ^ (8 - bits) or ((8 - bits) * math.log(2) --[[@as perilune.Tensor]]):exp():round()
  return each(planes, function(x) return ((x * 255):round() / step):floor() * step * (1 / 255) end)
end

color.changes = changes
color.grey = grey

---Multiplies the brightness of images. As torchvision's adjust_brightness.
---@param x perilune.Tensor (B, C, H, W), u8 or floats in [0, 1]
---@param factor number|perilune.Tensor 0 or more; a number, or (B)
---@return perilune.Tensor
function color.brightness(x, factor)
  return change_images("brightness", x, "any", changes.brightness, factor, not_negative)
end

---Mixes images with the mean of their grey image. As torchvision's adjust_contrast.
---@param x perilune.Tensor (B, 1 or 3, H, W), u8 or floats in [0, 1]
---@param factor number|perilune.Tensor 0 is grey, 1 changes nothing
---@return perilune.Tensor
function color.contrast(x, factor)
  return change_images("contrast", x, "grey or rgb", changes.contrast, factor, not_negative)
end

---Mixes images with their grey image. As torchvision's adjust_saturation.
---@param x perilune.Tensor (B, 1 or 3, H, W), u8 or floats in [0, 1]
---@param factor number|perilune.Tensor 0 is grey, 1 changes nothing
---@return perilune.Tensor
function color.saturation(x, factor)
  return change_images("saturation", x, "grey or rgb", changes.saturation, factor, not_negative)
end

---Turns the hue of images. As torchvision's adjust_hue.
---@param x perilune.Tensor (B, 3, H, W), u8 or floats in [0, 1]
---@param factor number|perilune.Tensor fraction of the circle, from -0.5 to 0.5
---@return perilune.Tensor
function color.hue(x, factor)
  return change_images("hue", x, "rgb", changes.hue, factor, within("the factor", -0.5, 0.5))
end

---Inverts the values at or above a threshold. As torchvision's solarize.
---@param x perilune.Tensor (B, C, H, W), u8 or floats in [0, 1]
---@param threshold number|perilune.Tensor from 0 to 1, also for u8, where 1 is 255
---@return perilune.Tensor
function color.solarize(x, threshold)
  return change_images("solarize", x, "any", changes.solarize, threshold, within("the threshold", 0, 1))
end

---Keeps the upper bits of each 8-bit value. As torchvision's posterize.
---@param x perilune.Tensor (B, C, H, W), u8 or floats in [0, 1]
---@param bits integer|perilune.Tensor from 1 to 8
---@return perilune.Tensor
function color.posterize(x, bits)
  return change_images("posterize", x, "any", changes.posterize, bits, within("bits", 1, 8))
end

---Checks the means and the deviations of channels.
---@return fun(x: perilune.Tensor): perilune.Tensor
function color.normalizer(op, mean, std)
  local sizes = {}
  for name, list in pairs { mean = mean or false, std = std or false } do
    if type(list) ~= "table" or #list == 0 then pl.error(op, ("%s is %s"):format(name, check.show(list or nil)), "give a list with a number for each channel: { 0.485, 0.456, 0.406 }") end
    for i, v in ipairs(list) do
      if type(v) ~= "number" or v ~= v or name == "std" and v <= 0 then pl.error(op, ("%s of channel %d is %s"):format(name, i - 1, check.show(v)), "deviations are above 0") end
    end
    sizes[name] = #list
  end
  if sizes.mean ~= sizes.std then pl.error(op, ("mean has %d numbers and std has %d"):format(sizes.mean, sizes.std), "each has one for each channel") end
  local scale, shift = {}, {}
  for i = 1, #mean do scale[i], shift[i] = 1 / std[i], -mean[i] / std[i] end
  return function(x)
    local _, c = geometry.images(op, x)
    if c ~= #mean then pl.error(op, ("x has %d channels, and there are %d means"):format(c, #mean), "give one number for each channel") end
    return color.unit(x) * pl.tensor(scale):reshape(c, 1, 1) + pl.tensor(shift):reshape(c, 1, 1)
  end
end

---Subtracts the mean of each channel and divides by its deviation.
---@param x perilune.Tensor (B, C, H, W), u8 (divided by 255 first) or floats
---@param mean number[] of each channel, of values in [0, 1]
---@param std number[]
---@return perilune.Tensor # floats
function color.normalize(x, mean, std)
  return color.normalizer("augment.normalize", mean, std)(x)
end

return color
