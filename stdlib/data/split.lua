-- data/split.lua: splits n samples into named, disjoint ranges for training, validation and test.
--
-- "train" takes its fraction from the front, every other name from the back, in the order of the calls. So "train" 0.8 and
-- "valid" 0.2 are disjoint and cover all samples in either order of calls, and a second call with a name returns the same range.

local pl = require "perilune"
local check = require "perilune.check"

---@class perilune.Parts
---@field n integer number of samples
---@field front number fraction taken by "train"
---@field back number fraction taken by the other names
---@field by_name table<string, {low: integer, high: integer, fraction: number}>

---Starts the splits of `n` samples, with nothing taken.
---@param n integer
---@return perilune.Parts
local function new(n)
  return { n = n, front = 0, back = 0, by_name = {} }
end

---Returns the range [low, high) of a split, out of 0 .. n - 1.
---Raises if the fractions exceed 1, or if a name is given another fraction than before.
---@param op string
---@param parts perilune.Parts
---@param name string
---@param fraction number
---@return integer low
---@return integer high
local function take(op, parts, name, fraction)
  if type(name) ~= "string" then pl.error(op, "the part's name is " .. check.show(name), "as in set:split(\"train\", 0.8, seed)") end
  check.between(op, "fraction", fraction, 0, 1)
  local known = parts.by_name[name] ---@type {low: integer, high: integer, fraction: number}?
  if known then
    if known.fraction ~= fraction then
      pl.error(op, ("part '%s' was %g of the samples before and is %g now"):format(name, known.fraction, fraction),
        "a name stands for one part: use another name")
    end
    return known.low, known.high
  end
  if parts.front + parts.back + fraction > 1 + 1e-9 then
    pl.error(op, ("part '%s' of %g does not fit: %g of the samples are taken"):format(name, fraction, parts.front + parts.back),
      "the fractions of all parts must add up to at most 1")
  end
  local function at(share) return math.floor(share * parts.n + 0.5 + 1e-9) end -- 1e-9: 0.1 and 1 - 0.9 round alike
  local low, high
  if name == "train" then
    low, high = 0, at(fraction)
    parts.front = fraction
  else
    low, high = at(1 - parts.back - fraction), at(1 - parts.back)
    parts.back = parts.back + fraction
  end
  parts.by_name[name] = { low = low, high = high, fraction = fraction }
  return low, high
end

return { new = new, take = take }
