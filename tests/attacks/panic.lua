-- Tries to end the process by arguments that no function expects. The harness is repl/tests/attacks.rs: each block is a script of its own.

--# tensor_hole: make a tensor of a table with a hole
--# expect: error
local pl = require "perilune"
print(pl.tensor { 1, nil, 3 })

--# tensor_ragged: make a tensor of ragged rows
--# expect: error
local pl = require "perilune"
print(pl.tensor { { 1, 2 }, { 3 } })

--# tensor_cyclic: make a tensor of a table that contains itself
--# expect: error
local pl = require "perilune"
local t = {}
t[1] = t
print(pl.tensor(t))

--# tensor_deep: make a tensor of a deep table
--# expect: error
local pl = require "perilune"
local t = { 1 }
for _ = 1, 100000 do t = { t } end
print(pl.tensor(t))

--# tensor_mixed: make a tensor of mixed values
--# expect: error
local pl = require "perilune"
print(pl.tensor { 1, "x", true })

--# tensor_metatable: make a tensor of a table that claims a length
--# expect: any
local pl = require "perilune"
print(pl.tensor(setmetatable({}, { __len = function() return 1 << 40 end, __index = function() return 1 end })))

--# userdata_swap: give a method another kind of userdata
--# expect: error
local pl = require "perilune"
print(pl.ones { 2 }.sum(pl.nn.Linear(2, 2)))

--# self_nil: call a method without its tensor
--# expect: error
local pl = require "perilune"
print(pl.ones { 2 }.sum())

--# free_twice: free a tensor twice and read it
--# expect: error
local pl = require "perilune"
local x = pl.eval(pl.ones { 2 })
x:free() x:free()
print(x:item())

--# freed_state: free a State and train it
--# expect: any
local pl = require "perilune"
local w = pl.state(pl.ones { 2 })
w:free()
w:assign(pl.zeros { 2 })
print(w:tolist()[1])

--# assign_shape: assign another shape
--# expect: error
local pl = require "perilune"
pl.state(pl.ones { 2 }):assign(pl.ones { 3 })

--# nested_step: end a step within a step
--# expect: any
local pl = require "perilune"
pl.step(function() pl.step(function() pl.end_step() end) end)

--# step_yield: yield out of a step
--# expect: any
local pl = require "perilune"
local c = coroutine.wrap(function() pl.step(function() coroutine.yield(1) end) end)
c() c()
print(pl.ones { 2 }:sum():item())

--# step_error_in_gc: record in a finaliser
--# expect: any
local pl = require "perilune"
setmetatable({}, { __gc = function() pl.ones { 2 }:sum():item() end })
local x = pl.ones { 4 }
collectgarbage()
print(x:sum():item())

--# print_reenters: compute in __tostring while printing
--# expect: any
local pl = require "perilune"
print(setmetatable({}, { __tostring = function() return tostring(pl.ones { 2 }:sum():item()) end }))

--# tostring_wrong: return no string from __tostring
--# expect: error
local pl = require "perilune"
print(setmetatable({}, { __tostring = function() return {} end }))

--# error_nil: raise nil
--# expect: error
local pl = require "perilune"
error(nil)

--# error_table: raise a table
--# expect: error
local pl = require "perilune"
error {}

--# error_function: raise a function
--# expect: error
local pl = require "perilune"
error(print)

--# library_overwritten: replace functions of the library
--# expect: error
local pl = require "perilune"
pl.zeros = nil
pl.nn = 3
pl.step = print
print(pl.ones { 2 }:sum():item())
local x = pl.nn.Linear(2, 2)

--# string_library: replace the string library
--# expect: error
local pl = require "perilune"
string.format = nil
string.rep = nil
table.concat = nil
print(pl.zeros({ 2 }, { dtyp = "f32" }))

--# globals: replace globals that the library uses
--# expect: any
local pl = require "perilune"
type = nil
pairs = nil
ipairs = nil
setmetatable = nil
print(pl.nn.Linear(2, 2))

--# permutation: permute a great number
--# expect: any
local pl = require "perilune"
print(pl.data.permutation(1 << 62, 1))

--# shuffled: shuffle a great number
--# expect: any
local pl = require "perilune"
print(pl.data.tensors { x = pl.ones { 4 } }:shuffle(1 << 62):batch(1 << 62))

--# batch_zero: make batches of nothing
--# expect: error
local pl = require "perilune"
print(pl.data.tensors { x = pl.ones { 4 } }:batch(0))

--# batch_negative: make batches of less than nothing
--# expect: error
local pl = require "perilune"
print(pl.data.tensors { x = pl.ones { 4 } }:batch(-5))

--# split_nan: split by what is not a number
--# expect: error
local pl = require "perilune"
print(pl.data.tensors { x = pl.ones { 4 } }:split("train", 0 / 0, 1))

