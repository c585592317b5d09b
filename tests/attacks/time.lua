-- Tries to go on after an interrupt. The harness is repl/tests/attacks.rs: each block is a script of its own.

--# loop: loop forever
--# expect: stops
while true do end

--# goto: loop forever with goto
--# expect: stops
::again:: goto again

--# caught_loop: catch every interrupt
--# expect: stops
while true do pcall(function() while true do end end) end

--# handler: raise in the handler forever
--# expect: stops
local function h(e) return error(e) end
while true do xpcall(error, h, "x") end

--# handler_loop: loop forever in the handler
--# expect: stops
xpcall(error, function() while true do end end, "x")

--# recursion: recurse forever
--# expect: error
local function f() return 1 + f() end
f()

--# tail_recursion: recurse in tail position forever
--# expect: any
local function f(n) return f(n + 1) end
f(0)

--# coroutine: switch forever
--# expect: stops
local c = coroutine.wrap(function() while true do coroutine.yield() end end)
while true do c() end

--# coroutine_loop: loop forever in a coroutine
--# expect: stops
coroutine.wrap(function() while true do end end)()

--# coroutines_nested: nest coroutines forever
--# expect: error
local function f() return coroutine.wrap(f)() end
f()

--# metamethods: index forever
--# expect: any
local t = setmetatable({}, {})
getmetatable(t).__index = function(s, k) return s[k .. "x"] end
print(t.a)

--# index_loop: make a chain of __index that loops
--# expect: error
local a, b = {}, {}
setmetatable(a, { __index = b }); setmetatable(b, { __index = a })
print(a.x)

--# finaliser: loop forever in a finaliser
--# expect: stops
setmetatable({}, { __gc = function() while true do end end })
collectgarbage() collectgarbage()

--# finaliser_at_exit: loop forever in a finaliser at the end
--# expect: stops
KEEP = nil
local t = setmetatable({}, { __gc = function() while true do end end })
rawset(_G, "kept", t)

--# close: loop forever when a variable is closed
--# expect: stops
do local x <close> = setmetatable({}, { __close = function() while true do end end }) end

--# tostring: loop forever in __tostring
--# expect: stops
print(setmetatable({}, { __tostring = function() while true do end end }))

--# name_of_error: loop forever in __tostring of an error
--# expect: stops
error(setmetatable({}, { __tostring = function() while true do end end }))

--# find: backtrack forever
--# expect: stops
print((("a"):rep(30) .. "b"):rep(200):find(("a*"):rep(30) .. "c"))

--# match: backtrack forever in match
--# expect: stops
print(("a"):rep(100000):match(".-.-.-.-.-.-b"))

--# gmatch: backtrack forever in gmatch
--# expect: stops
for x in ("a"):rep(100000):gmatch(".-.-.-.-.-b") do print(x) end

--# gsub: backtrack forever in gsub
--# expect: stops
print(("a"):rep(100000):gsub(".-.-.-.-.-b", ""))

--# gsub_callback: loop forever in a replacement
--# expect: stops
print(("a"):gsub(".", function() while true do end end))

--# find_plain: search a long text for a long text
--# expect: stops
local s = ("a"):rep(1 << 22)
for i = 1, 1 << 20 do s:find(("a"):rep(1 << 21) .. "b", 1, true) end

--# balanced: match brackets forever
--# expect: any
local s = ("("):rep(200000)
print(s:find("%b()"))

--# sort: sort with a comparison that lies
--# expect: any
local t = {}
for i = 1, 100000 do t[i] = i % 7 end
table.sort(t, function() return true end)

--# sort_loop: loop forever in a comparison
--# expect: stops
table.sort({ 2, 1 }, function() while true do end end)

--# concat_loop: concatenate forever
--# expect: stops
local t = {}
for i = 1, 1 << 20 do t[i] = "x" end
while true do table.concat(t) end

--# move_loop: move forever
--# expect: any
table.move(setmetatable({}, { __index = function() return 1 end }), 1, math.maxinteger - 1, 2)

--# insert: insert at the front of a table that claims a length
--# expect: stops
table.insert(setmetatable({}, { __len = function() return 1 << 60 end }), 1, 0)

--# remove: remove from the front of a table that claims a length
--# expect: any
table.remove(setmetatable({}, { __len = function() return 1 << 60 end }), 1)

--# unpack_length: unpack a table that claims a length
--# expect: any
print(table.unpack(setmetatable({}, { __len = function() return 1 << 30 end })))

--# concat_length: concatenate a table that claims a length
--# expect: any
print(table.concat(setmetatable({}, { __len = function() return 1 << 60 end, __index = function() return "" end })))

--# utf8: count forever
--# expect: stops
local s = ("\u{10FFFF}"):rep(1 << 22)
while true do utf8.len(s) end

--# reverse: reverse forever
--# expect: stops
local s = ("x"):rep(1 << 24)
while true do s = s:reverse():upper():lower() end

--# parse: parse forever
--# expect: stops
local s = "return " .. ("1 + "):rep(1 << 20) .. "1"
while true do load(s) end

--# parse_deep: parse a deep expression
--# expect: any
print(load("return " .. ("("):rep(1 << 20)))

--# gc_step: collect forever
--# expect: stops
local t = {}
for i = 1, 1000000 do t[i] = {} end
while true do collectgarbage() end

--# tensor_loop: compute forever
--# expect: stops
local pl = require "perilune"
local x = pl.ones { 1 << 10, 1 << 10 }
while true do x = pl.eval(x:matmul(x) * 1e-3) end

--# tensor_long: compute one long product
--# expect: stops
local pl = require "perilune"
local x = pl.randn { 20000, 20000 }
print(x:matmul(x):matmul(x):sum():item())

--# item_loop: read forever
--# expect: stops
local pl = require "perilune"
local i = 0
while true do i = i + pl.tensor(1):item() end

--# backward: loop forever in a gradient
--# expect: stops
local pl = require "perilune"
local w = pl.state(pl.ones { 2 })
local f = pl.custom and pl.custom { forward = function(x) return x * 2 end, backward = function() while true do end end }
if not f then while true do end end
f(w):sum():backward()

--# step_scope: loop forever in a step
--# expect: stops
local pl = require "perilune"
pl.step(function() while true do end end)

--# in_data: loop forever in the recipe's data
--# expect: stops
return require "base" { data = function() while true do end end }

--# in_model: loop forever in the recipe's model
--# expect: stops
return require "base" { model = function() while true do end end }

--# in_loss: loop forever in the recipe's loss
--# expect: stops
return require "base" { loss = function() while true do end end }

--# in_optimizer: loop forever in the recipe's optimizer
--# expect: stops
return require "base" { optimizer = function() while true do end end }

--# in_evaluate: loop forever in the recipe's evaluate
--# expect: any
return require "base" { evaluate = function() while true do end end }

--# in_params: loop forever in the recipe's params
--# expect: any
return require "base" { params = setmetatable({ steps = 3 }, { __index = function() while true do end end, __pairs = function() while true do end end }) }

--# endless_steps: train forever
--# expect: any
return require "base" { params = { steps = 1 << 40 } }

--# loader: hand out batches forever
--# expect: stops
return require "base" { data = function()
  return { train = setmetatable({}, { __index = function() while true do end end }) }
end }
