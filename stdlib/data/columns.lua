-- data/columns.lua: fits the columns of a table on its training rows, and encodes rows by the fit.
--
--   local columns = data.fit_columns(train, { numbers = { "age", "income" }, categories = { "city" }, indicators = { "income" } })
--   local loader = train:map(columns.encode):batch(64)     -- x (B, 3) f32: age, income, whether income is missing; c (B, 1) i64
--
-- Fit on the training rows alone: a fit on all rows leaks the evaluation rows, whose means and categories the model would then know.
-- A fit is a plain table of numbers and texts, without references to the data: data.columns makes the same encoder of it elsewhere.

local pl = require "perilune"
local check = require "perilune.check"
local records = require "perilune.data.records"

---@class perilune.NumberColumn
---@field name string
---@field mean number of the rows that have a number; f64 sums in the order of the rows
---@field deviation number standard deviation, divided by their count; a column of one value (0) is not scaled
---@field count integer? rows that have a number
---@field indicator boolean? whether `x` has an element that is 1 where the number is missing

---@class perilune.CategoryColumn
---@field name string
---@field values (string|integer|boolean)[] that occur in the training rows, sorted; values[i] has the id i + 1

---@class perilune.Columns a plain table: numbers, texts and the function `encode`
---@field numbers perilune.NumberColumn[]
---@field categories perilune.CategoryColumn[]
---@field width integer elements of `x`: the numbers, then the indicators
---@field sizes integer[] number of ids of each column of categories, as nn.Embedding needs it
---@field encode fun(record: perilune.Record): perilune.Record makes { x =, c = } of a record, also in the workers of records:map

local columns = {}

-- Ids of a value that is missing and of one that the training rows do not have; those of the others follow.
local MISSING <const>, UNKNOWN <const> = 0, 1

---@param op string
---@param name string the option
---@param list any
---@return string[]
local function names(op, name, list)
  for i, one in ipairs(list) do
    if type(one) ~= "string" then pl.error(op, ("option '%s' has %s; it lists names of columns"):format(name, check.show(one)), ("%s = { \"age\" }"):format(name)) end
    for j = 1, i - 1 do
      if list[j] == one then pl.error(op, ("option '%s' names column '%s' twice"):format(name, one), "leave one out") end
    end
  end
  return list
end

