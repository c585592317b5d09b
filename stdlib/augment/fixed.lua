-- augment/fixed.lua: maps batches of images by given parameters: crop, flip, resize, rotate and affine maps of torchvision v2.
--
-- Each samples once. u8 images give u8, rounded; other images give floats.

local pl = require "perilune"
local check = require "perilune.check"
local geometry = require "perilune.augment.geometry"

local fixed = {}

---Samples x at the positions of a map; u8 stays u8.
local function mapped(x, map, fill)
  local y = geometry.sample(x, map, fill)
  return x.dtype == "u8" and y:round():to("u8") or y
end

---Returns the option `fill`, a value of x's own range.
local function fill_of(op, opts)
  return check.between(op, "fill", check.options(op, opts, { fill = 0 }).fill, -1e6, 1e6)
end

---Crops height x width pixels from (top, left) on; positions outside of the images are `fill`.
---@param x perilune.Tensor (B, C, H, W)
---@param top integer|perilune.Tensor row of the first pixel, or (B)
---@param left integer|perilune.Tensor
---@param size integer|integer[]
---@param opts {fill?: number}? fill: value outside of the images
---@return perilune.Tensor (B, C, height, width)
function fixed.crop(x, top, left, size, opts)
  local op = "augment.crop"
  local n = geometry.images(op, x)
  local height, width = geometry.size(op, size)
  return mapped(x, geometry.crop(geometry.entry(op, "top", top, n), geometry.entry(op, "left", left, n), height, width, true), fill_of(op, opts))
end

---Mirrors images: left to right, or top to bottom with `axis = "rows"`.
---@param x perilune.Tensor (B, C, H, W)
---@param opts {axis?: "columns"|"rows"}? axis: "columns" mirrors left to right, "rows" top to bottom
---@return perilune.Tensor
function fixed.flip(x, opts)
  local op = "augment.flip"
  geometry.images(op, x)
  local axis = check.word(op, "axis", check.options(op, opts, { axis = "columns" }).axis, { "columns", "rows" })
  return x:flip(axis == "rows" and 2 or 3)
end

---Scales images, bilinear without a filter, as torchvision's resize with antialias = False. A reduction by more than 1.5 is an error.
---@param x perilune.Tensor (B, C, H, W)
---@param size integer|integer[]
---@return perilune.Tensor
function fixed.resize(x, size)
  local op = "augment.resize"
  local _, _, h, w = geometry.images(op, x)
  local height, width = geometry.size(op, size)
  geometry.check_reduction(op, h, height, "height")
  geometry.check_reduction(op, w, width, "width")
  return mapped(x, geometry.resized(0, 0, h, w, height, width), 0)
end

---Rotates images counter-clockwise about their centre, as torchvision's rotate with bilinear interpolation.
---@param x perilune.Tensor (B, C, H, W)
---@param degrees number|perilune.Tensor a number, or (B)
---@param opts {fill?: number}? fill: value outside of the images
---@return perilune.Tensor
function fixed.rotate(x, degrees, opts)
  local op = "augment.rotate"
  local n, _, h, w = geometry.images(op, x)
  local angle = geometry.entry(op, "the angle", degrees, n)
  return mapped(x, geometry.affine(h, w, -angle, 0, 0, 1, 0, 0), fill_of(op, opts))
end

---Rotates clockwise, translates, scales and shears images about their centre, as torchvision's affine with bilinear interpolation.
---@param x perilune.Tensor (B, C, H, W)
---@param params {angle?: number|perilune.Tensor, translate?: table, scale?: number|perilune.Tensor, shear?: table, fill?: number} angle: degrees clockwise, a number or (B); translate: pixels { x, y }, numbers or (B); scale: a number or (B); shear: degrees { x, y }, numbers or (B); fill: value outside of the images
---@return perilune.Tensor
function fixed.affine(x, params)
  local op = "augment.affine"
  local n, _, h, w = geometry.images(op, x)
  local o = check.options(op, params, { fill = 0 },
    { angle = "number|tensor", translate = "table", scale = "number|tensor", shear = "table" })
  check.between(op, "fill", o.fill, -1e6, 1e6)
  local function pair(name)
    local list = o[name] or { 0, 0 }
    if #list ~= 2 then pl.error(op, ("%s has %d numbers"):format(name, #list), "give { x, y }") end
    return geometry.entry(op, name, list[1], n), geometry.entry(op, name, list[2], n)
  end
  local tx, ty = pair "translate"
  local sx, sy = pair "shear"
  local scale = geometry.entry(op, "scale", o.scale or 1, n)
  if type(scale) == "number" and scale <= 0 then pl.error(op, ("scale is %g"):format(scale), "it must be above 0") end
  return mapped(x, geometry.affine(h, w, geometry.entry(op, "angle", o.angle or 0, n), tx, ty, scale, sx, sy), o.fill)
end

return fixed
