-- augment/geometry.lua: maps images geometrically: crop, flip, resize, rotate, shear and affine maps, composed to one matrix.
--
-- A map is the inverse 2x3 matrix of each image: it takes positions of the result to positions of the source, in pixels, where the
-- centre of the first pixel is (0.5, 0.5). An entry is a number, the same for all images, or a tensor (B). A chain of maps is one
-- product of matrices and one bilinear interpolation (`pl.affine_sample`), so nothing is resampled twice.

local pl = require "perilune"
local check = require "perilune.check"

---@alias perilune.ImageParameter number|perilune.Tensor a number, or (B) f32

---@class perilune.GeometricMap
---@field [1] perilune.ImageParameter matrix, row by row: x = [1] u + [2] v + [3], y = [4] u + [5] v + [6]
---@field [2] perilune.ImageParameter
---@field [3] perilune.ImageParameter
---@field [4] perilune.ImageParameter
---@field [5] perilune.ImageParameter
---@field [6] perilune.ImageParameter
---@field height integer of the result
---@field width integer
---@field fills boolean? whether positions outside of the source have the fill value, not that of the nearest pixel

local geometry = {}

---Maximal minification of bilinear interpolation, which reads four pixels: beyond it images need a filter.
local MINIFICATION <const> = 1.5

---Returns B, C, H, W; raises unless x is a batch of images.
---@param op string
---@param x any
---@return integer, integer, integer, integer
function geometry.images(op, x)
  if not pl.is_tensor(x) then pl.error(op, "x is " .. check.show(x), "give a batch of images (B, C, H, W)") end
  if x:dim() ~= 4 then
    pl.error(op, ("x has shape {%s}"):format(table.concat(x.shape, ", ")), "it must be a batch of images (B, C, H, W); x:unsqueeze(0) makes one of an image")
  end
  local b, c, h, w = x:size()
  if h == 0 or w == 0 then pl.error(op, ("x has images of %d x %d pixels"):format(h, w), "images need pixels") end
  return b, c, h, w
end

---Returns a size as height and width: one number, or { height, width }.
---@param op string
---@param size any
---@return integer height, integer width
function geometry.size(op, size)
  local list = check.sizes(op, "the size", size, 2)
  return list[1] --[[@as integer]], list[2] --[[@as integer]]
end

---Returns an argument of a map: a number, or a tensor (B), as f32.
---@param op string
---@param name string
---@param value any
---@param n integer B
---@return perilune.ImageParameter
function geometry.entry(op, name, value, n)
  if pl.is_tensor(value) then
    if value:dim() ~= 1 or value:size(0) ~= n then
      pl.error(op, ("%s has shape {%s}"):format(name, table.concat(value.shape, ", ")), ("give a number, or a tensor (%d): one number for each image"):format(n))
    end
    return value:to("f32")
  end
  if type(value) ~= "number" or value ~= value or value == math.huge or value == -math.huge then
    pl.error(op, ("%s is %s"):format(name, check.show(value)), "give a finite number, or a tensor (B)")
  end
  return value
end

---Returns the sine and the cosine of an angle in degrees.
---@param degrees perilune.ImageParameter
---@return perilune.ImageParameter, perilune.ImageParameter
local function sincos(degrees)
  local a = degrees * (math.pi / 180) ---@type any
  if type(a) == "number" then return math.sin(a), math.cos(a) end
  return a:sin(), a:cos()
end

---Returns the tangent of an angle in degrees.
local function tan(degrees)
  local s, c = sincos(degrees)
  return s / c
end

---The identity of images of a size.
---@return perilune.GeometricMap
function geometry.identity(height, width)
  return { 1, 0, 0, 0, 1, 0, height = height, width = width }
end

