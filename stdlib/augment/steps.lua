-- augment/steps.lua: defines the random steps of an augmentation: crops, flips, rotations, affine maps, changes of colours, normalization.
--
-- A step is a table. `geometry(draws, height, width)` returns a map (augment/geometry.lua), `colors(planes, draws)` changes the planes
-- of images in [0, 1], `image(x, draws)` changes images, and `batch(batch, draws, column)` changes several columns. augment/compose.lua runs them.

local pl = require "perilune"
local check = require "perilune.check"
local geometry = require "perilune.augment.geometry"
local color = require "perilune.augment.color"

---@class perilune.AugmentStep
---@field name string
---@field prepare (fun(draws: perilune.Draws): any)? draws what `geometry` and `colors` both take
---@field geometry (fun(draws: perilune.Draws, height: integer, width: integer, params: any): perilune.GeometricMap)?
---@field colors (fun(planes: perilune.Tensor[], draws: perilune.Draws, params: any): perilune.Tensor[])?
---@field rgb boolean? whether it needs the three channels of RGB
---@field image (fun(x: perilune.Tensor, draws: perilune.Draws): perilune.Tensor)?
---@field batch (fun(batch: table<string, perilune.Tensor>, draws: perilune.Draws, column: string): table<string, perilune.Tensor>)?

local steps = {}

---Draws one number of each sample, uniform in [low, high): (B).
---@param draws perilune.Draws
---@return perilune.Tensor
local function between(draws, low, high)
  return draws:uniform(1):squeeze(1) * (high - low) + low
end

---Returns the bounds of an option that is a number r, for [-r, r], or { low, high }.
---@return number low, number high
local function range(op, name, value, low, high)
  local a, b
  if type(value) == "table" then
    if #value ~= 2 then pl.error(op, ("%s has %d numbers"):format(name, #value), "give a number r for -r to r, or { low, high }") end
    a, b = value[1], value[2]
  else
    a, b = type(value) == "number" and -value or value, value
  end
  check.between(op, name, a, low, high)
  check.between(op, name, b, low, high)
  if a > b then pl.error(op, ("%s is { %g, %g }"):format(name, a, b), "the first number is the smaller one") end
  return a, b
end
steps.range, steps.between = range, between

---Crops at a random position, after padding with zeros.
---@param size integer|integer[] of the result: a number, or { height, width }
---@param opts {padding?: integer}? padding: pixels added to each side first
---@return perilune.AugmentStep
function steps.RandomCrop(size, opts)
  local op = "augment.RandomCrop"
  local height, width = geometry.size(op, size)
  local padding = check.whole(op, "padding", check.options(op, opts, { padding = 0 }).padding, 0)
  return { name = "RandomCrop", geometry = function(draws, h, w)
    local rows, columns = h + 2 * padding - height, w + 2 * padding - width
    if rows < 0 or columns < 0 then
      pl.error(op, ("a crop of %d x %d is larger than the image, %d x %d with its padding"):format(height, width, h + 2 * padding, w + 2 * padding),
        "use a smaller crop, more padding, or resize first")
    end
    local u = draws:uniform(2) ---@type perilune.Tensor
    local top = (u:select(1, 0) * (rows + 1)):floor() - padding
    local left = (u:select(1, 1) * (columns + 1)):floor() - padding
    return geometry.crop(top, left, height, width, padding > 0)
  end }
end

