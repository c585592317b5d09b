-- Tests functions of records in workers: what they capture, the order of what they see, and errors. runtime/lua/src/workers tests limits.

local pl = require "perilune"
local data = pl.data
local t = require "support"
local describe, it, expect = t.describe, t.it, t.expect

local function numbers(n)
  local list = {}
  for i = 0, n - 1 do list[i + 1] = { id = i, text = ("word"):rep(i % 3, " ") } end
  return data.list(list)
end

describe("what a function captures", function()
  it("is copied, once for each worker", function()
    local calls, table_of = 0, { offset = 100, nested = { { 1, 2 }, "three" } }
    local function shifted(x) return x + table_of.offset end
    local mapped = numbers(20):map(function(r)
      calls = calls + 1
      return { id = shifted(r.id), third = table_of.nested[2], pair = table_of.nested[1] }
    end)
    table_of.offset = 0
    expect(mapped:get(5)):to_equal { id = 105, third = "three", pair = { 1, 2 } }
    expect(calls):to_be(0)
  end)

  it("may be libraries, params, modules and tokenizers", function()
    local format, words, tok = string.format, require "support", data.bytes()
    local mapped = numbers(3):map(function(r) return { text = format("%02d", r.id), ids = tok:encode(r.text) } end)
    expect(mapped:get(2).text):to_be "02"
    expect(#mapped:get(2).ids):to_be(9)
    -- A worker loads the module anew.
    expect(t.passed > 0):to_be(true)
    expect(numbers(3):map(function() return { n = words.passed } end):get(0).n):to_be(0)
  end)

  it("is refused by name if it belongs to the recipe's state", function()
    local state, x = pl.state(pl.ones { 2 }), pl.ones { 2 }
    local cache = { model = { weight = state } }
    local function refused(fn, message)
      expect(function() numbers(3):map(fn) end):to_raise(message)
      expect(function() numbers(3):filter(fn) end):to_raise(message)
    end
    refused(function() return cache.model end, "upvalue 'cache.model.weight' is a State; use it after :batch")
    refused(function() return x end, "upvalue 'x' is a tensor; use it after :batch")
    local records = numbers(2)
    refused(function() return records end, "upvalue 'records' is a table with a metatable")
    local wrapped = coroutine.wrap(print)
    refused(function() return wrapped end, "upvalue 'wrapped' is a function of the runtime")
    expect(function() numbers(3):map(function() return x end) end):to_raise "workers.lua:"
  end)
end)

describe("the results of functions", function()
  it("are the same in any order and any number of workers", function()
    local function build(threads)
      local records = numbers(200):map(function(r)
        local fields = { zeta = r.id, alpha = 1, beta = 2, gamma = 3 }
        local seen = {}
        for name in pairs(fields) do seen[#seen + 1] = name end
        return { id = r.id, code = #table.concat(seen, " ") + (seen[1] == "alpha" and 1000 or 0), draw = math.random(1000) }
      end, { seed = 5 }):shuffle(2)
      return records, records:batch(16, { threads = threads })
    end
    local records, loader = build(1)
    local batches = {}
    for k = 0, 19 do
      local batch = loader:batch_at(k)
      batches[k] = { batch.id:tolist(), batch.code:tolist(), batch.draw:tolist() }
      expect(batches[k][2][1]):to_be(1021)
    end
    for _, threads in ipairs { 2, 7, 16 } do
      local _, other = build(threads)
      for k = 19, 0, -1 do
        local batch = other:batch_at(k)
        expect({ batch.id:tolist(), batch.code:tolist(), batch.draw:tolist() }):to_equal(batches[k])
      end
    end
    expect(records:get(33).id):to_be(batches[2][1][2])
    expect(records:get(33).draw):to_be(batches[2][3][2])
  end)

  it("have random numbers of the seed", function()
    local function draws(seed)
      local drawn = {}
      local mapped = numbers(50):map(function() return { x = math.random() } end, { seed = seed })
      for i = 1, 50 do drawn[i] = mapped:get(i - 1).x end
      return drawn
    end
    expect(draws(1)):to_equal(draws(1))
    expect(draws(1)[1] ~= draws(2)[1]):to_be(true)
    expect(function() numbers(3):map(print, { sead = 1 }) end):to_raise "Did you mean 'seed'?"
  end)

  it("may not depend on other records", function()
    local count = 0
    local function counted(r)
      count = count + 1
      return { id = r.id + count }
    end
    expect(function() numbers(30):map(counted):batch(4) end):to_raise "record 0 (list: record 0): the results in two workers differ"
    expect(function() numbers(30):flat_map(function(r) return { counted(r) } end) end):to_raise "the results in two workers differ"
    expect(function() numbers(30):sort(function() return tostring {} end) end):to_raise "the results in two workers differ"
    expect(numbers(30):map(function(r) return { id = r.id * 2 } end):batch(4):batch_at(1).id):to_equal { 8, 10, 12, 14 }
  end)
end)

describe("data.generate", function()
  local function make(n, seed)
    local scale = 10
    return data.generate(n, function(i) return { id = i, x = scale * i, draw = math.random(1000000) } end, { seed = seed })
  end

  it("makes each record of its number, the same in each epoch and for any number of workers", function()
    local made = make(50, 3)
    expect(made:size()):to_be(50)
    expect(made:get(7).x):to_be(70)
    expect(made:get(57)):to_equal(made:get(7))
    expect(made:get(7).draw ~= made:get(8).draw):to_be(true)
    expect(make(50, 3):get(9)):to_equal(made:get(9))
    expect(make(50, 4):get(9).draw ~= made:get(9).draw):to_be(true)
    -- More records change none of the first ones.
    expect(make(500, 3):get(9)):to_equal(made:get(9))
    local want = {}
    for k = 0, 9 do want[k] = make(50, 3):shuffle(1):batch(16, { threads = 1 }):batch_at(k).draw:tolist() end
    for _, threads in ipairs { 2, 7 } do
      local loader = make(50, 3):shuffle(1):batch(16, { threads = threads })
      for k = 9, 0, -1 do expect(loader:batch_at(k).draw:tolist()):to_equal(want[k]) end
    end
  end)

  it("names the line of the function and the number of the record", function()
    local origin = make(5):filter(function(r) return r.id > 1 end):origins(1)[1]
    expect(origin.row):to_be(3)
    expect(origin.file):to_contain "data.generate at "
    expect(origin.file):to_contain "workers.lua:"
    local broken = data.generate(9, function(i) return { x = i > 3 and nil + 1 or i } end)
    expect(broken:get(3).x):to_be(3)
    expect(function() broken:get(4) end):to_raise "record 4: "
    expect(function() data.generate(9, function() return 3 end):get(2) end):to_raise "record 2: the function returns an integer"
  end)

  it("refuses what it cannot make, and functions of more than the number", function()
    local state, count = pl.state(pl.ones { 2 }), 0
    expect(function() data.generate(0, function() return {} end) end):to_raise "n is 0, but must be a whole number of at least 1"
    expect(function() data.generate(3, "x") end):to_raise "give function(i)"
    expect(function() data.generate(3, function() return {} end, { sed = 1 }) end):to_raise "Did you mean 'seed'?"
    expect(function() data.generate(3, function() return { x = state } end) end):to_raise "upvalue 'state' is a State"
    local counted = data.generate(30, function(i)
      count = count + 1
      return { x = i + count }
    end)
    expect(function() counted:batch(4) end):to_raise "the results in two workers differ"
  end)
end)

describe("errors of functions", function()
  it("name the record, its origin and the line", function()
    local broken = numbers(40):map(function(r)
      if r.id == 20 then return { id = r.missing.field } end
      return { id = r.id }
    end)
    for _, fails in ipairs { function() broken:get(20) end, function() broken:batch(8):batch_at(2) end } do
      expect(fails):to_raise "list: record 20: records:map at "
      expect(fails):to_raise "attempt to index a nil value (field 'missing')"
    end
    expect(broken:get(19).id):to_be(19)
    expect(function() numbers(5):map(function() print "here" end):get(0) end):to_raise "a function of a pipeline prints nothing"
    expect(function() numbers(5):map(function() return { f = function() end } end):get(0) end):to_raise "'f' is a function"
  end)

  it("do not hide what a worker lacks", function()
    expect(function() numbers(3):map(function() return { t = pl.clock() } end):get(0) end):to_raise "pl.clock: a function of a pipeline"
    expect(function() numbers(3):map(function() return { t = undefined_name } end):get(0) end):to_raise "not defined in a worker" -- luacheck: ignore
    expect(function() numbers(3):map(math.floor) end):to_raise "not written in Lua"
  end)
end)

describe("augmentation of records", function()
  local noise = pl.augment.text
  local function texts(n)
    local list = {}
    for i = 0, n - 1 do list[i + 1] = { id = i, text = "one two three four five six seven eight" } end
    return data.list(list)
  end
  local function varied(r, draw) return { id = r.id, text = noise.delete(r.text, draw, 0.3) } end
  ---The texts of the records of an epoch by their ids, and those of each that are rewritten.
  local function epoch(records, visit)
    local out, rewritten = {}, 0
    for i = 0, records:size() - 1 do
      local index = visit * records:size() + i
      local r = records:get(index)
      out[r.id] = (out[r.id] or "") .. "|" .. r.text
      if records:origins(index)[1].rewritten then rewritten = rewritten + 1 end
    end
    return out, rewritten
  end

  it("draws from seed, record and epoch, whatever the order and the workers", function()
    local plain, mixed = texts(50):augment(varied, { seed = 1 }), texts(50):augment(varied, { seed = 1 }):shuffle(9)
    local behind = texts(50):shuffle(9):augment(varied, { seed = 1 })
    local first, count = epoch(plain, 0)
    expect(count):to_be(50)
    for visit = 0, 2 do
      expect(epoch(mixed, visit)):to_equal(epoch(plain, visit))
      expect(epoch(behind, visit)):to_equal(epoch(plain, visit))
    end
    local again, other = 0, 0
    local second, seeded = epoch(plain, 1), epoch(texts(50):augment(varied, { seed = 2 }), 0)
    for id, text in pairs(first) do
      if second[id] == text then again = again + 1 end
      if seeded[id] == text then other = other + 1 end
    end
    expect(again < 10 and other < 10):to_be(true)
    local function loaded(threads)
      local lengths = texts(50):augment(varied, { seed = 1 }):shuffle(9):map(function(r) return { id = r.id, n = #r.text } end)
      return lengths:batch(8, { threads = threads })
    end
    local one, many = loaded(1), loaded(7)
    for k = 12, 0, -1 do
      local a, b = one:batch_at(k), many:batch_at(k)
      expect({ a.id:tolist(), a.n:tolist() }):to_equal { b.id:tolist(), b.n:tolist() }
    end
  end)

  it("keeps originals by a probability, other ones in each epoch", function()
    local kept = texts(400):augment(varied, { seed = 3, keep = 0.25 })
    local _, rewritten = epoch(kept, 0)
    -- Binomial of 400 and 0.75: 4.5 standard deviations.
    expect(math.abs(rewritten - 300) < 39):to_be(true)
    local differ = 0
    for i = 0, 399 do
      local original = kept:origins(i)[1].rewritten == nil
      if original then expect(kept:get(i).text):to_be(texts(1):get(0).text) end
      if original ~= (kept:origins(400 + i)[1].rewritten == nil) then differ = differ + 1 end
    end
    expect(differ > 80):to_be(true)
    expect(select(2, epoch(texts(20):augment(varied, { keep = 1 }), 0))):to_be(0)
  end)

  it("adds copies behind their original", function()
    local copied = texts(10):augment(varied, { seed = 1, copies = 2 })
    expect(copied:size()):to_be(30)
    local _, rewritten = epoch(copied, 0)
    expect(rewritten):to_be(20)
    for i = 0, 29 do
      local origin = copied:origins(i)[1]
      expect({ origin.file, origin.row, origin.rewritten == nil }):to_equal { "list", i // 3, i % 3 == 0 }
      if i % 3 == 0 then expect(copied:get(i).text):to_be(texts(1):get(0).text) end
    end
    expect(copied:get(1).text ~= copied:get(2).text or copied:get(4).text ~= copied:get(5).text):to_be(true)
    expect(epoch(texts(10):augment(varied, { seed = 1, copies = 2 }):shuffle(4), 1) ~= nil):to_be(true)
    local from = data.jsonl("../../recipes/data/sums.jsonl"):augment(function(r, draw) r.question = noise.noise(r.question, draw, 0.2); return r end, { copies = 1 })
    local origin = from:origins(7)[1]
    expect({ origin.row, origin.line, origin.rewritten }):to_equal { 3, 4, true }
  end)

  it("refuses what it cannot repeat", function()
    local mixed = data.mix({ a = texts(5), b = texts(5) }, { a = 1, b = 1 })
    expect(function() mixed:augment(varied) end):to_raise "augment the datasets before they are mixed"
    expect(function() texts(5):augment(varied):split("train", 0.5) end):to_raise "call split before the stages that mix, augment"
    expect(function() texts(5):augment(varied, { keep = 0.5, copies = 1 }) end):to_raise "'keep' and 'copies' are both given"
    expect(function() texts(5):augment(varied, { keep = 1.5 }) end):to_raise "keep is 1.5"
    expect(function() texts(5):augment(varied, { copies = 0 }) end):to_raise "copies is 0"
    expect(function() texts(5):augment(varied, { kep = 0.5 }) end):to_raise "keep"
    expect(function() texts(5):augment("text") end):to_raise "the function is 'text'"
    local broken = texts(5):augment(function(r) return r.text end)
    expect(function() broken:get(2) end):to_raise "list: record 2 (rewritten): the function of augment at lua/workers.lua"
    local count = 0
    local counted = texts(30):augment(function(r) count = count + 1; return { id = r.id + count } end)
    expect(function() counted:batch(4) end):to_raise "the results in two workers differ"
  end)
end)

describe("rewrites by a model", function()
  -- A "model" that gives for each text the word whose embedding its length has.
  local words = { "down", "the", "rabbit", "hole" }
  local model = pl.nn.Embedding(8, #words)
  local function list(n)
    local all = {}
    for i = 1, n do all[i] = { id = i, text = ("x"):rep(i % 5 + 1) } end
    return data.list(all)
  end
  local calls = 0
  local function continued(records)
    calls = calls + 1
    local ids = {}
    for k, r in ipairs(records) do ids[k] = #r.text end
    local best = model(pl.tensor(ids, { dtype = "i64" })):argmax(1):tolist()
    local out = {}
    for k, r in ipairs(records) do out[k] = { id = r.id, text = r.text .. " " .. words[best[k] + 1] } end
    return out
  end

  it("stand behind the records that they are made of", function()
    calls = 0
    local set = list(10):rewrite(continued, { batch = 4 })
    expect(set:size()):to_be(20)
    expect(calls):to_be(3)
    local weight = model.weight:tolist()
    for i = 0, 9 do
      local original, rewrite = set:get(2 * i), set:get(2 * i + 1)
      expect({ original.id, rewrite.id }):to_equal { i + 1, i + 1 }
      local row, best = weight[#original.text + 1], 1
      for k = 2, #row do if row[k] > row[best] then best = k end end
      expect(rewrite.text):to_be(original.text .. " " .. words[best])
      expect(set:origins(2 * i)[1].rewritten):to_be(nil)
      expect(set:origins(2 * i + 1)[1]):to_equal { file = "list", row = i, rewritten = true }
      -- All epochs have the same.
      expect(set:get(20 + 2 * i + 1).text):to_be(rewrite.text)
    end
    expect(calls):to_be(3)
  end)

  it("may be several, none, or in place of a record", function()
    local function some(records)
      local out = {}
      for k, r in ipairs(records) do
        out[k] = r.id % 3 == 0 and { { id = r.id, text = "a" }, { id = r.id, text = "b" } } or r.id % 3 == 1 and { id = r.id, text = "c" } or false
      end
      return out
    end
    local function texts(set)
      local out = {}
      for r in set:rows() do out[#out + 1] = r.id .. r.text end
      return table.concat(out, " ")
    end
    expect(texts(list(4):rewrite(some))):to_be "1xx 1c 2xxx 3xxxx 3a 3b 4xxxxx 4c"
    expect(texts(list(4):rewrite(some, { original = "replace", batch = 3 }))):to_be "1c 2xxx 3a 3b 4c"
    expect(texts(list(3):rewrite(function() return { false, {}, nil } end))):to_be "1xx 2xxx 3xxxx"
    expect(list(1):rewrite(function() return { {} } end):size()):to_be(1)
  end)

  it("are applied beneath a shuffle", function()
    local before, behind = list(12):rewrite(continued):shuffle(3), list(12):shuffle(3):rewrite(continued)
    for i = 0, 47 do expect(behind:get(i)):to_equal(before:get(i)) end
  end)

  it("name what is wrong", function()
    expect(function() list(3):rewrite(function() return 7 end) end):to_raise "the function returned 7 for 3 records"
    expect(function() list(3):rewrite(function() return { false, false, false, {} } end) end):to_raise "more than 3 entries for 3 records"
    expect(function() list(3):rewrite(function() return { false, "x" } end) end):to_raise "the function gave 'x' for record 1"
    expect(function() list(3):rewrite(function() return { { text = print } } end) end):to_raise "a rewrite of list: record 0"
    expect(function() list(3):rewrite("text") end):to_raise "the function is 'text'"
    expect(function() list(3):rewrite(continued, { batch = 0 }) end):to_raise "batch"
    expect(function() list(3):rewrite(continued, { original = "drop" }) end):to_raise "original"
    expect(function() list(3):augment(function(r) return r end):rewrite(continued) end):to_raise "call rewrite before the stages that mix, augment"
  end)
end)

describe("augmentation of texts", function()
  local text, draw = pl.augment.text, math.random
  local line = "the quick brown fox jumps over the lazy dog"
  local function sorted(value)
    local words = {}
    for word in value:gmatch "%S+" do words[#words + 1] = word end
    table.sort(words)
    return table.concat(words, " ")
  end

  it("deletes words and keeps one", function()
    expect(text.delete(line, draw, 0)):to_be(line)
    local one = text.delete(line, draw, 1)
    expect(one:match "^%S+$"):to_be(one)
    local left = 0
    for _ = 1, 2000 do
      for _ in text.delete(line, draw, 0.2):gmatch "%S+" do left = left + 1 end
    end
    -- 18,000 words, of which four fifths stay: 5 standard deviations.
    expect(math.abs(left - 14400) < 270):to_be(true)
    expect(text.delete("  ", draw, 0.5)):to_be ""
  end)

  it("swaps words", function()
    expect(text.swap(line, draw, 0)):to_be(line)
    for _ = 1, 50 do
      local swapped = text.swap(line, draw, 1)
      expect(sorted(swapped)):to_be(sorted(line))
      local at, moved = 0, 0
      local words = {}
      for word in line:gmatch "%S+" do words[#words + 1] = word end
      for word in swapped:gmatch "%S+" do
        at = at + 1
        if words[at] ~= word then moved = moved + 1 end
      end
      -- "the" is there twice.
      expect(moved == 2 or moved == 0):to_be(true)
    end
    expect(text.swap("alone", draw)):to_be "alone"
  end)

  it("changes characters, and no part of one", function()
    expect(text.noise("naïve 漢字", draw, 0)):to_be "naïve 漢字"
    local changed = 0
    for _ = 1, 400 do
      local made = text.noise("naïve 漢字 🙂 x", draw, 0.5)
      expect(utf8.len(made) ~= nil):to_be(true)
      if made ~= "naïve 漢字 🙂 x" then changed = changed + 1 end
      expect(select(2, made:gsub(" ", ""))):to_be(3)
    end
    expect(changed > 380):to_be(true)
  end)

  it("names wrong arguments", function()
    expect(function() text.delete(7, draw, 0.1) end):to_raise "augment.text.delete: the text is a number"
    expect(function() text.swap("a b", 7) end):to_raise "draw is a number"
    expect(function() text.noise("a b", draw, 2) end):to_raise "the probability is 2"
    expect(function() text.swap("a b", draw, 0.5) end):to_raise "n is 0.5"
    expect(function() text.noise("\xff", draw, 0.5) end):to_raise "no UTF-8"
    expect(function() numbers(3):map(function(r) return { t = text.delete(r.id, math.random, 0.5) } end):get(0) end):to_raise "the text is a number"
    expect(function() numbers(3):map(function() return { t = pl.augment.crop() } end):get(0) end):to_raise "pl.augment.crop: a function of a pipeline"
  end)
end)