---Applies `second` to the result of `first`.
---@param first perilune.GeometricMap
---@param second perilune.GeometricMap
---@return perilune.GeometricMap
function geometry.chain(first, second)
  local a, b, e, c, d, f = table.unpack(first, 1, 6)
  local p, q, s, r, t, w = table.unpack(second, 1, 6)
  return { a * p + b * r, a * q + b * t, a * s + b * w + e, c * p + d * r, c * q + d * t, c * s + d * w + f,
           height = second.height, width = second.width, fills = first.fills or second.fills }
end

---Crops height x width pixels whose first is (top, left); negative positions are padding.
---@return perilune.GeometricMap
function geometry.crop(top, left, height, width, fills)
  return { 1, 0, left, 0, 1, top, height = height, width = width, fills = fills }
end

---Scales a region of the source, whose first pixel begins at (top, left), to height x width pixels.
---@return perilune.GeometricMap
function geometry.resized(top, left, rows, columns, height, width)
  return { columns * (1 / width), 0, left, 0, rows * (1 / height), top, height = height, width = width }
end

---Mirrors images left to right where `flip` is 1, not where it is 0.
---@return perilune.GeometricMap
function geometry.flipped_columns(flip, height, width)
  return { 1 - flip * 2, 0, flip * width, 0, 1, 0, height = height, width = width }
end

---Mirrors images top to bottom.
---@return perilune.GeometricMap
function geometry.flipped_rows(flip, height, width)
  return { 1, 0, 0, 0, 1 - flip * 2, flip * height, height = height, width = width }
end

---Rotates clockwise, scales, shears and translates images about their centre, as torchvision's `affine`: `angle` and shears in
---degrees, translations in pixels. The inverse of T(translate) T(centre) R(angle) Shear Scale T(-centre).
---@return perilune.GeometricMap
function geometry.affine(height, width, angle, translate_x, translate_y, scale, shear_x, shear_y)
  local s, c = sincos(angle - shear_y)
  local _, cy = sincos(shear_y)
  local sin_angle, cos_angle = sincos(angle)
  local tan_x = tan(shear_x)
  local a, b = c / cy, -(c * tan_x) / cy - sin_angle
  local e, f = s / cy, -(s * tan_x) / cy + cos_angle
  local m1, m2, m4, m5 = f / scale, -b / scale, -e / scale, a / scale
  local x, y = translate_x + width / 2, translate_y + height / 2
  return { m1, m2, width / 2 - m1 * x - m2 * y, m4, m5, height / 2 - m4 * x - m5 * y, height = height, width = width, fills = true }
end

---Assembles the matrices (n, 2, 3) of a map in one kernel.
---@param map perilune.GeometricMap
---@param n integer
---@return perilune.Tensor (n, 2, 3) f32
function geometry.matrix(map, n)
  local at = pl.arange(6)
  local out ---@type any
  for i = 6, 1, -1 do
    local entry = map[i] ---@type any
    if pl.is_tensor(entry) then entry = entry:unsqueeze(1) end
    if not out then
      out = pl.is_tensor(entry) and entry or pl.full({ 1 }, entry, { dtype = "f32" })
    else
      out = pl.where(at:eq(i - 1), entry, out)
    end
  end
  return out:expand(n, 6):reshape(n, 2, 3)
end

---Samples images once at the positions of a map.
---@param x perilune.Tensor (B, C, H, W)
---@param map perilune.GeometricMap
---@param fill number the value outside of the images
---@return perilune.Tensor # float; of u8 from 0 to 255
function geometry.sample(x, map, fill)
  return pl.affine_sample(x, geometry.matrix(map, (x:size(0))),
    { size = { map.height, map.width }, border = map.fills and "constant" or "edge", fill = fill })
end

---Raises if a size would reduce images so far that bilinear interpolation skips pixels.
function geometry.check_reduction(op, from, to, name)
  if from / to > MINIFICATION then
    pl.error(op, ("it reduces the %s from %d to %d pixels"):format(name, from, to),
      ("interpolation skips pixels beyond a factor of %g; data.images scales with a filter when it decodes"):format(MINIFICATION))
  end
end

return geometry
