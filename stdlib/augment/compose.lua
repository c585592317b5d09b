-- augment/compose.lua: runs a chain of random steps over a batch of images, as a function for `set:map`.
--
-- Geometric steps that follow one another are composed and sample the images once. Changes of colours that follow one another work on
-- the same planes. So a chain of crop, flip, jitter and normalization is one interpolation, one reduction (the mean of contrast) and
-- maps. Images of u8 become floats in [0, 1] at the first step that needs values; floats are taken to be in that range.

local pl = require "perilune"
local check = require "perilune.check"
local geometry = require "perilune.augment.geometry"
local color = require "perilune.augment.color"
local draws = require "perilune.augment.draws"

local KINDS <const> = { "geometry", "colors", "image", "batch" }

---Raises unless every element is a step.
local function check_steps(op, steps)
  if not check.is(steps, "table") or #steps == 0 then
    pl.error(op, "steps is " .. check.show(steps), "give a list of steps: augment.compose({ augment.RandomFlip() }, { seed = 1 })")
  end
  for i, step in ipairs(steps) do
    local known = false
    for _, kind in ipairs(KINDS) do known = known or type(step) == "table" and type(step[kind]) == "function" end
    if not known then pl.error(op, ("step %d is %s"):format(i, check.show(step)), "steps are made by functions such as augment.RandomFlip()") end
  end
end

---A batch of images in the middle of a chain: values that are stored, and the map and the planes that are pending.
---@class perilune.AugmentState
---@field x perilune.Tensor
---@field bytes boolean whether x has the values 0 to 255
---@field map perilune.GeometricMap?
---@field planes perilune.Tensor[]?

---Finishes what is pending; returns images of floats in [0, 1].
---@param s perilune.AugmentState
---@param fill number
local function images(s, fill)
  if s.map then
    s.x = geometry.sample(s.x, s.map, s.bytes and fill * 255 or fill)
    s.map = nil
  end
  if s.planes then s.x, s.planes = color.join(s.planes), nil end
  if s.bytes then s.x, s.bytes = s.x:to("f32") * (1 / 255), false end
  return s.x
end

---Finishes a pending map; returns planes of floats in [0, 1].
---@param s perilune.AugmentState
local function planes(s, fill)
  if s.planes then return s.planes end
  if s.map then s.x, s.map = geometry.sample(s.x, s.map, s.bytes and fill * 255 or fill), nil end
  local out = color.split(s.x)
  if s.bytes then
    for i, plane in ipairs(out) do out[i] = plane:to("f32") * (1 / 255) end
    s.bytes = false
  end
  return out
end

---Makes a function that augments the images of a batch, for `set:map`. The batch needs the columns `id` and `visit` of
---`set:batch(size, { ids = true })`: the same sample in the same epoch gets the same numbers, wherever and whenever it is used.
---  set:shuffle(1):map(augment.compose({ augment.RandomCrop(32, { padding = 4 }), augment.RandomFlip() }, { seed = 1 })):batch(64, { ids = true })
---@param steps perilune.AugmentStep[]
---@param opts {seed?: integer, column?: string, fill?: number}? seed: of all draws; column: that of the images; fill: value in [0, 1] outside of the images
---@return fun(batch: table<string, perilune.Tensor>): table<string, perilune.Tensor>
local function compose(steps, opts)
  local op = "augment.compose"
  local o = check.options(op, opts, { seed = 0, column = "x", fill = 0 })
  check.whole(op, "seed", o.seed, false)
  check.between(op, "fill", o.fill, 0, 1)
  check_steps(op, steps)
  local list = table.move(steps, 1, #steps, 1, {})
  return function(batch)
    if not check.is(batch, "table") then pl.error(op, "the batch is " .. check.show(batch), "give a table of tensors") end
    local _, c, h, w = geometry.images(op, batch[o.column])
    local numbers = draws.draws(batch, { seed = o.seed })
    if numbers.n ~= batch[o.column]:size(0) then
      pl.error(op, ("there are %d ids for %d images"):format(numbers.n, (batch[o.column]:size(0))), "map the batch before its samples are selected")
    end
    local out = {}
    for name, x in pairs(batch) do out[name] = x end
    ---@type perilune.AugmentState
    local s = { x = batch[o.column], bytes = batch[o.column].dtype == "u8" }
    for _, step in ipairs(list) do
      if step.rgb and c ~= 3 then pl.error("augment." .. step.name, ("the images have %d channels"):format(c), "it needs the three of RGB") end
      local params = step.prepare and step.prepare(numbers)
      if step.geometry then
        if s.planes then images(s, o.fill) end
        local map = step.geometry(numbers, h, w, params)
        s.map = s.map and geometry.chain(s.map, map) or map
        h, w = map.height, map.width
      end
      if step.colors then s.planes = step.colors(planes(s, o.fill), numbers, params) end
      if step.image then s.x = step.image(images(s, o.fill), numbers) end
      if step.batch then
        out[o.column] = images(s, o.fill)
        out = step.batch(out, numbers, o.column)
        s.x = out[o.column]
      end
    end
    out[o.column] = images(s, o.fill)
    return out
  end
end

return { compose = compose }
