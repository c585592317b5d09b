-- Replaces globals and library functions, to break the standard library or to see what it passes. The harness is repl/tests/attacks.rs.

--# globals: replace every global and every function of Lua's libraries by nothing
--# expect: fine
local base, set, all, keep = require "base", rawset, pairs, { _G = true, string = true, table = true, math = true, coroutine = true, utf8 = true }
for _, library in all { string, table, math, coroutine, utf8 } do
  for name in all(library) do library[name] = nil end
end
local names = {}
for name in all(_G) do names[#names + 1] = name end
for i = 1, #names do
  if not keep[names[i]] then set(_G, names[i], nil) end
end
return base {} -- a recipe

--# later: break the parts of the library that are loaded later
--# expect: fine
local pl, base, failing = require "perilune", require "base", function() error "replaced" end
require, type, pairs, ipairs, tostring, setmetatable, select, pcall, next = failing, failing, failing, failing, failing, failing, failing, failing, failing
table.concat, table.sort, table.unpack, string.format, string.rep, math.floor, math.tointeger = failing, failing, failing, failing, failing, failing, failing
local first = pl.data.csv("table.csv"):tensors { x = { columns = { 0, 2 } } }
local count = first:size()
local norm = pl.metrics
return base { name = "later " .. count } -- a recipe

--# spy: see what the library formats, sorts and requires
--# expect: fine
local base, seen = require "base", 0
local function spy(f) return function(...) seen = seen + 1 return f(...) end end
require, tostring, setmetatable, ipairs, pairs, error = spy(require), spy(tostring), spy(setmetatable), spy(ipairs), spy(pairs), spy(error)
string.format, string.gsub, table.concat, table.sort = spy(string.format), spy(string.gsub), spy(table.concat), spy(table.sort)
return base { evaluate = function(model, batch)
  if seen > 0 then error "the library called a replaced function" end
  return { loss = model(batch.x):mean() }
end } -- a recipe

--# module: replace the functions of the module that the library calls
--# expect: fine
local pl, base = require "perilune", require "base"
for _, name in ipairs { "error", "options", "is_tensor", "is_state", "step", "tensor", "state", "grad", "eval", "zeros", "plan" } do
  pl[name] = function() error "replaced" end
end
return base {} -- a recipe

--# methods: replace the methods of all strings
--# expect: error
getmetatable("").__index = function() return print end

--# private: require what only the library may
--# expect: error
print(pcall(require, "perilune.data.native"))
local found = select(2, pcall(require, "perilune.data.native"))
assert(type(found) == "table", "the module is private")
