-- Tests datasets: CSV, texts, tensors, PNG, splits, sample order, batches; saving and loading.

local pl = require "perilune"
local data = pl.data
local t = require "support"
local describe, it, expect = t.describe, t.it, t.expect

describe("csv", function()
  it("reads columns by name and number", function()
    local rows = data.csv "files/cars.csv"
    expect({ rows:size() }):to_equal { 4, 4 }
    expect(rows:names()):to_equal { "name", "weight", "power", "mpg" }
    local set = rows:tensors { x = { columns = { "power", "weight" }, scale = 0.01 }, y = { column = 1 } }
    expect(set.columns.x):to_be_near { { 1.3, 35.04 }, { 1.65, 26.93 }, { 1.5, 34.36 }, { 0.95, 29 } }
    expect(set.columns.y):to_equal { 3504, 2693, 3436, 2900 }
    expect(set.columns.y.dtype):to_be "f32"
    expect(rows:tensors({ x = { columns = { 1, 3 }, dtype = "i64" } }).columns.x[1]):to_equal { 2693, 165 }
  end)

  it("gives words ids in sorted order, or in a given one", function()
    local rows = data.csv "files/cars.csv"
    expect(rows:words "name"):to_equal { "audi", "bmw", "ford" }
    expect(rows:words "power"):to_be(nil)
    expect(rows:tensors({ y = { column = "name", labels = true } }).columns.y):to_equal { 2, 1, 2, 0 }
    expect(rows:tensors({ y = { column = 0, labels = { "ford", "bmw", "audi" } } }).columns.y):to_equal { 0, 1, 0, 2 }
  end)

  it("refuses empty cells unless told what they are", function()
    expect(function() data.csv("files/cars.csv"):tensors { y = { column = "mpg" } } end):to_raise "files/cars.csv:4"
    local rows = data.csv("files/cars.csv", { missing = -1 })
    expect(rows:tensors({ y = { column = "mpg" } }).columns.y):to_equal { 18, 15.5, -1, 26 }
  end)

  it("takes other delimiters and comments", function()
    local rows = data.csv("files/plain.csv", { delimiter = " ", comment = "#" })
    expect(rows:tensors({ x = { columns = { 0, 3 } } }).columns.x):to_equal { { 0, 1, 2 }, { 3, 4, 5 } }
    expect(function() data.csv("files/semicolons.csv", { delimiter = ";" }):tensors { x = { column = 1 } } end):to_raise "decimal point"
  end)
end)