--# text_windows: cut windows of great length
--# expect: any
local pl = require "perilune"
print(pl.data.text("text.txt"):windows(1 << 62))

--# csv_columns: ask for columns far away
--# expect: any
local pl = require "perilune"
print(pl.data.csv("table.csv"):columns({ 1 << 62 }))

--# linear_zero: make a layer of nothing
--# expect: any
local pl = require "perilune"
print(pl.nn.Linear(0, 0)(pl.ones { 2, 0 }):sum():item())

--# linear_huge: make a layer past memory
--# expect: error
local pl = require "perilune"
print(pl.nn.Linear(1 << 40, 1 << 40))

--# attention_zero: make attention of no heads
--# expect: error
local pl = require "perilune"
print(pl.nn.MultiheadAttention and pl.nn.MultiheadAttention(8, 0) or error "none")

--# optimizer_nan: take a step of a rate that is not a number
--# expect: any
local pl = require "perilune"
local m = pl.nn.Linear(2, 1)
local o = pl.optim.AdamW(m, { lr = 0 / 0 })
m(pl.ones { 2, 2 }):sum():backward()
o:step()

--# grad_twice: differentiate a result twice
--# expect: any
local pl = require "perilune"
local w = pl.state(pl.ones { 2 })
local l = (w * w):sum()
l:backward() l:backward() l:backward()

--# grad_of_int: differentiate integers
--# expect: error
local pl = require "perilune"
pl.ones({ 2 }, { dtype = "i64" }):sum():backward()

--# kernel_source: compile a kernel of nonsense
--# expect: error
local pl = require "perilune"
print(pl.kernel and pl.kernel("x", "]]") or error "none")

--# checkpoint_yield: yield out of a checkpoint
--# expect: any
local pl = require "perilune"
local c = coroutine.wrap(function() pl.checkpoint(function() coroutine.yield() end) end)
c() c()

--# autocast_unknown: cast to a type that is none
--# expect: error
local pl = require "perilune"
pl.autocast("f7", function() end)

--# seed_huge: seed with what is no integer
--# expect: error
local pl = require "perilune"
pl.seed(1e300)

--# to_device: move to a device that is none
--# expect: error
local pl = require "perilune"
print(pl.ones { 2 }:to("cuda:99"))

--# dtype_unknown: make a type that is none
--# expect: error
local pl = require "perilune"
print(pl.ones({ 2 }, { dtype = ("f32"):rep(1 << 16) }))

--# arguments: pass ten thousand arguments
--# expect: error
local pl = require "perilune"
print(pl.zeros(table.unpack({}, 1, 10000)))

--# bytecode: load bytecode
--# expect: error
local pl = require "perilune"
local f = load(string.dump(function() return 1 end))
print(f())

--# bytecode_text: load what begins as bytecode
--# expect: error
local pl = require "perilune"
print(assert(load("\27Lua\x54\0")))

--# rehearse_nested: run the recipe within its own step
--# expect: any
local pl = require "perilune"
local recipe
recipe = require "base" { loss = function(m, b) require("perilune.train"); recipe.loss = nil; return m(b.x):mean() end }
return recipe

--# model_number: return a number for a model
--# expect: error
return require "base" { model = function() return 7 end }

--# data_nil: return nothing for data
--# expect: error
return require "base" { data = function() end }

--# loss_nil: return nothing for a loss
--# expect: error
return require "base" { loss = function() end }

--# loss_vector: return many losses
--# expect: error
return require "base" { loss = function(m, b) return m(b.x) end }

--# metric_types: return metrics that are none
--# expect: any
return require "base" { loss = function(m, b) return m(b.x):mean(), { [1] = {}, x = print, y = m(b.x), z = "s" } end }

--# params_types: give params that are none
--# expect: error
return require "base" { params = { steps = {}, lr = print } }

--# steps_negative: train less than no steps
--# expect: error
return require "base" { params = { steps = -5 } }

--# steps_fraction: train half a step
--# expect: error
return require "base" { params = { steps = 0.5 } }

--# generate_numbers: shuffle more records than a permutation can hold
--# expect: error
local pl = require "perilune"
print(pl.data.generate(math.maxinteger, function(i) return { i = i } end):shuffle(1):get(0))

--# generate_far: read a record far behind the first epoch
--# expect: fine
local pl = require "perilune"
print(pl.data.generate(1 << 47, function(i) return { i = i } end):shuffle(1):get(math.maxinteger).i)

--# state_names: name States so that a checkpoint cannot hold them
--# expect: any
local pl = require "perilune"
return require "base" { model = function()
  local m = pl.nn.Linear(4, 1)
  m["../../evil\0\27[2J"] = pl.nn.Linear(1, 1)
  return m
end }
