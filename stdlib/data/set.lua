-- data/set.lua: defines datasets: samples by number from a source, with split, shuffle, map and batch.
--
-- split, shuffle and map return views, which copy no data: a view is a subset, an order, and functions to apply to batches. A
-- source makes the batch of a list of samples. Two exist: `tensors` here gathers rows of named tensors in memory, with an index
-- tensor as a run-time input, so that every batch has the same plan; data/images.lua decodes files.

local pl = require "perilune"
local check = require "perilune.check"
local tree = require "perilune.tree"
local native = require "perilune.data.native"
local splits = require "perilune.data.split"
local loader = require "perilune.data.loader"
local checked = require "perilune.data.checked"

---@class perilune.Source
---@field what string unit of its row numbers, such as "rows"
---@field reader fun(seed: integer?): perilune.BatchReader opens it for one loader, with the seed of the order
---@field files perilune.NativeImages? of images, for checks of data
---@field path fun(row: integer): string returns the file of a row; raises if rows are not files

---@class perilune.BatchReader `rows` are numbers in the source, `first` is the number of the first in the loader's stream
---@field batch fun(rows: integer[], first: integer): table<string, perilune.Tensor>
---@field prefetch (fun(rows: integer[], first: integer))? starts to make a batch

---@class perilune.Set
---@field source perilune.Source
---@field columns table<string, perilune.Tensor>? of a set in memory
---@field classes (string[]|table<string, string[]>)? of a set of images: class id i is classes[i + 1]; by column where there are several labels
---@field n integer
---@field index integer[]? the samples of this view, as rows of the source; all when absent
---@field seed integer? of the order; samples stay in order when absent
---@field maps function[]
---@field parts table<integer, perilune.Parts> by seed
local Set = {}
local meta = { __index = Set }

local function view(set, changes)
  local out = { source = set.source, columns = set.columns, classes = set.classes, n = set.n, index = set.index, seed = set.seed,
                maps = set.maps, parts = {} }
  for k, v in pairs(changes) do out[k] = v end
  return setmetatable(out, meta)
end

---Makes a set of the `n` samples of a source.
---@param source perilune.Source
---@param n integer
---@param fields {columns: table?, classes: (string[]|table<string, string[]>)?}
---@return perilune.Set
local function new(source, n, fields)
  return setmetatable({ source = source, columns = fields.columns, classes = fields.classes, n = n, maps = {}, parts = {} }, meta)
end

---Gathers rows of every column.
local function select(columns, rows)
  local ids, batch = pl.tensor(rows, { dtype = "i64" }), {}
  for _, name in ipairs(tree.names(columns)) do batch[name] = columns[name]:index_select(0, ids) end
  return batch
end

