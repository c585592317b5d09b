-- Tests columns of tables: fits against scikit-learn (golden/tables.lua), missing and unknown values, errors.

local pl = require "perilune"
local data = pl.data
local t = require "support"
local describe, it, expect = t.describe, t.it, t.expect

local golden = require("golden.tables").columns

---All rows of the golden table, and those of the training part.
local function rows()
  local all = data.list(golden.rows)
  return all, all:take(golden.train)
end

local options = { numbers = { "age", "income" }, categories = { "city" }, indicators = { "income" } }

describe("data.fit_columns", function()
  it("finds the means, deviations and categories of the training rows as scikit-learn does", function()
    local all, train = rows()
    local columns = data.fit_columns(train, options)
    for i, column in ipairs(columns.numbers) do
      expect(column.mean):to_be_near(golden.mean[i], 1e-12)
      expect(column.deviation):to_be_near(golden.deviation[i], 1e-12)
    end
    expect(columns.categories[1].values):to_equal(golden.values)
    expect({ columns.width, columns.sizes[1], columns.numbers[1].count }):to_equal { 3, #golden.values + 2, golden.train }
    local batch = all:map(columns.encode):batch(#golden.rows):batch_at(0)
    expect({ batch.x.dtype, batch.c.dtype }):to_equal { "f32", "i64" }
    expect(batch.x):to_be_near(golden.x, 1e-6)
    expect(batch.c:squeeze(1)):to_equal(golden.c)
  end)

  it("has the same bits for any number of threads and behind a shuffle", function()
    local _, train = rows()
    local one, two = data.fit_columns(train, options), data.fit_columns(train:shuffle(3), options)
    for i, column in ipairs(one.numbers) do expect(two.numbers[i]):to_equal(column) end
  end)

  it("is a plain table, of which data.columns makes the same encoder", function()
    local _, train = rows()
    local columns = data.fit_columns(train, options)
    local again = data.columns { numbers = columns.numbers, categories = columns.categories }
    for i = 0, train:size() - 1 do expect(again.encode(train:get(i))):to_equal(columns.encode(train:get(i))) end
    expect(getmetatable(columns)):to_be(nil)
    local function row(r)
      local out = columns.encode(r)
      out.y = r.age % 2
      return out
    end
    expect(train:map(row):batch(4):batch_at(0).y.shape):to_equal { 4 }
  end)

  it("takes categories of strings, integers and booleans, sorted", function()
    local list = data.list { { c = "b" }, { c = 10 }, { c = true }, { c = 2.0 }, { c = "" }, { c = "a" }, { c = 10 }, {} }
    local columns = data.fit_columns(list, { categories = { "c" } })
    expect(columns.categories[1].values):to_equal { true, 2, 10, "a", "b" }
    local function id(value) return columns.encode({ c = value }).c[1] end
    expect({ id(nil), id "", id(0 / 0), id "z", id(false), id(true), id(2), id(2.0), id "b" }):to_equal { 0, 0, 0, 1, 1, 2, 3, 3, 6 }
    expect(columns.encode({}).x):to_be(nil)
  end)

  it("gives a missing number the mean, and a column of one value no scale", function()
    local columns = data.fit_columns(data.list { { a = 7, b = 1 }, { a = 7, b = 3 }, { a = 7 } }, { numbers = { "a", "b" }, indicators = true })
    expect(columns.encode { a = 9 }.x):to_equal { 2, 0, 0, 1 }
    expect(columns.encode { b = 3 }.x):to_equal { 0, 1, 1, 0 }
    expect(columns.encode { a = 7, b = 0 / 0 }.x):to_equal { 0, 0, 0, 1 }
  end)

  it("refuses what it cannot fit or encode, with the rule and the cure", function()
    local _, train = rows()
    local function fails(opts, text) expect(function() data.fit_columns(train, opts) end):to_raise(text) end
    fails({}, "name some")
    fails({ number = { "age" } }, "Did you mean 'numbers'?")
    fails({ numbers = { "agee" } }, "did you mean 'age'?")
    fails({ numbers = { "city" } }, "list: record 0: column 'city' is a string, and not a number")
    fails({ categories = { "income" } }, "list it in `numbers`")
    fails({ numbers = { 3 } }, "it lists names of columns")
    fails({ numbers = { "age", "age" } }, "names column 'age' twice")
    fails({ numbers = { "age" }, indicators = { "income" } }, "option 'indicators' is 'income'")
    expect(function() data.fit_columns({}, { numbers = { "age" } }) end):to_raise "give a dataset of records"
    expect(function() data.fit_columns(data.list { { a = 1 / 0 } }, { numbers = { "a" } }) end):to_raise "column 'a' is inf"
    expect(function() data.fit_columns(data.list { { b = 1 } }, { numbers = { "a" } }) end):to_raise "no record has a value in column 'a'"
    expect(function() data.fit_columns(data.list { { c = {} } }, { categories = { "c" } }) end):to_raise "make a string of it in a :map"
    expect(function() data.columns {} end):to_raise "there are no columns"
    expect(function() data.columns { numbers = { { name = "a", mean = 1 } } } end):to_raise "option 'deviation' is missing"
    expect(function() data.columns { categories = { { name = "a", values = { 1, 1 } } } } end):to_raise "lists 1 twice"
    local columns = data.fit_columns(train, options)
    local broken = data.list({ { age = 1, income = "high" } }):map(columns.encode)
    expect(function() broken:get(0) end):to_raise "column 'income' is a string, and was fitted as a column of numbers"
    expect(function() columns.encode { age = 1 / 0 } end):to_raise "column 'age' is inf"
  end)
end)
