-- Tries to fill the terminal, the log, the run directory and the memory of a confined process. The harness is repl/tests/attacks.rs:
-- each block is a script of its own.

--# print_flood: print forever
--# expect: stops
while true do print(("\27[2J\7x"):rep(1000)) end

--# error_flood: raise an error of a great text
--# expect: error
error(("\27[2Jno line\n"):rep(200000))

--# log_flood: log many values in each step
--# expect: any
local recipe = require "base" {}
recipe.on_step = function(run)
  for i = 1, 2000 do pcall(run.log, run, { ["m" .. i] = i }) end
end
return recipe

--# log_names: log values under hostile names
--# expect: any
local recipe = require "base" {}
recipe.on_step = function(run)
  for _, name in ipairs { "../../victim/x", "/etc/passwd", "\27[2J", "a\nb", "a\0b", "", ("x"):rep(1 << 20), "\u{202e}x", "loss", "step", "event" } do
    pcall(run.log, run, { [name] = 1 })
  end
end
return recipe

--# log_texts: log hostile texts
--# expect: any
local recipe = require "base" {}
recipe.on_step = function(run)
  for _, text in ipairs { "\27[2J\27]0;owned\7", ("x"):rep(8 << 20), "{\"event\": \"done\"}\n{\"event\": \"step\"}", "\xff\xfe" } do
    pcall(run.log, run, { text = text })
  end
end
return recipe

--# log_pictures: log pictures that are none
--# expect: any
local pl = require "perilune"
local recipe = require "base" {}
recipe.on_step = function(run)
  for _, shape in ipairs { { 1 << 20, 1, 1 }, { 3, 1 << 12, 1 << 12 }, { 0, 0, 3 }, { 7, 7, 7, 7 } } do
    pcall(function() run:log { ["../../victim/x"] = pl.train.image(pl.zeros(shape)) } end)
  end
end
return recipe

--# file_flood: write files to the run directory until an interrupt
--# expect: stops
local pl = require "perilune"
local run = pl.run { name = "flood" }
while true do
  run:each()()
  for i = 1, 20 do pl.save(run.dir .. "/x" .. i .. ".npy", pl.ones { 64 }) end
end

--# checkpoint_flood: make every step a checkpoint of many States
--# expect: any
local pl = require "perilune"
local recipe = require "base" { params = { steps = 20 }, model = function()
  local parts = {}
  for i = 1, 300 do parts[i] = pl.nn.Linear(4, 4) end
  parts[301] = pl.nn.Linear(4, 1)
  return pl.nn.Sequential(parts)
end }
return recipe

--# event_tamper: change the event that an observer gets
--# expect: any
local recipe = require "base" {}
recipe.on_step = function(run, event)
  for key in pairs(event) do pcall(function() event[key] = "\27[2J" end) end
  pcall(function() run.dir = "../victim" end)
  pcall(function() run.count = 1 << 62 end)
end
recipe.on_end = function(run) pcall(function() run.dir = "/" end) end
return recipe

--# metric_hostile: return metrics with hostile names and values
--# expect: any
local pl = require "perilune"
return require "base" { loss = function(m, b)
  local x = m(b.x):mean()
  return x, { ["../../victim/x"] = x, ["\27[2J"] = x, ["a\nb\r"] = x, [("x"):rep(1 << 16)] = x, nan = x / 0, ["\u{202e}"] = x }
end }

--# params_hostile: give params with hostile names and values
--# expect: any
return require "base" { params = { steps = 3, ["../../victim"] = "/etc/passwd", ["a\0b"] = "\27]0;owned\7", x = 1e308 * 10, ["--allow-read"] = "/" } }

--# memory_strings: keep strings of every kind
--# expect: error
local all = {}
for i = 1, 1e9 do all[i] = ("x"):rep(1 << 16) .. i end

--# memory_tensors: keep tensors on the host
--# expect: error
local pl = require "perilune"
if pl.ones({ 1 }).device ~= "cpu" then error "this is about the host" end
local all = {}
for i = 1, 1e9 do
  all[i] = pl.ones { 4 << 20 }
  pl.eval(all[i])
end

--# memory_graph: keep results that are never computed
--# expect: stops
local pl = require "perilune"
local all, x = {}, pl.ones { 2 }
for i = 1, 1e9 do
  x = x + i
  all[i] = x
end

--# memory_workers: make workers that keep what they draw
--# expect: any
local pl = require "perilune"
local keep = {}
local set = pl.data.generate(1 << 20, function(i)
  keep[#keep + 1] = ("x"):rep(1 << 16) .. i
  return { x = i }
end, { seed = 1 })
for i = 0, 20000 do set:get(i) end
