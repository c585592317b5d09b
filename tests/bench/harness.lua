-- tests/bench/harness.lua: times one case of cpu.lua or cuda.lua and prints the median microseconds of a run, the seconds
-- of the first one, and the peak bytes of device memory. `perilune bench` reads that line.
--
-- A case is a function that makes its inputs and returns `once(fn)`. On a GPU runs are queued in rounds and each round ends with a
-- read, so that the host runs ahead within a round, as it does in training; on the CPU a round is one run.

local pl = require "perilune"

local harness = {}

local function free(...)
  for i = 1, select("#", ...) do select(i, ...):free() end
end

---Returns a function that runs `fn` once and frees its results immediately, as reference counts do in Python.
---For the last run of a round it returns a tensor to wait for.
function harness.once(fn)
  return function(last)
    local out = { pl.step(fn) }
    if last then return out[1] end
    free(table.unpack(out))
  end
end

local function wait(x)
  if not x then return end
  local value = pl.step(function() return x:flatten():narrow(0, 0, 1):to("f32") end)
  value:item()
  free(value, x)
end

---Runs the case named by the param `case`, or prints all names if it is "list". `round`: runs between two reads.
function harness.run(cases, order, round)
  local p = pl.params { case = "list", seconds = 1.0 }
  if p.case == "list" then
    for _, name in ipairs(order) do print(name) end
    return
  end
  local make = cases[p.case]
  if not make then pl.error("bench", "there is no case '" .. p.case .. "'", "one of " .. table.concat(order, ", ")) end
  local work = make()
  local first = pl.clock()
  wait(work(true))
  first = pl.clock() - first
  for _ = 1, 3 do wait(work(true)) end
  local times, start, n = {}, pl.clock(), round
  while pl.clock() - start < p.seconds or #times < (round > 1 and 3 or 5) do
    local before = pl.clock()
    for _ = 2, n do work() end
    if round > 1 then wait(work(true)) else work() end
    times[#times + 1] = (pl.clock() - before) * 1e6 / n
    if times[1] > 5e4 then n = math.min(n, 3) end
  end
  table.sort(times)
  print(("%.3f %.6f %d"):format(times[(#times + 1) // 2], first, pl.memory().peak))
end

---Makes a table that keeps the order in which cases were defined.
function harness.cases()
  local cases, order = {}, {}
  local meta = {}
  function meta.__newindex(_, name, make)
    order[#order + 1] = name
    rawset(cases, name, make)
  end
  return setmetatable({}, meta), cases, order
end

return harness
