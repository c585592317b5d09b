-- augment/mix.lua: mixes pairs of images of a batch and their labels: MixUp and CutMix.
--
-- The partner of an image is the one at the same distance from the other end of the batch. The labels become the probabilities of the
-- classes (B, K), which cross_entropy takes; a step also takes such probabilities, so that steps can follow one another.

local pl = require "perilune"
local check = require "perilune.check"
local beta = require "perilune.augment.beta"
local noise = require "perilune.augment.noise"

local mix = {}

---Returns labels as probabilities (B, K).
---@param op string
---@param batch table<string, perilune.Tensor>
---@param column string
---@param classes integer K
---@return perilune.Tensor
local function probabilities(op, batch, column, classes)
  local y = batch[column]
  if not pl.is_tensor(y) then pl.error(op, ("the batch has no column '%s'"):format(column), "name the column of the labels: { label = \"y\" }") end
  if y:dim() == 1 and (y.dtype == "i64" or y.dtype == "i32" or y.dtype == "u8") then return pl.one_hot(y, classes):to("f32") end
  if y:dim() == 2 and y:size(1) == classes then return y end
  pl.error(op, ("the labels have shape {%s} of %s"):format(table.concat(y.shape, ", "), y.dtype), ("they must be class ids (B), or probabilities (B, %d)"):format(classes))
  return y
end

---Makes a step that mixes.
---@param name string
---@param classes integer K
---@param opts table?
---@param alpha number the default
---@param blend fun(x: perilune.Tensor, other: perilune.Tensor, share: perilune.Tensor, draws: perilune.Draws): perilune.Tensor, perilune.Tensor returns the images and the share (B) of each image in its result
---@return perilune.AugmentStep
local function step(name, classes, opts, alpha, blend)
  local op = "augment." .. name
  check.whole(op, "classes", classes, 2)
  local o = check.options(op, opts, { alpha = alpha, p = 1, label = "y" })
  check.between(op, "alpha", o.alpha, 0.05, 100)
  check.between(op, "p", o.p, 0, 1)
  local share_of = beta.beta(o.alpha)
  return { name = name, batch = function(batch, draws, column)
    local y, x = probabilities(op, batch, o.label, classes), batch[column]
    local mixed = draws:uniform(1):squeeze(1):lt(o.p)
    local share = pl.where(mixed, share_of(draws), 1.0)
    batch[column], share = blend(x, x:flip(0), share, draws)
    share = share:unsqueeze(1)
    batch[o.label] = y * share + y:flip(0) * (1 - share)
    return batch
  end }
end

---Adds to each image times s another one times 1 - s, s drawn from Beta(alpha, alpha). Zhang et al., mixup (2018).
---@param classes integer K
---@param opts {alpha?: number, p?: number, label?: string}? alpha: of the Beta distribution of the share; p: share of the images that are mixed; label: column of the labels
---@return perilune.AugmentStep
function mix.MixUp(classes, opts)
  return step("MixUp", classes, opts, 0.2, function(x, other, share, draws)
    local s = share:reshape(draws.n, 1, 1, 1)
    return x * s + other * (1 - s), share
  end)
end

---Replaces a box of each image by that of another one; the box has the fraction 1 - s of the area, s drawn from Beta(alpha, alpha), and is cut at the border.
---Yun et al., CutMix (2019).
---@param classes integer K
---@param opts {alpha?: number, p?: number, label?: string}? alpha: of the Beta distribution of the area; p: share of the images that are mixed; label: column of the labels
---@return perilune.AugmentStep
function mix.CutMix(classes, opts)
  return step("CutMix", classes, opts, 1, function(x, other, share, draws)
    local _, _, h, w = x:size()
    local half, u = (1 - share):sqrt() * 0.5, draws:uniform(2)
    local middle_row, middle_column = (u:select(1, 0) * h):floor(), (u:select(1, 1) * w):floor()
    local rows, columns = (half * h):floor(), (half * w):floor()
    local top, bottom = (middle_row - rows):clamp(0, h), (middle_row + rows):clamp(0, h)
    local left, right = (middle_column - columns):clamp(0, w), (middle_column + columns):clamp(0, w)
    local own = 1 - (bottom - top) * (right - left) * (1 / (h * w))
    return pl.where(noise.box(top, left, bottom, right, h, w), other, x), own
  end)
end

return mix
