-- augment/draws.lua: draws random numbers of samples: pure functions of (seed, sample id, visit).
--
-- The generator is Squares (Widynski, arXiv:2004.06278): four rounds of squaring and rotating a 64-bit counter, keyed. Its rounds are
-- products, sums and halves of i64, so draws are elementwise and fuse. A sample's counter is its id and its visit, each mixed by
-- a word of the generator; numbers of one sample are adjacent counters. So draws depend neither on the order of samples nor on the
-- number of workers or devices, and a resumed run repeats them.

local pl = require "perilune"
local check = require "perilune.check"

local HALF <const> = 1 << 32

---@class perilune.Draws
---@field n integer samples
---@field counter perilune.Tensor (n) i64 the first counter of each sample
---@field key integer
---@field used integer numbers drawn of each sample so far
local Draws = {}
local meta = { __index = Draws }

---Computes the next word of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014); returns the word and the next state.
local function splitmix(state)
  state = state + 0x9e3779b97f4a7c15
  local z = state
  z = (z ~ (z >> 30)) * 0xbf58476d1ce4e5b9
  z = (z ~ (z >> 27)) * 0x94d049bb133111eb
  return z ~ (z >> 31), state
end

---Makes the key of a seed: hexadecimal digits other than 0, different within each half, the last one odd, as the generator needs.
---@param seed integer
---@return integer
local function key_of(seed)
  local key, state, word = 0, seed, nil
  for half = 1, 2 do
    local digits = {}
    for d = 1, 15 do digits[d] = d end
    for i = 1, 8 do
      word, state = splitmix(state)
      local at = i + (word >> 1) % (16 - i)
      digits[i], digits[at] = digits[at], digits[i]
    end
    -- Of eight different digits from 1 to 15 one is odd.
    if half == 2 and digits[8] --[[@as integer]] % 2 == 0 then
      for i = 1, 7 do
        if digits[i] --[[@as integer]] % 2 == 1 then
          digits[i], digits[8] = digits[8], digits[i]
          break
        end
      end
    end
    for i = 1, 8 do key = key << 4 | digits[i] end
  end
  return key
end

---Swaps the halves of 64-bit words.
local function rotate(x)
  return x // HALF % HALF + x * HALF
end

---Computes the generator's word of each counter; its upper 32 bits are random.
---@param counter perilune.Tensor i64
---@param key integer
---@return perilune.Tensor i64
local function words(counter, key)
  local x = counter * key
  local y = x
  local z = y + key
  x = rotate(x * x + y)
  x = rotate(x * x + z)
  x = rotate(x * x + y)
  return x * x + z
end

---Makes the draws of a batch from the columns `id` and `visit` that `set:batch(size, { ids = true })` adds.
---@param batch table<string, perilune.Tensor>
---@param opts {seed?: integer}? seed: of all draws
---@return perilune.Draws
local function draws(batch, opts)
  local op = "augment.draws"
  local o = check.options(op, opts, { seed = 0 })
  check.whole(op, "seed", o.seed, false)
  if not check.is(batch, "table") then pl.error(op, "the batch is " .. check.show(batch), "give the batch that set:map passes") end
  local id, visit = batch.id, batch.visit
  for name, x in pairs { id = id or false, visit = visit or false } do
    if not pl.is_tensor(x) then
      pl.error(op, ("the batch has no column '%s'"):format(name), "set:batch(size, { ids = true }) adds the columns `id` and `visit`, from which numbers are drawn")
    elseif x.dtype ~= "i64" or x:dim() ~= 1 then
      pl.error(op, ("the column '%s' is %s with shape {%s}"):format(name, x.dtype, table.concat(x.shape, ", ")), "it must be a tensor (B) of i64")
    end
  end
  if id:size(0) ~= visit:size(0) then
    pl.error(op, ("there are %d ids and %d visits"):format(id:size(0), visit:size(0)), "each sample has one of both")
  end
  local key = key_of(o.seed)
  return setmetatable({ n = id:size(0), counter = words(words(id, key) + visit, key), key = key, used = 0 }, meta)
end

---Draws k uniform numbers in [0, 1) for each sample, multiples of 2^-24.
---@param k integer
---@return perilune.Tensor (B, k) f32
function Draws:uniform(k)
  check.whole("draws:uniform", "k", k)
  local counter = self.counter:unsqueeze(1) + pl.arange(k) + self.used
  self.used = self.used + k
  return (words(counter, self.key) // (1 << 40) + (1 << 23)):to("f32") * (1 / (1 << 24))
end

---Draws k standard normal numbers for each sample, by Box and Muller's method from two uniform draws each.
---@param k integer
---@return perilune.Tensor (B, k) f32
function Draws:normal(k)
  check.whole("draws:normal", "k", k)
  local u, v = self:uniform(k), self:uniform(k)
  return ((1 - u):log() * -2):sqrt() * (v * (2 * math.pi)):cos()
end

return { draws = draws, key_of = key_of }
