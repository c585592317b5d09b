-- data/loader.lua: batches by number. `loader:batch_at(k)` is a pure function of k (and the seed), so a run can be resumed,
-- repeated or spread over machines by its step count alone; a loader keeps no position.
--
-- A shuffled loader is an endless stream of samples, epoch behind epoch, each in its own order, cut into batches of equal
-- size; a batch may span two epochs, so that every step has the same shapes and no sample is left out. With `drop_last`
-- an epoch ends with its last full batch instead. A loader in order goes through once, its last batch may be smaller, and numbers
-- beyond it start again.

local pl = require "perilune"
local check = require "perilune.check"

---@class perilune.Loader
---@field n integer samples in an epoch
---@field size integer samples in a batch
---@field shuffled boolean
---@field drop_last boolean
---@field make fun(first: integer, count: integer): table the batch of samples first .. first + count - 1 of the stream
---@field expect (fun(first: integer, count: integer))? begins with a batch that will be asked for, where that takes time
---@field ids (fun(first: integer, count: integer): integer[])? what a person would look these samples up by
---@field what string? what `ids` counts: "rows"
---@field tokens integer? tokens in a sample, of a text
---@field place integer the recipe line that made it
---@field classes string[]? of images: class id i is classes[i + 1]
local Loader = {}

-- Batches that are in the making while one is used. Two: with one, a slow batch behind a quick step would be waited for.
local AHEAD = 2
local meta = { __index = Loader }

---@param op string
---@param fields {n: integer, size: integer, shuffled: boolean, drop_last: boolean, make: function, expect: function?, ids: function?, what: string?, tokens: integer?, classes: string[]?}
---@return perilune.Loader
local function new(op, fields)
  check.whole(op, "the batch size", fields.size)
  if fields.n == 0 then pl.error(op, "there are no samples", "a split of this size is empty") end
  if fields.drop_last and fields.n < fields.size then
    pl.error(op, ("%d samples do not fill a batch of %d"):format(fields.n, fields.size), "use a smaller batch, or leave out drop_last")
  end
  local loader = setmetatable(fields, meta) --[[@as perilune.Loader]]
  loader.place = pl.native.place()
  return loader
end

---Batches in an epoch.
---@return integer
function Loader:batches()
  if self.drop_last then return self.n // self.size end
  return (self.n + self.size - 1) // self.size
end

---Samples in an epoch.
---@return integer
function Loader:samples()
  return self.drop_last and self:batches() * self.size or self.n
end

---First sample and number of samples of batch `k`.
---@param self perilune.Loader
---@param k integer
---@return integer first
---@return integer count
local function span(self, k)
  if self.shuffled then
    local first = k * self.size
    if self.drop_last then first = k // self:batches() * self.n + k % self:batches() * self.size end
    return first, self.size
  end
  local first = k % self:batches() * self.size
  return first, math.min(self.size, self.n - first)
end

---Batch number `k`, from 0.
---@param k integer
---@return table batch named tensors, recorded in the current step
---@return integer count samples in it
function Loader:batch_at(k)
  local first, count = span(self, k)
  -- In the standard loop no line of the recipe is being run: then the line that made the loader stands for the batch.
  local before = pl.native.at(self.place)
  local made, batch = pcall(self.make, first, count)
  pl.native.at(before)
  if not made then error(batch, 0) end
  if self.expect then
    -- A loader in order ends with its last batch: whether it begins again, nobody knows.
    local last = self.shuffled and k + AHEAD or math.min(k + AHEAD, k - k % self:batches() + self:batches() - 1)
    for next = k + 1, last do self.expect(span(self, next)) end
  end
  return batch, count
end

---Which samples batch `k` has: what they are called and their numbers, if they have some.
---@param k integer
---@return string? what
---@return integer[]? ids
function Loader:ids_at(k)
  if not self.ids then return nil end
  local first, count = span(self, k)
  return self.what, self.ids(first, count)
end

---Where batch `k` starts, as a checkpoint tells it.
---@param k integer
---@return {epoch: integer, index: integer}
function Loader:position(k)
  if self.shuffled and not self.drop_last then
    return { epoch = k * self.size // self.n, index = k * self.size % self.n }
  end
  return { epoch = k // self:batches(), index = k % self:batches() * self.size }
end

return { new = new }