---Crops the centre; an image that is smaller is padded with zeros.
---@param size integer|integer[]
---@return perilune.AugmentStep
function steps.CenterCrop(size)
  local height, width = geometry.size("augment.CenterCrop", size)
  return { name = "CenterCrop", geometry = function(_, h, w)
    return geometry.crop((h - height) // 2, (w - width) // 2, height, width, h < height or w < width)
  end }
end

---Scales images, bilinear without a filter: by a factor of 1/1.5 or more.
---@param size integer|integer[]
---@return perilune.AugmentStep
function steps.Resize(size)
  local op = "augment.Resize"
  local height, width = geometry.size(op, size)
  return { name = "Resize", geometry = function(_, h, w)
    geometry.check_reduction(op, h, height, "height")
    geometry.check_reduction(op, w, width, "width")
    return geometry.resized(0, 0, h, w, height, width)
  end }
end

---Crops a random part of the image and scales it, without a filter.
---@param size integer|integer[]
---@param opts {scale?: number[], ratio?: number[]}? scale: fractions of the area; ratio: ratios of width to height
---@return perilune.AugmentStep
function steps.RandomResizedCrop(size, opts)
  local op = "augment.RandomResizedCrop"
  local height, width = geometry.size(op, size)
  local o = check.options(op, opts, { scale = { 0.08, 1 }, ratio = { 3 / 4, 4 / 3 } })
  local small, large = range(op, "scale", o.scale, 1e-6, 1)
  local narrow, wide = range(op, "ratio", o.ratio, 1e-3, 1e3)
  return { name = "RandomResizedCrop", geometry = function(draws, h, w)
    geometry.check_reduction(op, h, height, "height")
    geometry.check_reduction(op, w, width, "width")
    local area = between(draws, small, large) * (h * w)
    local ratio = between(draws, math.log(narrow), math.log(wide)):exp()
    local rows, columns = (area / ratio):sqrt():clamp(1, h), (area * ratio):sqrt():clamp(1, w)
    local u = draws:uniform(2)
    return geometry.resized((h - rows) * u:select(1, 0), (w - columns) * u:select(1, 1), rows, columns, height, width)
  end }
end

---Mirrors an image with probability p: left to right, or top to bottom with `axis = "rows"`.
---@param p number? 0.5 by default
---@param opts {axis?: "columns"|"rows"}? axis: "columns" mirrors left to right, "rows" top to bottom
---@return perilune.AugmentStep
function steps.RandomFlip(p, opts)
  local op = "augment.RandomFlip"
  p = check.between(op, "p", p or 0.5, 0, 1)
  local axis = check.word(op, "axis", check.options(op, opts, { axis = "columns" }).axis, { "columns", "rows" })
  local flipped = axis == "rows" and geometry.flipped_rows or geometry.flipped_columns
  return { name = "RandomFlip", geometry = function(draws, h, w)
    return flipped(draws:uniform(1):squeeze(1):lt(p):to("f32"), h, w)
  end }
end

---Rotates about the centre by a random angle in degrees.
---@param degrees number|number[] a number r for -r to r, or { low, high }
---@return perilune.AugmentStep
function steps.RandomRotation(degrees)
  local low, high = range("augment.RandomRotation", "degrees", degrees, -360, 360)
  return { name = "RandomRotation", geometry = function(draws, h, w)
    return geometry.affine(h, w, between(draws, low, high), 0, 0, 1, 0, 0)
  end }
end

---Rotates, translates, scales and shears by random amounts.
---@param opts {degrees?: number|number[], translate?: number[], scale?: number[], shear?: number|number[]}? degrees: largest rotation, or { low, high }; translate: largest fractions of width and height; scale: { low, high }; shear: along x, in degrees
---@return perilune.AugmentStep
function steps.RandomAffine(opts)
  local op = "augment.RandomAffine"
  local o = check.options(op, opts, { translate = { 0, 0 }, scale = { 1, 1 } }, { degrees = "number|table", shear = "number|table" })
  local turn, turn_high = range(op, "degrees", o.degrees or 0, -360, 360)
  local shear, shear_high = range(op, "shear", o.shear or 0, -80, 80)
  local small, large = range(op, "scale", o.scale, 1e-3, 1e3)
  if #o.translate ~= 2 then pl.error(op, ("translate has %d numbers"):format(#o.translate), "give the largest fractions of width and height: { 0.1, 0.1 }") end
  local across, down = check.between(op, "translate", o.translate[1], 0, 1), check.between(op, "translate", o.translate[2], 0, 1)
  return { name = "RandomAffine", geometry = function(draws, h, w)
    return geometry.affine(h, w, between(draws, turn, turn_high), between(draws, -across * w, across * w):round(),
      between(draws, -down * h, down * h):round(), between(draws, small, large), between(draws, shear, shear_high), 0)
  end }
end

---Changes brightness, contrast, saturation and hue by random factors, in this order. Factors are uniform in [max(0, 1 - x), 1 + x], the turn
---of the hue in [-x, x].
---@param opts {brightness?: number, contrast?: number, saturation?: number, hue?: number} brightness: x of its factor; contrast: x of its factor; saturation: x of its factor; hue: largest turn, at most 0.5
---@return perilune.AugmentStep
function steps.ColorJitter(opts)
  local op = "augment.ColorJitter"
  local o = check.options(op, opts, { brightness = 0, contrast = 0, saturation = 0, hue = 0 })
  for _, name in ipairs { "brightness", "contrast", "saturation" } do check.between(op, name, o[name], 0, 100) end
  check.between(op, "hue", o.hue, 0, 0.5)
  return { name = "ColorJitter", rgb = o.saturation > 0 or o.hue > 0, colors = function(planes, draws)
    for _, name in ipairs { "brightness", "contrast", "saturation", "hue" } do
      -- Each has its number even if it is not used, so that later draws do not depend on the options.
      local low = name == "hue" and -o.hue or math.max(0, 1 - o[name])
      local high = name == "hue" and o.hue or 1 + o[name]
      local factor = between(draws, low, high):reshape(draws.n, 1, 1, 1)
      if o[name] > 0 then planes = color.changes[name](planes, factor) end
    end
    return planes
  end }
end

---Subtracts the mean of each channel and divides by its deviation; values are in [0, 1] before.
---@param mean number[] of each channel
---@param std number[]
---@return perilune.AugmentStep
function steps.Normalize(mean, std)
  return { name = "Normalize", image = color.normalizer("augment.Normalize", mean, std) }
end

return steps