---Makes a set from tensors whose first dims are equal: data.tensors { x = x, y = y }.
---@param columns table<string, perilune.Tensor>
---@return perilune.Set
local function tensors(columns)
  local op = "data.tensors"
  local names, n = {}, nil
  for name, t in pairs(check.is(columns, "table") and columns or {}) do
    if type(name) ~= "string" or not pl.is_tensor(t) then
      pl.error(op, ("column '%s' is %s"):format(tostring(name), check.show(t)), "give named tensors: data.tensors { x = x, y = y }")
    end
    names[#names + 1] = name
  end
  if #names == 0 then pl.error(op, "there are no columns", "give named tensors: data.tensors { x = x, y = y }") end
  table.sort(names)
  local own = {}
  for _, name in ipairs(names) do
    local t = columns[name]
    if t:dim() == 0 then pl.error(op, ("column '%s' is a scalar"):format(name), "dim 0 counts the samples") end
    n = n or t:size(0)
    if t:size(0) ~= n then
      pl.error(op, ("column '%s' has %d samples, '%s' has %d"):format(name, t:size(0), names[1], n), "all columns must have the same first dim")
    end
    pl.eval(t)
    own[name] = t
  end
  local reader = { batch = function(rows) return select(own, rows) end }
  local function path() pl.error("set:path", "its samples are not files", "only the samples of data.images are") end
  return new({ what = "rows", reader = function() return reader end, path = path }, n --[[@as integer]], { columns = own })
end

---Number of samples.
---@return integer
function Set:size()
  return self.n
end

---Returns the file of an image by its number, counted from 0, as warnings show it (`images 4, 17`).
---@param row integer
---@return string
function Set:path(row)
  return self.source.path(check.whole("set:path", "row", row, 0))
end

---Returns a random subset. Subsets of different names and the same seed are disjoint (data/split.lua).
---@param name string "train", "valid", "test" or another
---@param fraction number of all samples of this set
---@param seed integer?
---@return perilune.Set
function Set:split(name, fraction, seed)
  seed = check.whole("set:split", "seed", seed or 0, 0)
  self.parts[seed] = self.parts[seed] or splits.new(self.n)
  local low, high = splits.take("set:split", self.parts[seed], name, fraction)
  local order, index = native.split_order(seed, self.n), {}
  for i = low + 1, high do
    local at = order[i] --[[@as integer]]
    index[#index + 1] = self.index and self.index[at + 1] or at
  end
  return view(self, { index = index, n = #index })
end

---Shuffles the samples, in a different order for each epoch.
---@param seed integer?
---@return perilune.Set
function Set:shuffle(seed)
  return view(self, { seed = check.whole("set:shuffle", "seed", seed or 0, 0) })
end

---Applies `fn` to every batch when it is made, for scaling or augmentation. `fn` returns the new batch.
---@param fn fun(batch: table<string, perilune.Tensor>): table<string, perilune.Tensor>
---@return perilune.Set
function Set:map(fn)
  if not check.is(fn, "function") then pl.error("set:map", "fn is " .. check.show(fn), "give a function of a batch that returns a batch") end
  local maps = table.move(self.maps, 1, #self.maps, 1, {})
  maps[#maps + 1] = fn
  return view(self, { maps = maps })
end

---Adds the numbers of samples: `id` of each row in the source, and `visit`, the epoch of its place in the stream.
local function numbered(batch, rows, first, n)
  for _, name in ipairs { "id", "visit" } do
    if batch[name] then
      pl.error("set:batch", ("ids = true adds a column '%s', and the set has one"):format(name), "give that column another name")
    end
  end
  local visits = {}
  for i = 1, #rows do visits[i] = (first + i - 1) // n end
  batch.id, batch.visit = pl.tensor(rows, { dtype = "i64" }), pl.tensor(visits, { dtype = "i64" })
  return batch
end

---Applies the maps to a batch.
local function mapped(set, batch)
  for _, fn in ipairs(set.maps) do
    batch = fn(batch)
    if type(batch) ~= "table" then pl.error("set:map", "the function returned " .. check.show(batch), "return the batch, a table of tensors") end
  end
  return batch
end

---Returns a loader of batches of `size` samples: an endless stream if shuffled, else one epoch in order (data/loader.lua).
---@param size integer
---`context` states that samples are sequences of so many positions, dim 1 of a batch's tensors: devices along cp divide them.
---`ids` adds the columns `id` and `visit` (B) i64: the number of each sample in its source and its epoch, from which `pl.augment` draws.
---@param opts {drop_last?: boolean, context?: integer, ids?: boolean}? drop_last: whether an incomplete last batch is left out; context: positions of a sample that is a sequence, which devices along cp divide; ids: whether batches have the columns `id` and `visit`
---@return perilune.Loader
function Set:batch(size, opts)
  local o = check.options("set:batch", opts, { drop_last = false, ids = false }, { context = "number" })
  if o.context then check.whole("set:batch", "context", o.context) end
  local set, reader = self, self.source.reader(self.seed)
  ---Computes the rows of samples `first` .. `first + count - 1` of the stream; a batch may span two epochs.
  ---@return integer[]
  local function rows(first, count)
    local list = {}
    if set.seed then
      list = native.shuffled(set.seed, first, count, set.n)
    else
      for i = 1, count do list[i] = (first + i - 1) % set.n end
    end
    if set.index then
      for i, at in ipairs(list) do list[i] = set.index[at + 1] end
    end
    return list
  end
  local function make(first, count)
    local list = rows(first, count)
    local batch = reader.batch(list, first)
    return mapped(set, o.ids and numbered(batch, list, first, set.n) or batch)
  end
  local prefetch = reader.prefetch and function(first, count) reader.prefetch(rows(first, count), first) end
  return loader.new("set:batch", { n = self.n, size = size, shuffled = self.seed ~= nil, drop_last = o.drop_last,
                                    make = make, prefetch = prefetch, ids = rows, what = self.source.what, classes = self.classes,
                                    context = o.context, images = self.source.files, rows = checked.rows(self, reader) })
end

---Names the classes of a set: class id i is classes[i + 1].
---@param set perilune.Set
---@param classes string[]
---@return perilune.Set
local function named(set, classes)
  return view(set, { classes = classes })
end

return { new = new, tensors = tensors, named = named }
