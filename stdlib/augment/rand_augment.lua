-- augment/rand_augment.lua: applies random ops of one magnitude to each image. Cubuk et al., RandAugment (2020).
--
-- Each image chooses its own ops: what it does not choose gets the parameter that changes nothing. So the geometric ops of all
-- layers are one interpolation, before the changes of colours. Of torchvision's ops, AutoContrast, Equalize and Sharpness are
-- left out; shears are about the centre.

local pl = require "perilune"
local check = require "perilune.check"
local geometry = require "perilune.augment.geometry"
local color = require "perilune.augment.color"

local OPS <const> = { "Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Saturation", "Contrast", "Posterize", "Solarize" }
local NUMBER <const> = {}
for i, name in ipairs(OPS) do NUMBER[name] = i - 1 end

---Applies `ops` random ops, each of magnitude m out of 30: rotations to 30 degrees, shears to 0.3, translations to 0.45 of the size,
---brightness, saturation and contrast changed by 0.9, 4 bits left, inversion of all values, all times m / 30.
---@param opts {ops?: integer, magnitude?: number}? ops: number of ops; magnitude: of each, from 0 to 30
---@return perilune.AugmentStep
local function RandAugment(opts)
  local op = "augment.RandAugment"
  local o = check.options(op, opts, { ops = 2, magnitude = 9 })
  check.between(op, "ops", check.whole(op, "ops", o.ops), 1, 16)
  local m = check.between(op, "magnitude", o.magnitude, 0, 30) / 30
  local step = { name = "RandAugment" }

  ---Draws the layers: `number` (B) of the op, `sign` (B) 1 or -1.
  function step.prepare(draws)
    local layers = {}
    for i = 1, o.ops do
      local u = draws:uniform(2) ---@type perilune.Tensor
      layers[i] = { number = (u:select(1, 0) * #OPS):floor(), sign = pl.where(u:select(1, 1):lt(0.5), -1.0, 1.0) }
    end
    return layers
  end

  ---The amount where a layer chose the op, else `rest`.
  local function chosen(layer, name, amount, rest)
    return pl.where(layer.number:eq(NUMBER[name]), amount, rest)
  end

  function step.geometry(_, h, w, layers)
    local map ---@type perilune.GeometricMap
    for _, layer in ipairs(layers) do
      local shear = layer.sign * math.deg(math.atan(0.3 * m))
      local one = geometry.affine(h, w, chosen(layer, "Rotate", layer.sign * (30 * m), 0.0),
        chosen(layer, "TranslateX", (layer.sign * (150 / 331 * w * m)):round(), 0.0), chosen(layer, "TranslateY", (layer.sign * (150 / 331 * h * m)):round(), 0.0),
        1, chosen(layer, "ShearX", shear, 0.0), chosen(layer, "ShearY", shear, 0.0))
      map = map and geometry.chain(map, one) or one
    end
    return map
  end

  function step.colors(planes, draws, layers)
    local function of_pixels(x) return x:reshape(draws.n, 1, 1, 1) end
    for _, layer in ipairs(layers) do
      local factor = layer.sign * (0.9 * m) + 1
      planes = color.changes.brightness(planes, of_pixels(chosen(layer, "Brightness", factor, 1.0)))
      planes = color.changes.saturation(planes, of_pixels(chosen(layer, "Saturation", factor, 1.0)))
      planes = color.changes.contrast(planes, of_pixels(chosen(layer, "Contrast", factor, 1.0)))
      planes = color.changes.solarize(planes, of_pixels(chosen(layer, "Solarize", 1 - m, 2.0)))
      local few, out = of_pixels(layer.number:eq(NUMBER.Posterize)), {}
      for i, plane in ipairs(color.changes.posterize(planes, 8 - math.floor(4 * m + 0.5))) do out[i] = pl.where(few, plane, planes[i] --[[@as perilune.Tensor]]) end
      planes = out
    end
    return planes
  end
  return step
end

return { RandAugment = RandAugment }
