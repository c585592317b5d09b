-- data/set.lua: datasets: samples by number from a source, and views of them.
--
-- split, shuffle and map return a new view and copy no data: which samples, in which order, what is done to a batch. The source
-- makes a batch of a list of samples. That of `tensors`, named columns of equal length in memory, does so by `index_select` from a
-- small index tensor, so it is recorded like any other op and its content is no part of the plan; data/images.lua has another.

local pl = require "perilune"
local check = require "perilune.check"
local tree = require "perilune.tree"
local native = require "perilune.data.native"
local part = require "perilune.data.part"
local loader = require "perilune.data.loader"

---@class perilune.Source
---@field what string what its rows are called
---@field reader fun(seed: integer?): perilune.BatchReader for one loader, with the seed of its order
---@field path fun(row: integer): string the file of a row, or an error

---@class perilune.BatchReader rows, and the number of the first of them in the loader's stream of samples
---@field batch fun(rows: integer[], first: integer): table<string, perilune.Tensor>
---@field expect (fun(rows: integer[], first: integer))? begins with a batch that will be asked for

---@class perilune.Set
---@field source perilune.Source
---@field columns table<string, perilune.Tensor>? of a set in memory
---@field classes string[]? of a set of images: class id i is classes[i + 1]
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

---A set of the `n` samples of a source.
---@param source perilune.Source
---@param n integer
---@param fields {columns: table?, classes: string[]?}
---@return perilune.Set
local function new(source, n, fields)
  return setmetatable({ source = source, columns = fields.columns, classes = fields.classes, n = n, maps = {}, parts = {} }, meta)
end

---Rows of tensors.
local function select(columns, rows)
  local ids, batch = pl.tensor(rows, { dtype = "i64" }), {}
  for _, name in ipairs(tree.names(columns)) do batch[name] = columns[name]:index_select(0, ids) end
  return batch
end

---A set from tensors whose first dims are equal: data.tensors { x = x, y = y }.
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
      pl.error(op, ("column '%s' has %d samples, '%s' has %d"):format(name, t:size(0), names[1], n), "all columns have the same first dim")
    end
    pl.eval(t)
    own[name] = t
  end
  local reader = { batch = function(rows) return select(own, rows) end }
  local function path() pl.error("set:path", "its samples are no files", "those of data.images are") end
  return new({ what = "rows", reader = function() return reader end, path = path }, n --[[@as integer]], { columns = own })
end

---The number of samples.
---@return integer
function Set:size()
  return self.n
end

---The file of an image, by its number in the list of all (`images 4, 17` in a warning), from 0.
---@param row integer
---@return string
function Set:path(row)
  return self.source.path(check.whole("set:path", "row", row, 0))
end

---A random part: see data/part.lua. The same seed gives parts that do not overlap.
---@param name string "train", "valid", "test" or another
---@param fraction number of all samples of this set
---@param seed integer?
---@return perilune.Set
function Set:split(name, fraction, seed)
  seed = check.whole("set:split", "seed", seed or 0, 0)
  self.parts[seed] = self.parts[seed] or part.new(self.n)
  local low, high = part.take("set:split", self.parts[seed], name, fraction)
  local order, index = native.split_order(seed, self.n), {}
  for i = low + 1, high do
    local at = order[i] --[[@as integer]]
    index[#index + 1] = self.index and self.index[at + 1] or at
  end
  return view(self, { index = index, n = #index })
end

---Another order in each epoch, from `seed`.
---@param seed integer?
---@return perilune.Set
function Set:shuffle(seed)
  return view(self, { seed = check.whole("set:shuffle", "seed", seed or 0, 0) })
end

---Applies `fn` to every batch when it is made, for scaling or augmentation. It returns the batch to use.
---@param fn fun(batch: table<string, perilune.Tensor>): table<string, perilune.Tensor>
---@return perilune.Set
function Set:map(fn)
  if not check.is(fn, "function") then pl.error("set:map", "fn is " .. check.show(fn), "give a function of a batch that returns a batch") end
  local maps = table.move(self.maps, 1, #self.maps, 1, {})
  maps[#maps + 1] = fn
  return view(self, { maps = maps })
end

---What the maps make of a batch.
local function mapped(set, batch)
  for _, fn in ipairs(set.maps) do
    batch = fn(batch)
    if type(batch) ~= "table" then pl.error("set:map", "the function returned " .. check.show(batch), "return the batch, a table of tensors") end
  end
  return batch
end

---Batches of `size` samples: endless if shuffled, else once through in order. See data/loader.lua.
---@param size integer
---@param opts {drop_last?: boolean}?
---@return perilune.Loader
function Set:batch(size, opts)
  local o = check.options("set:batch", opts, { drop_last = false })
  local set, reader = self, self.source.reader(self.seed)
  ---Samples `first` .. `first + count - 1` of the stream as rows of the source; a batch may span two epochs.
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
  local function make(first, count) return mapped(set, reader.batch(rows(first, count), first)) end
  local expect = reader.expect and function(first, count) reader.expect(rows(first, count), first) end
  return loader.new("set:batch", { n = self.n, size = size, shuffled = self.seed ~= nil, drop_last = o.drop_last,
                                    make = make, expect = expect, ids = rows, what = self.source.what, classes = self.classes })
end

return { new = new, tensors = tensors }
