-- data/loader.lua: loads batches by number, and prefetches the next ones.
--
-- `loader:batch_at(k, from)` is a pure function of its arguments and the seed; a loader stores no position. The samples of all epochs
-- are numbered in one stream, and batches are counted from sample `from` of it. So a run is resumed, repeated or distributed by
-- its step count, and an edit of the batch size goes on where the run is (train/position.lua).
--
-- A shuffled loader is an endless stream: the epochs one after another, each in its own order, cut into batches of equal size.
-- A batch may span two epochs, so every step has the same shapes and every sample is used. With `drop_last` an epoch ends with
-- its last full batch instead. A sequential loader has one epoch, whose last batch may be smaller; higher numbers wrap around.
--
-- A batch is that of all devices: on a mesh each gets its share of the samples. Along `cp` it gets its share of the positions of each
-- sample's sequence too, if the loader states how long the sequences are (`context`): of every tensor (samples, context, ...).

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local check = require "perilune.check"
local tree = require "perilune.tree"

---@class perilune.Loader
---@field n integer samples in an epoch
---@field size integer samples in a batch
---@field shuffled boolean
---@field drop_last boolean
---@field make fun(first: integer, count: integer): table makes the batch of samples first .. first + count - 1 of the stream
---@field prefetch (fun(first: integer, count: integer))? starts to make a batch on other threads
---@field ids (fun(first: integer, count: integer): integer[])? numbers of these samples in the source, for warnings
---@field what string? unit of `ids`: "rows"
---@field records perilune.NativeRecords? what its samples are the records of
---@field live perilune.LiveMixture? of records that are a mixture whose weights are a function
---@field packed boolean? of records: whether `pack` has made them, so that a sequence has several documents
---@field pseudo perilune.PseudoLabels? of records that the model in training labels
---@field tokens integer? tokens in a sample of text
---@field context integer? positions in the sequence of a sample: dim 1 of tensors of that size
---@field checked perilune.CheckedRecords? of records: what checks of data read
---@field images perilune.NativeImages? of images: what checks of data decode
---@field corpus perilune.CheckedCorpus? of windows of a text: what checks of data read
---@field rows perilune.CheckedRows? of tensors in memory: what checks of data read
---@field place integer source location of the recipe line that made it
---@field classes (string[]|table<string, string[]>)? of images: class id i is classes[i + 1]; by column where there are several labels
local Loader = {}

-- The number of batches prefetched while one is used. With one, a step would wait for every batch that takes longer than a step.
local AHEAD = 2
local meta = { __index = Loader }

---Makes a loader from its fields.
---@param op string the function of the recipe, for errors
---@param fields {n: integer, size: integer, shuffled: boolean, drop_last: boolean, make: function, prefetch: function?, ids: function?, what: string?, tokens: integer?, context: integer?, classes: (string[]|table<string, string[]>)?, checked: perilune.CheckedRecords?, images: perilune.NativeImages?, corpus: perilune.CheckedCorpus?, rows: perilune.CheckedRows?, records: perilune.NativeRecords?, live: perilune.LiveMixture?, pseudo: perilune.PseudoLabels?, packed: boolean?}
---@return perilune.Loader
local function new(op, fields)
  check.whole(op, "the batch size", fields.size)
  if fields.n == 0 then pl.error(op, "there are no samples", "a split of this size is empty") end
  if fields.drop_last and fields.n < fields.size then
    pl.error(op, ("%d samples do not fill a batch of %d"):format(fields.n, fields.size), "use a smaller batch, or omit drop_last")
  end
  if fields.shuffled and fields.n < fields.size then
    pl.error(op, ("a batch of %d would repeat samples: there are only %d"):format(fields.size, fields.n),
      ("use a batch of at most %d; accumulate = n makes steps of more samples"):format(fields.n))
  end
  local loader = setmetatable(fields, meta) --[[@as perilune.Loader]]
  loader.place = native.place()
  return loader
end

---Number of batches in an epoch.
---@return integer
function Loader:batches()
  if self.drop_last then return self.n // self.size end
  return (self.n + self.size - 1) // self.size
end

---Number of samples in an epoch.
---@return integer
function Loader:samples()
  return self.drop_last and self:batches() * self.size or self.n
end

