-- Tries to take more memory than the limit. The harness is repl/tests/attacks.rs: each block is a script of its own.

--# string_rep: make a string larger than memory
--# expect: error
local s = ("x"):rep(1 << 40)

--# string_rep_wraps: overflow the size of a string
--# expect: error
local s = ("xy"):rep(math.maxinteger)

--# string_doubling: double a string forever
--# expect: error
local s = "x"
while true do s = s .. s end

--# string_growing: keep every string
--# expect: error
local t = {}
while true do t[#t + 1] = ("x"):rep(1 << 20) .. #t end

--# table_growing: grow a table forever
--# expect: error
local t = {}
for i = 1, math.huge do t[i] = i end

--# table_hash: grow a hash forever
--# expect: stops
local t, i = {}, 0
while true do i = i + 1; t["k" .. i] = i end

--# table_concat: concatenate a large table
--# expect: error
local t = {}
for i = 1, 64 do t[i] = ("x"):rep(1 << 24) end
local s = table.concat(t)

--# table_pack: fill the stack
--# expect: error
print(select("#", table.unpack({}, 1, 1e8)))

--# table_move: move past the end of memory
--# expect: stops
print(#table.move({ 1 }, 1, 1 << 40, 2))

--# string_format_width: pad a number to a great width
--# expect: error
print(#("%" .. ("9"):rep(20) .. "d"):format(1))

--# gsub_growing: grow a string by replacement
--# expect: error
local s = "x"
for _ = 1, 60 do s = s:gsub(".", "%0%0%0%0") end

--# string_pack: pack a string of great alignment
--# expect: any
print(#string.pack("!16 " .. ("xXi16"):rep(1 << 20) .. "s8", ("x"):rep(1 << 20)))

--# load_generator: feed the parser forever
--# expect: error
load(function() return "x = 1;" end)

--# load_text: parse a chunk of many constants
--# expect: error
load("return {" .. ("1.5,"):rep(1 << 26) .. "}")()

--# closures: keep every closure
--# expect: error
local t = {}
while true do local u = {}; t[#t + 1] = function() return u end end

--# coroutines: keep every coroutine
--# expect: error
local t = {}
while true do local c = coroutine.create(function() coroutine.yield() end); coroutine.resume(c); t[#t + 1] = c end

--# caught: catch the error and go on
--# expect: error
local t = {}
local function grow() while true do t[#t + 1] = ("x"):rep(1 << 20) .. #t end end
for _ = 1, 20 do print(pcall(grow)) end
grow()

--# no_collector: stop the collector
--# expect: error
collectgarbage("stop")
while true do local s = ("x"):rep(1 << 20) end

--# error_value: raise a string of great size
--# expect: error
error(("x"):rep(1 << 28))

--# tensor_huge: allocate a tensor larger than memory
--# expect: error
local pl = require "perilune"
print(pl.eval(pl.ones { 1 << 45 }:contiguous()):sum():item())

--# tensor_sum: sum a tensor larger than memory
--# expect: error
local pl = require "perilune"
local x = pl.randn { 1 << 40 }
print((x * x:flip(0)):sort(0):sum():item())

--# tensor_product: multiply to a result larger than memory
--# expect: any
local pl = require "perilune"
print(pl.ones { 1 << 20, 1 }:matmul(pl.ones { 1, 1 << 20 }):contiguous():sort(0):size())

--# tolist: read a broadcast tensor as a table
--# expect: error
local pl = require "perilune"
print(#pl.zeros { 1 }:expand(1 << 36):tolist())

--# print_tensor: print a large broadcast tensor
--# expect: any
local pl = require "perilune"
print(pl.zeros { 1 }:expand(1 << 40))

--# tile: tile past memory
--# expect: error
local pl = require "perilune"
print(pl.ones { 1 << 10 }:tile(1 << 40):sum():item())

--# repeat_interleave: repeat past memory
--# expect: error
local pl = require "perilune"
print(pl.ones { 1 << 10 }:repeat_interleave(1 << 40, 0):sum():item())

--# one_hot: make classes past memory
--# expect: error
local pl = require "perilune"
print(pl.zeros({ 1 << 10 }, { dtype = "i64" }):one_hot(1 << 45):argmax(-1):sum():item())

--# arange: count past memory
--# expect: error
local pl = require "perilune"
print(pl.arange(0, 1e15):sort(0):item())

--# eye: make a matrix past memory
--# expect: error
local pl = require "perilune"
print(pl.eye(1 << 30):sort(0):sum():item())

--# pad: pad past memory
--# expect: error
local pl = require "perilune"
print(pl.ones { 2, 2 }:pad({ 1 << 40, 1 << 40 }):sort(0):sum():item())

--# interpolate: enlarge past memory
--# expect: error
local pl = require "perilune"
print(pl.ones { 1, 1, 2, 2 }:interpolate({ size = { 1 << 30, 1 << 30 } }):sort(0):sum():item())

--# endless_graph: record forever without a value
--# expect: stops
local pl = require "perilune"
local x = pl.ones { 4 }
for i = 1, math.huge do x = x + i end

--# states: make States forever
--# expect: stops
local pl = require "perilune"
local t = {}
while true do t[#t + 1] = pl.state(pl.ones { 1 << 20 }) end

--# gzip_bomb: unpack a small archive to gigabytes
--# expect: error
local pl = require "perilune"
print(pl.data.csv("bomb.csv.gz"))

--# gzip_text: unpack a small archive to a text
--# expect: error
local pl = require "perilune"
print(pl.data.text("bomb.csv.gz"))

--# gzip_table: unpack a small archive to records of a table
--# expect: error
local pl = require "perilune"
print(pl.data.table("bomb.csv.gz"))

--# gzip_records: unpack a small archive to lines
--# expect: error
local pl = require "perilune"
print(pl.data.lines("bomb.csv.gz"))

--# generate_scan: scan records without number
--# expect: error
local pl = require "perilune"
print(pl.data.generate(1 << 46, function(i) return { i = i } end):filter(function() return true end):size())

--# generate_values: make a record of more values than a worker may hold
--# expect: error
local pl = require "perilune"
print(pl.data.generate(4, function(i) return { x = ("x"):rep(1 << 30) } end):get(0))

--# preference_length: encode pairs in rows of gigabytes
--# expect: error
local pl = require "perilune"
print(pl.data.list({ { prompt = "a", chosen = "b", rejected = "c" } }):preference(pl.data.bytes(), { length = 1 << 40 }):get(0))

--# gzip_allowed: unpack a small archive within a limit of one's own
--# expect: error
local pl = require "perilune"
print(pl.data.csv("bomb.csv.gz", { max_bytes = 64 << 20 }))

--# npy_header: claim a great shape in a small file
--# expect: error
local pl = require "perilune"
print(pl.load("huge.npy"))

--# npz_bomb: unpack an array of zeros to gigabytes
--# expect: any
local pl = require "perilune"
print(pl.load("bomb.npz"))

--# safetensors_header: claim a great header in a small file
--# expect: error
local pl = require "perilune"
print(pl.load("huge.safetensors"))

--# png_bomb: decode a picture of great size
--# expect: any
local pl = require "perilune"
print(pl.data.images("bombs", { pixels = 8 }):batch(1))

--# augment_copies: multiply records to a great size
--# expect: error
local pl = require "perilune"
print(pl.data.list({ { x = 1 } }):augment(function(r) return r end, { copies = 1 << 60 }):size())

--# vocabulary_size: train a vocabulary of great size
--# expect: error
local pl = require "perilune"
print(pl.data.train_tokenizer(pl.data.list { { text = "some words" } }, { vocab = 1 << 40 }))

--# sounds_long: ask for sounds of great length
--# expect: error
local pl = require "perilune"
print(pl.data.sounds("bombs", { rate = 1000000, seconds = 3600 }))

--# augment_crop: crop to a great size
--# expect: error
local pl = require "perilune"
print(pl.augment.crop(pl.zeros { 1, 1, 2, 2 }, 0, 0, 1 << 30):sum())

--# augment_noise: draw more numbers than fit
--# expect: error
local pl = require "perilune"
print(pl.augment.draws({ id = pl.arange(4), visit = pl.arange(4) }):uniform(1 << 60))

--# mel_bands: make a great matrix on the host
--# expect: any
local pl = require "perilune"
print(pl.audio.mel_bands { rate = 1 << 40, window = 65536, mels = 4096 })

--# suggestions: compare long names for a suggestion
--# expect: error
local pl = require "perilune"
print(pl[("zeros"):rep(1 << 18)])

--# option_names: pass options of long names
--# expect: error
local pl = require "perilune"
print(pl.zeros({ 2 }, { [("dtype"):rep(1 << 18)] = 1 }))

--# metric_names: log a million metrics
--# expect: any
local pl = require "perilune"
return require "base" { loss = function(m, b)
  local t = {}
  for i = 1, 1000000 do t["m" .. i] = i end
  return m(b.x):mean(), t
end }

--# deep_model: nest a model 100,000 deep
--# expect: error
local pl = require "perilune"
return require "base" { model = function()
  local t = { w = pl.state(pl.ones { 4, 1 }) }
  for _ = 1, 100000 do t = { t } end
  return t
end }

--# cyclic_model: make a model that contains itself
--# expect: any
local pl = require "perilune"
return require "base" { model = function()
  local m = pl.nn.Linear(4, 1)
  m.self = m
  return m
end }

--# wide_model: make a model of a million parts
--# expect: any
local pl = require "perilune"
return require "base" { model = function()
  local m = pl.nn.Linear(4, 1)
  for i = 1, 1000000 do m["p" .. i] = {} end
  return m
end }
