-- augment/init.lua: collects the augmentations of image batches (B, C, H, W), functions of given parameters and random steps, and of texts.
--
--   local augment = pl.augment
--   local vary = augment.compose({ augment.RandomCrop(32, { padding = 4 }), augment.RandomFlip(), augment.Normalize(mean, std) }, { seed = 1 })
--   return { train = set:shuffle(1):map(vary):batch(64, { ids = true }) }

local color = require "perilune.augment.color"

---@class perilune.Augment
---@field text perilune.TextAugment
---@field [string] function
local augment = {
  compose = require("perilune.augment.compose").compose,
  draws = require("perilune.augment.draws").draws,
  brightness = color.brightness,
  contrast = color.contrast,
  saturation = color.saturation,
  hue = color.hue,
  solarize = color.solarize,
  posterize = color.posterize,
  normalize = color.normalize,
  text = require "perilune.augment.text",
}

local steps = require "perilune.augment.steps"
for _, name in ipairs { "RandomCrop", "CenterCrop", "Resize", "RandomResizedCrop", "RandomFlip", "RandomRotation", "RandomAffine", "ColorJitter", "Normalize" } do
  augment[name] = steps[name]
end
local noise, mix = require "perilune.augment.noise", require "perilune.augment.mix"
augment.RandomErasing, augment.GaussianNoise, augment.GaussianBlur, augment.blur = noise.RandomErasing, noise.GaussianNoise, noise.GaussianBlur, noise.blur
augment.MixUp, augment.CutMix = mix.MixUp, mix.CutMix
augment.RandAugment = require("perilune.augment.rand_augment").RandAugment
for name, fn in pairs(require "perilune.augment.fixed") do augment[name] = fn end

return augment