---Computes the place in the stream of batch `k`, counted from sample `from`: its first sample and its number of samples.
---@param k integer
---@param from integer? 0 by default
---@param size integer? the batch size, by default the loader's
---@return integer first
---@return integer count
function Loader:span(k, from, size)
  local n = self.n
  from, size = from or 0, size or self.size
  if self.shuffled and not self.drop_last then return from + k * size, size end
  -- An epoch ends with its last full batch, or with a smaller one.
  ---@return integer
  local function batches(samples) return self.drop_last and samples // size or (samples + size - 1) // size end
  local epoch, index = from // n, from % n
  local left = batches(n - index)
  if k >= left then
    k, epoch, index = k - left, epoch + 1, 0
    epoch, k = epoch + k // batches(n), k % batches(n)
  end
  local first = index + k * size
  return epoch * n + first, math.min(size, n - first)
end

---Computes the samples that `make` and `prefetch` take for a place in the stream: a sequential loader has one epoch.
---@param self perilune.Loader
---@param first integer
---@return integer
local function in_epoch(self, first)
  return self.shuffled and first or first % self.n
end

---Raises unless each of the `devices` along cp gets a position of the sequences of a loader.
---@param loader any what a recipe gives as one
---@param devices integer
local function check_sequences(loader, devices)
  if getmetatable(loader) ~= meta then
    pl.error("mesh", ("cp=%d divides sequences, and recipe.data makes batches of its own"):format(devices),
      "use text:windows, or set:batch(size, { context = 1024 }), or another axis than cp")
  elseif not loader.context then
    pl.error("mesh", ("cp=%d divides sequences, and a loader states none"):format(devices),
      "state how long they are, as in set:batch(size, { context = 1024 }): dim 1 of a batch's tensors; or use another axis than cp")
  elseif loader.context < devices then
    pl.error("mesh", ("sequences of %d positions leave some of the %d devices along cp without one"):format(loader.context, devices),
      "use longer sequences or a smaller cp")
  end
end

---Divides the sequences of a batch among the devices along cp: each selects its own positions.
---@param self perilune.Loader
---@param batch table<string, perilune.Tensor>
---@return table<string, perilune.Tensor>
local function divided(self, batch)
  local axes = native.mesh() ---@type perilune.Mesh?
  if not axes or axes.cp == 1 or not check.is(batch, "table") then return batch end
  check_sequences(self, axes.cp)
  local own, found = native.positions(self.context), false
  for _, name in ipairs(tree.names(batch)) do
    local x = batch[name]
    if pl.is_tensor(x) and x:dim() >= 2 and x:size(1) == self.context then
      batch[name], found = x:index_select(1, own), true
    end
  end
  if not found then
    pl.error("mesh", ("cp=%d divides sequences of %d positions, and no tensor of the batch has so many in dim 1"):format(axes.cp, self.context),
      "state the length of dim 1 as `context`, or use another axis than cp")
  end
  return batch
end

---Makes batch `k`, counted from 0, and starts to prefetch the next ones.
---@param k integer
---@param from integer? the sample of the stream with which batch 0 begins, 0 by default
---@return table batch named tensors, recorded in the current step
---@return integer count number of samples
function Loader:batch_at(k, from)
  local start, count = self:span(k, from)
  local first = in_epoch(self, start)
  -- Attribute the ops to the line that made the loader: the default loop has no line of the recipe on the stack.
  local before, outer = native.at(self.place), native.batch(count)
  local made, batch = pcall(function() return divided(self, self.make(first, count)) end)
  native.batch(outer)
  native.at(before)
  if not made then error(batch, 0) end
  if self.prefetch then
    for ahead = k + 1, k + AHEAD do
      local next, samples = self:span(ahead, from)
      -- A sequential loader may be done after its last batch: do not prefetch beyond it.
      if not self.shuffled and next // self.n > start // self.n then break end
      self.prefetch(in_epoch(self, next), samples)
    end
  end
  return batch, count
end

---Lists the samples of batch `k` by their numbers in the source.
---@param k integer
---@param from integer? the sample of the stream with which batch 0 begins, 0 by default
---@param size integer? the batch size, by default the loader's
---@return string? what unit of the numbers; nil if the samples have none
---@return integer[]? ids
function Loader:ids_at(k, from, size)
  if not self.ids then return nil end
  local first, count = self:span(k, from, size)
  return self.what, self.ids(in_epoch(self, first), count)
end

return { new = new, check_sequences = check_sequences }
