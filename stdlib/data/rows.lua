-- data/rows.lua: reads CSV files and converts their columns to tensors.

local pl = require "perilune"
local check = require "perilune.check"
local tree = require "perilune.tree"
local native = require "perilune.data.native"
local address = require "perilune.data.address"
local set = require "perilune.data.set"

---@class perilune.Rows
---@field path string
---@field native perilune.NativeRows
local Rows = {}
local meta = { __index = Rows }

---Reads a CSV file, plain or gzip. `header` (whether the first row names the columns) and `delimiter` are detected by default.
---Lines that start with `comment` are skipped. `missing` is the value of empty cells, which raise an error by default.
---`max_bytes` limits the text and the table in memory (its text and 4 bytes a cell). By default 1 GiB of text and 4 GiB of table; of a
---compressed file 100 times its size, or 32 MiB if that is more.
---@param path string relative to the recipe's folder, or absolute; or an address
---@param opts {header: boolean?, delimiter: string?, comment: string?, missing: number?, max_bytes: integer?, hash: perilune.Hash?}? header: whether the first row has names, found by default; delimiter: one character, found by default; comment: lines that begin with it are skipped; missing: value of empty cells; max_bytes: limit of the text and the table; hash: of the content of an address
---@return perilune.Rows
local function csv(path, opts)
  if type(path) ~= "string" then pl.error("data.csv", "the path is " .. check.show(path)) end
  local o = check.options("data.csv", opts, {}, { header = "boolean", delimiter = "string", comment = "string", missing = "number", max_bytes = "number", hash = "string|table" })
  if o.max_bytes then check.whole("data.csv", "max_bytes", o.max_bytes) end
  local at = address.with_hash("data.csv", path, o.hash)
  o.hash = nil
  return setmetatable({ path = path, native = native.csv(at, o) }, meta)
end

---Number of rows and number of columns.
---@return integer rows
---@return integer columns
function Rows:size()
  return self.native:size()
end

---Returns the column names of the header, or nil without a header.
---@return string[]?
function Rows:names()
  return self.native:names()
end

---Returns the distinct words of a column, sorted, or nil if it holds numbers.
---@param column integer|string
---@return string[]?
function Rows:words(column)
  if native.is_numeric(self.native, column) then return nil end
  local _, words = native.codes(self.native, column)
  return words
end

---Returns the columns that a spec selects, and whether it is a single `column`.
local function columns_of(op, name, spec)
  if spec.column ~= nil and spec.columns ~= nil or spec.column == nil and spec.columns == nil then
    pl.error(op, ("'%s' needs either `column` or `columns`"):format(name), "column = 64, or columns = {0, 64} (half-open), or columns = { \"age\", \"bmi\" }")
  end
  if spec.column ~= nil then return { spec.column }, true end
  local list = spec.columns
  if type(list) ~= "table" then pl.error(op, ("columns of '%s' is %s"):format(name, check.show(list)), "one column is `column = ...`") end
  if type(list[1]) ~= "number" then return list, false end
  if #list ~= 2 then
    pl.error(op, ("columns of '%s' has %d numbers"):format(name, #list), "numbers are a half-open range: columns = {0, 64}; to pick columns use their names")
  end
  local first, stop, out = check.whole(op, "the first column", list[1], 0), check.whole(op, "the end of columns", list[2], 1), {}
  for c = first, stop - 1 do out[#out + 1] = c end
  if #out == 0 then pl.error(op, ("columns {%d, %d} of '%s' is empty"):format(first, stop, name), "the range is half-open: {0, 64} is 0 to 63") end
  return out, false
end

---Converts columns to a dataset with one tensor for each name:
---  rows:tensors { x = { columns = {0, 64}, scale = 1 / 16 }, y = { column = 64, dtype = "i64" } }
---`columns` gives a tensor (rows, columns), `column` a tensor (rows); `shape` reshapes each row; dtype is "f32" by default.
---`labels = true` encodes a column of words as i64 codes, in sorted order; a list of words fixes their codes.
---@param specs table<string, {columns: any[]?, column: integer|string|nil, scale: number?, dtype: string?, shape: integer[]?, labels: boolean|string[]|nil}>
---@return perilune.Set
function Rows:tensors(specs)
  local op, out = "rows:tensors", {}
  if type(specs) ~= "table" then pl.error(op, "it got " .. check.show(specs), "give { x = { columns = {0, 64} }, y = { column = 64 } }") end
  for _, name in ipairs(tree.names(specs)) do
    local spec = specs[name]
    local o = check.options(op .. " " .. tostring(name), spec, { dtype = "f32", scale = 1 },
      { columns = "table", column = "number|string", shape = "table", labels = "boolean|table" })
    local columns, single = columns_of(op, name, o)
    local t ---@type perilune.Tensor
    if o.labels then
      if not single then pl.error(op, ("'%s' has labels in several columns"):format(name), "labels need one `column`") end
      t = native.codes(self.native, columns[1], o.labels ~= true and o.labels or nil)
    else
      t = native.columns(self.native, columns, o.dtype, o.scale)
    end
    if o.shape then
      t = t:reshape({ (t:size(0)), table.unpack(o.shape) })
    elseif single then
      t = t:reshape({ t:size(0) })
    end
    out[name] = t
  end
  return set.tensors(out)
end

return { csv = csv }