local function rows_of(set, size)
  local out, loader = {}, set:batch(size)
  for k = 0, loader:batches() - 1 do
    for _, v in ipairs(loader:batch_at(k).x:tolist()) do out[#out + 1] = v end
  end
  return out
end

describe("sets", function()
  local set = data.tensors { x = pl.arange(100), y = pl.arange(100) * 2 }

  it("split into parts that do not overlap and cover all", function()
    local seen = {}
    for _, part in ipairs { set:split("train", 0.7, 3), set:split("valid", 0.2, 3), set:split("test", 0.1, 3) } do
      for _, v in ipairs(rows_of(part, 8)) do
        expect(seen[v]):to_be(nil)
        seen[v] = true
      end
    end
    for v = 0, 99 do expect(seen[v]):to_be(true) end
  end)

  it("give the same part for the same seed, and another for another", function()
    local fresh = data.tensors { x = pl.arange(100) }
    local again = rows_of(fresh:split("train", 0.7, 3), 10)
    expect(rows_of(data.tensors({ x = pl.arange(100) }):split("train", 0.7, 3), 10)):to_equal(again)
    local other = rows_of(data.tensors({ x = pl.arange(100) }):split("train", 0.7, 4), 10)
    expect(pl.tensor(other):eq(pl.tensor(again)):all():item()):to_be(false)
  end)

  it("keep columns together", function()
    local batch = set:shuffle(1):batch(16):batch_at(3)
    expect(batch.y):to_equal((batch.x * 2):tolist())
  end)

  it("shuffle each epoch anew, and every sample comes once an epoch", function()
    local loader = set:shuffle(7):batch(25)
    local epochs = {}
    for epoch = 0, 1 do
      local seen = {}
      for k = 0, 3 do
        for _, v in ipairs(loader:batch_at(epoch * 4 + k).x:tolist()) do seen[#seen + 1] = v end
      end
      epochs[epoch] = seen
      local sorted = table.move(seen, 1, 100, 1, {})
      table.sort(sorted)
      expect(sorted):to_equal(pl.arange(100):tolist())
    end
    expect(pl.tensor(epochs[0]):eq(pl.tensor(epochs[1])):all():item()):to_be(false)
  end)

  it("give batch k from k alone", function()
    local loader = set:shuffle(7):batch(30)
    local third = loader:batch_at(3).x:tolist()
    for k = 0, 9 do loader:batch_at(k) end
    expect(loader:batch_at(3).x):to_equal(third)
    expect(set:shuffle(7):batch(30):batch_at(3).x):to_equal(third)
  end)

  it("hold no sample twice", function()
    expect(function() set:shuffle(1):batch(101) end):to_raise "a batch of 101 would repeat samples: there are only 100"
    expect(set:batch(101):batches()):to_be(1)
  end)

  it("have a smaller last batch in order, equal ones shuffled, none left with drop_last", function()
    expect(set:batch(30):batches()):to_be(4)
    local batch, count = set:batch(30):batch_at(3)
    expect({ batch.x:size(0), count }):to_equal { 10, 10 }
    expect(set:shuffle(1):batch(30):batch_at(3).x:size(0)):to_be(30)
    expect(set:batch(30, { drop_last = true }):batches()):to_be(3)
    expect(set:batch(30, { drop_last = true }):samples()):to_be(90)
  end)

  it("map batches", function()
    local mapped = set:map(function(batch) return { x = batch.x + 1000 } end)
    expect(mapped:batch(4):batch_at(0).x):to_equal { 1000, 1001, 1002, 1003 }
    expect(set:batch(4):batch_at(0).x):to_equal { 0, 1, 2, 3 }
  end)
end)

describe("text", function()
  local text = data.text "files/text.txt"

  it("numbers characters in sorted order, and reads back", function()
    local vocab = text.vocab
    local ids = vocab:encode "ab\n"
    expect(ids.dtype):to_be "i64"
    expect(vocab:decode(ids)):to_be "ab\n"
    expect(vocab:decode(vocab:encode("é"):tolist())):to_be "é"
    expect(vocab:encode("\n"):tolist()[1]):to_be(0)
  end)

  it("makes windows whose y is one token further", function()
    local batch = text:windows({ length = 8, batch = 4, seed = 2 }):batch_at(5)
    expect(batch.x.shape):to_equal { 4, 8 }
    expect(batch.x[{ {}, { 1, 8 } }]):to_equal(batch.y[{ {}, { 0, 7 } }]:tolist())
  end)

  it("covers a part once in order", function()
    local part = text:split("valid", 0.25)
    local loader = part:windows { length = 5, batch = 3 }
    local seen = {}
    for k = 0, loader:batches() - 1 do
      for _, row in ipairs(loader:batch_at(k).x:tolist()) do
        for _, id in ipairs(row) do seen[#seen + 1] = id end
      end
    end
    expect(seen):to_equal(text.tokens[{ { part.low, part.low + #seen } }]:tolist())
    expect(#seen):to_be((part:size() - 1) // 5 * 5)
  end)

  it("splits without overlap", function()
    local fresh = data.text "files/text.txt"
    local train, valid = fresh:split("train", 0.9), fresh:split("valid", 0.1)
    expect({ train.low, train.high }):to_equal { 0, valid.low }
    expect(valid.high):to_be(fresh:size())
  end)
end)

describe("token files", function()
  pl.save("lua/files/out-1.npy", pl.arange(40):to("i32"))
  pl.save("lua/files/out-2.npy", (pl.arange(25) + 40):to("i64"))
  pl.save("lua/files/out-3.npy", (pl.arange(7) + 65):to("u8"))
  local all = data.token_files "files/out-?.npy"

  it("are one text, in the order of their names", function()
    expect(all:size()):to_be(72)
    expect(all.tokens):to_equal(pl.arange(72):tolist())
    expect(all:ids(38, 4)):to_equal { 38, 39, 40, 41 }
    expect(data.token_files({ "files/out-3.npy", "files/out-1.npy" }):ids(5, 4)):to_equal { 70, 71, 0, 1 }
    expect(data.token_files("files/out-1.npy"):size()):to_be(40)
  end)

  it("give the windows that a tensor of the same ids gives", function()
    local same = data.sequence(pl.arange(72))
    for _, name in ipairs { "train", "valid" } do
      local a, b = all:split(name, 0.5), same:split(name, 0.5)
      for _, o in ipairs { { length = 5, batch = 3, seed = 4 }, { length = 5, batch = 3 } } do
        local x, y = a:windows(o), b:windows(o)
        expect(x:batches()):to_be(y:batches())
        for _, k in ipairs { 0, 1, 2, 1, 7 } do
          local one, two = x:batch_at(k), y:batch_at(k)
          expect(one.x):to_equal(two.x:tolist())
          expect(one.y):to_equal(two.y:tolist())
          expect({ x:ids_at(k) }):to_equal { y:ids_at(k) }
        end
      end
    end
  end)

  it("name the path, the pattern and the range that are wrong", function()
    expect(function() data.token_files "files/none-*.bin" end):to_raise 'no file of the folder "files" matches "none-*.bin"'
    expect(function() data.token_files "files/out-4.npy" end):to_raise "did you mean"
    expect(function() data.token_files "f*/part-1.npy" end):to_raise "in the name of a folder"
    expect(function() data.token_files {} end):to_raise "name a file, a pattern"
    expect(function() data.token_files { 3 } end):to_raise "a path is 3"
    expect(function() data.token_files "files/cars.csv" end):to_raise "token files end in .bin or .npy"
    expect(function() all:ids(70, 3) end):to_raise "are not in a text of 72"
    expect(function() all:windows { length = 72, batch = 1 } end):to_raise "do not fit into 72 tokens"
  end)
end)

-- Files are written to files/ in this folder and overwritten in every run.
describe("saving and loading", function()
  local made = {
    f32 = pl.randn { 2, 3 }, f64 = pl.randn({ 2 }, { dtype = "f64" }), i64 = pl.tensor { 1, -2, 1 << 40 },
    u8 = pl.tensor({ 0, 255 }, { dtype = "u8" }), bool = pl.tensor { true, false }, scalar = pl.tensor(2.5), empty = pl.zeros { 0, 3 },
    view = pl.arange(6):reshape(2, 3):transpose(0, 1),
  }

  local function same(back, name)
    expect(back.dtype):to_be(made[name].dtype)
    expect(back.shape):to_equal(made[name].shape)
    expect(back):to_equal(made[name]:tolist())
  end

  it("safetensors", function()
    local all = { bf16 = pl.tensor({ 1.5, -3 }, { dtype = "bf16" }), f16 = pl.tensor({ 0.1 }, { dtype = "f16" }) }
    for name, x in pairs(made) do all[name] = x end
    pl.save("lua/files/out.safetensors", all)
    local back = pl.load "files/out.safetensors"
    for name in pairs(made) do same(back[name], name) end
    expect(back.bf16):to_equal { 1.5, -3 }
    expect(back.f16.dtype):to_be "f16"
  end)

  it("npz and npy", function()
    pl.save("lua/files/out.npz", made)
    local back = pl.load "files/out.npz"
    for name in pairs(made) do same(back[name], name) end
    pl.save("lua/files/out.npy", made.view)
    same(pl.load "files/out.npy", "view")
  end)

  it("states of a model by their paths", function()
    local nn = pl.nn
    local a, b = nn.Linear(3, 2), nn.Linear(3, 2)
    local states = {}
    for _, e in ipairs(a:states()) do states[e.path] = e.state end
    pl.save("lua/files/model.safetensors", states)
    local loaded = pl.load "files/model.safetensors"
    for _, e in ipairs(b:states()) do e.state:assign(loaded[e.path]) end
    expect(b.weight):to_equal(a.weight:tolist())
  end)

  it("images", function()
    local x = pl.rand { 3, 4, 5 }
    data.save_png("lua/files/out.png", x)
    local back = data.png "files/out.png"
    expect(back.shape):to_equal { 3, 4, 5 }
    expect(back):to_be_near(x:tolist(), 0.5 / 255 + 1e-6)
    data.save_png("lua/files/out.png", pl.eye(4))
    expect(data.png "files/out.png"):to_be_near({ pl.eye(4):tolist() }, 1e-6)
  end)
end)
