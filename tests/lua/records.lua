-- Tests datasets of records: stages, functions in workers, batches, packing. runtime/data compares random pipelines with lists.

local pl = require "perilune"
local data = pl.data
local t = require "support"
local describe, it, expect = t.describe, t.it, t.expect

local function numbers(n)
  local list = {}
  for i = 0, n - 1 do list[i + 1] = { id = i, text = ("x"):rep(i % 5), label = i % 2 == 0 and "even" or "odd" } end
  return data.list(list)
end

---Lists a field of the first `count` records of the stream, by default of one epoch.
local function ids(records, count)
  local out = {}
  for i = 1, count or records:size() do out[i] = records:get(i - 1).id end
  return out
end

describe("records", function()
  it("holds any values that a table of names and lists can", function()
    local one = data.list { { a = 1, b = 2.5, c = "é", d = true, e = { 1, 2, data.null, "x" }, f = { g = { h = {} } } } }
    expect(one:size()):to_be(1)
    local r = one:get(0)
    expect({ r.a, r.b, r.c, r.d, r.e[1], r.e[4], #r.e }):to_equal { 1, 2.5, "é", true, 1, "x", 4 }
    expect(r.e[3] == data.null):to_be(true)
    expect(math.type(r.a)):to_be "integer"
    expect(next(r.f.g.h)):to_be(nil)
    expect(tostring(one)):to_be "records: 1"
  end)

  it("refuses other values by their path", function()
    expect(function() data.list { { a = { print } } } end):to_raise "record 1: 'a[1]' is a function"
    expect(function() data.list { {}, { a = { b = pl.ones { 2 } } } } end):to_raise "record 2: 'a.b' is a tensor"
    expect(function() data.list { { a = { 1, 2, x = 3 } } } end):to_raise "'a.x' is a key of a table that is also a list"
    expect(function() data.list(3) end):to_raise "give a list of tables"
  end)

  it("takes, skips, repeats, windows and joins datasets", function()
    local ten = numbers(10)
    expect(ids(ten:skip(2):take(3))):to_equal { 2, 3, 4 }
    expect(ids(ten:take(2):repeated(2))):to_equal { 0, 1, 0, 1 }
    expect(ids(ten:take(2):concat(ten:skip(8)))):to_equal { 0, 1, 8, 9 }
    expect(ids(ten:take(2):interleave(ten:skip(8)))):to_equal { 0, 8, 1, 9 }
    expect(ten:window(4):get(1).id):to_equal { 4, 5, 6, 7 }
    local zipped = ten:select("id"):zip(ten:select { "id" }:rename { id = "other" })
    expect(zipped:get(3)):to_equal { id = 3, other = 3 }
    expect(function() ten:zip(ten):get(0) end):to_raise "two of the datasets have the field 'id'"
    expect(function() ten:zip(ten:take(2)) end):to_raise "10 and 2 records"
    expect(function() ten:select("idd"):get(0) end):to_raise "did you mean 'id'?"
    expect(#ids(ten:sample(4, 1))):to_be(4)
    expect(ids(ten:unique "text")):to_equal { 0, 1, 2, 3, 4 }
    expect(ten:group("label"):get(1).key):to_be "odd"
    expect(ten:origins(3)[1].row):to_be(3)
  end)

  it("shuffles each epoch in another order, and each record is in it once", function()
    local shuffled = numbers(20):shuffle(3)
    local stream = ids(shuffled, 40)
    local first, second = table.move(stream, 1, 20, 1, {}), table.move(stream, 21, 40, 1, {})
    local function differ(a, b)
      for i = 1, #a do if a[i] ~= b[i] then return true end end
      return false
    end
    expect(differ(first, second)):to_be(true)
    table.sort(first)
    table.sort(second)
    expect(first):to_equal(second)
    expect(ids(numbers(20):shuffle(3), 40)):to_equal(stream)
  end)

  it("splits by content: parts are disjoint, and new records move none", function()
    local function parts(n)
      local all = numbers(n)
      local seen = {}
      for _, id in ipairs(ids(all:split("train", 0.8))) do seen[id] = "train" end
      for _, id in ipairs(ids(all:split("valid", 0.2))) do
        expect(seen[id]):to_be(nil)
        seen[id] = "valid"
      end
      return seen
    end
    local few, many = parts(100), parts(200)
    for i = 0, 99 do expect(many[i]):to_be(few[i]) end
    local train, valid = numbers(100):fold(2, 5)
    expect(train:size() + valid:size()):to_be(100)
    local held, others = numbers(100):holdout(0.1)
    expect(held:size() + others:size()):to_be(100)
  end)

  it("leaves out the records that another dataset has", function()
    local held = data.list { { id = 3.0, text = "xxx", label = "odd" }, { id = 4, text = "xxxx", label = "even" }, { id = 5, text = "", label = "even" } }
    -- The third differs in its label.
    expect(ids(numbers(7):without(held))):to_equal { 0, 1, 2, 5, 6 }
    expect(ids(numbers(7):without(held, "id"))):to_equal { 0, 1, 2, 6 }
    expect(ids(numbers(7):without(held:select("text"):shuffle(1), { "text" }))):to_equal { 1, 2, 6 }
    expect(ids(numbers(7):shuffle(2):without(held), 10)):to_equal(ids(numbers(7):without(held):shuffle(2), 10))
    expect(numbers(7):without(numbers(9)):size()):to_be(0)
    expect(numbers(7):without(numbers(9):filter(function() return false end)):size()):to_be(7)
    expect(function() numbers(7):without(held, "txt") end):to_raise "no record has a field 'txt'"
    expect(function() numbers(7):without(held, "txt") end):to_raise "did you mean 'text'?"
    expect(function() numbers(7):without(held:select { "text" }) end):to_raise "the records have the fields id, label, text, and the others text"
    expect(function() numbers(7):without(numbers(4):shuffle(1):take(2)) end):to_raise "needs the same records in every epoch"
    expect(function() numbers(7):without "valid" end):to_raise "give a dataset of records"
  end)

  it("mixes by weights", function()
    local mixed = data.mix({ a = numbers(30), b = numbers(7):map(function(r) return { id = r.id + 100 } end):cache() }, { a = 3, b = 1 })
    local far = 0
    for i = 0, 1023 do if mixed:get(i).id >= 100 then far = far + 1 end end
    expect(far):to_be(256)
    expect(function() data.mix({ a = numbers(3) }, { b = 1 }) end):to_raise "unknown option 'b'"
    expect(function() data.mix({ a = numbers(3), b = numbers(3) }, { a = 1 }) end):to_raise "b"
    expect(function() data.mix({ a = numbers(3) }, { a = -1 }) end):to_raise "'a': the weight is -1"
  end)
end)

describe("functions of records", function()
  it("run in workers, with copies of what they capture", function()
    local scale, words = 10, { even = 0, odd = 1 }
    local function double(x) return 2 * x end
    local mapped = numbers(300):map(function(r) return { id = double(r.id) * scale, word = words[r.label] } end)
    expect(mapped:get(7)):to_equal { id = 140, word = 1 }
    expect(#ids(mapped:filter(function(r) return r.word == 0 end))):to_be(150)
    local twice = numbers(5):flat_map(function(r)
      local out = {}
      for i = 1, r.id do out[i] = { id = r.id * 10 + i } end
      return out
    end)
    expect(ids(twice)):to_equal { 11, 21, 22, 31, 32, 33, 41, 42, 43, 44 }
    expect(ids(numbers(5):sort(function(r) return -r.id end))):to_equal { 4, 3, 2, 1, 0 }
    expect(ids(numbers(4):sort("id", { descending = true }))):to_equal { 3, 2, 1, 0 }
  end)

  it("are the same before and behind a shuffle", function()
    local function even(r) return r.id % 2 == 0 end
    local before, behind = numbers(40):filter(even):shuffle(2), numbers(40):shuffle(2):filter(even)
    expect(ids(before, 40)):to_equal(ids(behind, 40))
    expect(function() numbers(9):shuffle(1):take(3):filter(even) end):to_raise "needs the same records in every epoch"
  end)

  it("name the record and the line of an error", function()
    local broken = numbers(9):map(function(r) return { id = r.id + r.nothing } end)
    expect(function() broken:get(4) end):to_raise "list: record 4: "
    expect(function() broken:get(4) end):to_raise "records.lua"
    expect(function() numbers(3):map(function() return 3 end):get(0) end):to_raise "returns an integer"
    expect(function() numbers(3):filter(function(r) return r.text end) end):to_raise "return true or false"
  end)
end)

describe("batches of records", function()
  it("have a tensor for each field", function()
    local loader = data.list({ { x = { 1, 2 }, y = 3, ok = true, z = 0.5 }, { x = { 4, 5 }, y = 6, ok = false, z = 1 } }):batch(2)
    local batch, count = loader:batch_at(0)
    expect(count):to_be(2)
    expect(batch.x):to_equal { { 1, 2 }, { 4, 5 } }
    expect({ batch.x.dtype, batch.y.dtype, batch.ok.dtype, batch.z.dtype }):to_equal { "i64", "i64", "bool", "f32" }
    expect(batch.z):to_equal { 0.5, 1 }
  end)

  it("are the same wherever one begins to read", function()
    local loader = numbers(10):select("id"):shuffle(4):batch(3)
    local all = {}
    for k = 0, 9 do all[k + 1] = loader:batch_at(k).id:tolist() end
    local again = numbers(10):select("id"):shuffle(4):batch(3, { threads = 1 })
    for _, k in ipairs { 7, 2, 9, 0 } do expect(again:batch_at(k).id:tolist()):to_equal(all[k + 1]) end
  end)

  it("refuse what no tensor can hold", function()
    expect(function() numbers(4):batch(2) end):to_raise "'label' holds a string"
    local ragged = data.list { { x = { 1 } }, { x = { 1, 2 } } }
    expect(function() ragged:batch(2):batch_at(0) end):to_raise "pad it"
    expect(ragged:pad({ x = 3 }):batch(2):batch_at(0).x):to_equal { { 1, 0, 0 }, { 1, 2, 0 } }
    expect(function() ragged:pad({ x = 1 }):batch(2):batch_at(0) end):to_raise "is padded to 1"
    expect(function() ragged:pad { y = 1 }:batch(2) end):to_raise "no field 'y' to pad"
    expect(function() data.list({ { x = 1 }, { x = "a" } }):batch(2):batch_at(0) end):to_raise "list: record 1: 'x' holds a string"
  end)

  it("pack documents of token ids", function()
    local texts = {}
    for i = 1, 30 do texts[i] = { text = ("Alice "):rep(i % 6 + 1) } end
    local tok = data.bytes()
    local packed = data.list(texts):tokenize(tok):pack(48)
    local batch = packed:batch(4):batch_at(0)
    expect({ batch.x.dtype, batch.y.dtype, batch.documents.dtype }):to_equal { "i32", "i64", "i32" }
    expect(batch.x.shape):to_equal { 4, 48 }
    local x, y, documents = batch.x:tolist(), batch.y:tolist(), batch.documents:tolist()
    for i, row in ipairs(y) do
      for j, id in ipairs(row) do
        if id ~= -100 and j < #row then expect({ x[i][j + 1], documents[i][j + 1] }):to_equal { id, documents[i][j] } end
      end
    end
    expect(function() data.list(texts):tokenize(tok):pack(8) end):to_raise "a sequence holds 9"
    expect(function() data.list(texts):tokenize(tok, { end_with = "<|end|>" }) end):to_raise "a token of the vocabulary"
    expect(data.list(texts):bucket("text", 5, 1):size()):to_be(30)
  end)
end)

describe("conversations", function()
  it("are trained on answers alone, also when they are packed", function()
    local template = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}!{% endgeneration %}" ..
      "{% else %}{{ m.content }} {% endif %}{% endfor %}"
    local chats = data.list {
      { messages = { { role = "user", content = "2+2" }, { role = "assistant", content = "4" } } },
      { messages = { { role = "user", content = "20+2" }, { role = "assistant", content = "22" } } },
    }
    local tok = data.bytes()
    local packed = chats:chat(tok, { template = template }):pack(20)
    expect(packed:size()):to_be(1)
    local row, trained = packed:get(0), {}
    for i, id in ipairs(row.y) do
      if id ~= -100 then trained[#trained + 1] = id end
      if id ~= -100 and i < #row.x then expect(row.x[i + 1]):to_be(id) end
    end
    expect(tok:decode(trained)):to_be "22!4!"
  end)
end)

describe("formats of records", function()
  it("are read by column", function()
    local rows = data.parquet("files/rows.parquet", { columns = { "text", "id" } })
    expect(rows:size()):to_be(200)
    expect(rows:get(150).id):to_be(150)
    expect(rows:get(150).text:match "^row 150 "):to_be "row 150 "
    expect(rows:get(0).score):to_be(nil)
    expect(rows:select("id"):batch(3):batch_at(1).id:tolist()):to_equal { 3, 4, 5 }
    expect(data.arrow "files/words.arrow":get(11).word):to_be "y"
    expect(function() data.parquet("files/rows.parquet", { columns = { "txt" } }) end):to_raise "did you mean 'text'"
    expect(function() data.parquet("files/rows.parquet", { columns = {} }) end):to_raise "names nothing"
    expect(function() data.parquet("files/rows.parquet", { colums = { "id" } }) end):to_raise "columns"
    expect(function() data.arrow "files/rows.parquet" end):to_raise "no Arrow file or stream"
    expect(function() data.parquet "files/words.arrow" end):to_raise "PAR1"
  end)

  it("are read as tables", function()
    local reviews = data.table "files/reviews.csv"
    expect(reviews:get(0)):to_equal { id = 1, text = 'a, "b"\nc', stars = 2.5, zip = "007" }
    expect(reviews:get(1)):to_equal { id = 2, text = "", zip = "123" }
    expect(reviews:origins(1)[1].line):to_be(4)
    expect(data.table("files/reviews.csv", { types = { id = "string" }, columns = { "id" } }):get(0)):to_equal { id = "1" }
    expect(data.table "files/pair.tsv":get(0)):to_equal { a = 1, b = "x" }
    expect(data.table("files/reviews.csv"):size() + data.table("files/reviews2.csv.gz"):size()):to_be(4)
    expect(data.table({ "files/reviews.csv", "files/reviews2.csv.gz" }):get(2)):to_equal(reviews:get(0))
    expect(function() data.table("files/reviews.csv", { types = { zip = "int" } }) end):to_raise "integer"
    expect(function() data.table("files/reviews.csv", { types = { zap = "integer" } }) end):to_raise "did you mean 'zip'"
    expect(function() data.table("files/reviews.csv", { types = { text = "integer" } }) end):to_raise "files/reviews.csv:2: column 'text'"
    expect(function() data.table("files/reviews.csv", { delimiter = "ab" }) end):to_raise "one ASCII character"
    expect(function() data.table("files/reviews.csv", { on_error = "skipp" }) end):to_raise "skip"
    expect(data.table("files/reviews.csv", { types = { zip = "integer", stars = "integer" }, on_error = "skip" }):size()):to_be(1)
  end)

  it("are arrays of JSON", function()
    local train = data.json("files/tasks.json", { field = "train" })
    expect(train:size()):to_be(2)
    expect(train:get(1)):to_equal { q = { a = { 1, "]" } } }
    expect(data.json "files/list.json.gz":get(1)):to_equal { q = 2 }
    expect(function() data.json "files/tasks.json" end):to_raise "its arrays are 'train', 'test'"
    expect(data.json("files/tasks.json", { field = "train", on_error = "skip" }):size()):to_be(train:size())
    expect(function() data.json("files/tasks.json", { on_error = true }) end):to_raise "on_error"
    expect(function() data.json("files/tasks.json", { field = "trian" }) end):to_raise "did you mean 'train'"
    expect(function() data.json "files/sums.jsonl" end):to_raise "data.jsonl"
  end)

  it("may be compressed", function()
    local plain, packed = data.jsonl "files/sums.jsonl", data.jsonl "files/sums.jsonl.gz"
    expect(packed:size()):to_be(3)
    for i = 0, 2 do expect(packed:get(i)):to_equal(plain:get(i)) end
    expect(packed:origins(2)[1].line):to_be(4)
  end)

  it("are chosen by the endings of names", function()
    for path, count in pairs { ["sums.jsonl"] = 3, ["sums.jsonl.gz"] = 3, ["list.json.gz"] = 2, ["rows.parquet"] = 200, ["words.arrow"] = 15, ["reviews2.csv.gz"] = 2, ["pair.tsv"] = 1 } do
      expect(data.records("files/" .. path):size()):to_be(count)
    end
    expect(data.records("files/tasks.json", { field = "test" }):size()):to_be(0)
    expect(data.records({ "files/sums.jsonl", "files/sums.jsonl.gz" }, { on_error = "skip" }):size()):to_be(6)
    expect(function() data.records "files/out-1.npy" end):to_raise "names no format"
    expect(function() data.records { "files/sums.jsonl", "files/reviews.csv" } end):to_raise "different formats"
    expect(function() data.records("files/text.txt", { columns = { "text" } }) end):to_raise "columns"
  end)
end)

describe("files of records", function()
  it("are read by position", function()
    local records = data.jsonl "files/sums.jsonl"
    expect(records:size()):to_be(3)
    expect(records:get(1)):to_equal { question = "3+4=", answer = "7" }
    expect(records:origins(2)[1].line):to_be(4)
    expect(records:select("answer"):get(2)):to_equal { answer = "11" }
    expect(data.lines({ "files/text.txt" }):size() > 0):to_be(true)
    expect(data.jsonl "files/sums*.jsonl":size()):to_be(3)
    expect(function() data.jsonl "files/sum.jsonl" end):to_raise "sums.jsonl"
    expect(function() data.jsonl("files/sums.jsonl", { on_error = "skipp" }) end):to_raise "skip"
    expect(function() data.jsonl "files/text.txt":get(0) end):to_raise "files/text.txt:1: column"
  end)
end)