---Makes the function that encodes records. It runs in workers, which have plain tables and functions only.
---@param numbers perilune.NumberColumn[]
---@param ids {name: string, ids: table<any, integer>}[]
---@return fun(record: perilune.Record): perilune.Record
local function encoder(numbers, ids)
  return function(record)
    local out = {}
    if #numbers > 0 then
      local x, flags = {}, {}
      for i, column in ipairs(numbers) do
        local value = record[column.name]
        if value ~= nil and math.type(value) == nil then
          error(("column '%s' is a %s, and was fitted as a column of numbers"):format(column.name, type(value)), 0)
        end
        if value == math.huge or value == -math.huge then error(("column '%s' is %s"):format(column.name, value), 0) end
        local missing = value == nil or value ~= value
        x[i] = missing and 0.0 or (value - column.mean) / (column.deviation > 0 and column.deviation or 1.0)
        if column.indicator then flags[#flags + 1] = missing and 1.0 or 0.0 end
      end
      table.move(flags, 1, #flags, #x + 1, x)
      out.x = x
    end
    if #ids > 0 then
      local c = {}
      for i, column in ipairs(ids) do
        local value = record[column.name]
        local missing = value == nil or value == "" or value ~= value
        c[i] = missing and MISSING or column.ids[value] or UNKNOWN
      end
      out.c = c
    end
    return out
  end
end

---Makes the encoder of a fit: the fields `numbers` and `categories` that data.fit_columns returned, stored elsewhere meanwhile.
---  local columns = data.columns { numbers = { { name = "age", mean = 39, deviation = 12 } }, categories = { { name = "city", values = { "Bern", "Rome" } } } }
---@param fit {numbers: perilune.NumberColumn[]?, categories: perilune.CategoryColumn[]?} numbers: name, mean and deviation of each; categories: name and values of each
---@return perilune.Columns
function columns.columns(fit)
  local op = "data.columns"
  if type(fit) ~= "table" then pl.error(op, "it got " .. check.show(fit), "give { numbers = { ... }, categories = { ... } } as data.fit_columns returned them") end
  local out = { numbers = {}, categories = {}, sizes = {}, width = 0 }
  for i, given in ipairs(fit.numbers or {}) do
    local o = check.options(("%s numbers[%d]"):format(op, i), given, { indicator = false }, { name = "string", mean = "number", deviation = "number", count = "number" })
    check.required(op, o, { "name", "mean", "deviation" })
    check.between(op, "mean of " .. o.name, o.mean, -math.maxinteger, math.maxinteger)
    check.between(op, "deviation of " .. o.name, o.deviation, 0, math.maxinteger)
    out.numbers[i] = o
    out.width = out.width + 1 + (o.indicator and 1 or 0)
  end
  local ids = {}
  for i, given in ipairs(fit.categories or {}) do
    local o = check.options(("%s categories[%d]"):format(op, i), given, {}, { name = "string", values = "table" })
    check.required(op, o, { "name", "values" })
    local of = {}
    for k, value in ipairs(o.values) do
      if of[value] then pl.error(op, ("column '%s' lists %s twice"):format(o.name, check.show(value)), "the values of a column are distinct") end
      of[value] = UNKNOWN + k
    end
    out.categories[i], ids[i] = o, { name = o.name, ids = of }
    out.sizes[i] = UNKNOWN + 1 + #o.values
  end
  if #out.numbers + #ids == 0 then pl.error(op, "there are no columns", "name some: numbers = { \"age\" }, categories = { \"city\" }") end
  out.encode = encoder(out.numbers, ids)
  return out --[[@as perilune.Columns]]
end

---Fits the columns of a table on its training records: mean and standard deviation of numbers, the list of values of categories. Returns a
---plain table whose `encode` maps a record to { x = numbers, c = ids } in records:map:
---  local columns = data.fit_columns(train, { numbers = { "age" }, categories = { "city" } })
---  local function row(r)
---    local out = columns.encode(r)
---    out.y = r.bought
---    return out
---  end
---  return { train = train:map(row):shuffle(1):batch(64), valid = valid:map(row):batch(256) }
---`x` has a number of each column, minus its mean, divided by its deviation; a missing one is the mean, so 0, and has an element 1 behind the
---numbers if the column is among the `indicators`. `c` has an id of each column of categories: 0 for a missing value (also ""), 1 for one that
---the training records lack, and from 2 those of the sorted values.
---Sums are f64 in the order of the records. A fit on all rows leaks the evaluation rows: give the training part only.
---@param set perilune.Records the training part
---@param opts {numbers: string[]?, categories: string[]?, indicators: (string[]|boolean)?} numbers: fields of numbers; categories: fields of texts or whole numbers; indicators: those of `numbers` that need one, or true for all
---@return perilune.Columns
function columns.fit_columns(set, opts)
  local op = "data.fit_columns"
  local o = check.options(op, opts, { numbers = {}, categories = {} }, { indicators = "table|boolean" })
  local native = records.of(op, set).native
  if #o.numbers + #o.categories == 0 then pl.error(op, "there are no columns", "name some: { numbers = { \"age\" }, categories = { \"city\" } }") end
  names(op, "numbers", o.numbers)
  names(op, "categories", o.categories)
  local flagged = {} ---@type table<string, boolean>
  if type(o.indicators) == "table" then
    for _, name in ipairs(names(op, "indicators", o.indicators)) do
      check.word(op, "option 'indicators'", name, o.numbers)
      flagged[name] = true
    end
  end
  local stats, values = native:fit_columns(o.numbers, o.categories)
  local fit = { numbers = {}, categories = {} }
  for i, name in ipairs(o.numbers) do
    local stat = stats[i] --[[@as table]]
    fit.numbers[i] = { name = name, mean = stat.mean, deviation = stat.deviation, count = stat.count, indicator = o.indicators == true or flagged[name] or false }
  end
  for i, name in ipairs(o.categories) do fit.categories[i] = { name = name, values = values[i] } end
  return columns.columns(fit)
end

return columns
