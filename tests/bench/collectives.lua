-- tests/bench/collectives.lua: times one collective of f32 numbers along dp and prints the median microseconds, once a size
--
--     perilune run tests/bench/collectives.lua --mesh dp=2,bucket=0 --device cuda [--set op=all_gather] [--set mib=1,16,128] [--set most=32]
--
-- `bucket=0`: calls are not merged.
--
-- `mib`: the MiB of a device's piece of an all-reduce; in all of the result of an all-gather, and of what is summed in a reduce-scatter.
-- `most`: the most collectives of a step, of which there are fewer if they are large. What a step costs the host is shared among them.

local pl = require "perilune"

local p = pl.params { op = "all_reduce", mib = "1,16,128,1024", devices = 2, rounds = 5, runs = 20, most = 32 }

-- The operand: pieces that the devices have already.
local makers = {
  all_reduce = function(n) return pl.zeros { n * p.devices }, function(x) return x:all_reduce("dp") end end,
  all_gather = function(n) return pl.zeros { n }, function(x) return x:all_gather("dp") end end,
  reduce_scatter = function(n) return pl.zeros { n * p.devices }, function(x) return x:reduce_scatter("dp") end end,
}
local make = makers[p.op]
if not make then pl.error("collectives", "there is no op '" .. p.op .. "'", "all_reduce, all_gather or reduce_scatter") end

for text in p.mib:gmatch("[^,]+") do
  local mib = math.tointeger(tonumber(text))
  local count = math.max(2, math.min(p.most, 2048 // mib))
  local xs, call = {}, nil
  for i = 1, count do
    local x
    x, call = make(mib * (1 << 18))
    xs[i] = pl.step(function() return x:shard { dp = 0 } end)
  end
  local function run()
    return { pl.step(function()
      local ys = {}
      for i, x in ipairs(xs) do ys[i] = call(x) end
      return table.unpack(ys)
    end) }
  end
  local function free(ys) for _, y in ipairs(ys) do y:free() end end
  -- Each device reads a column of its part: a result that is divided is not gathered.
  local function wait(y) pl.step(function() return y:reshape { y:size(0) // 1024, 1024 }:narrow(1, 0, 1):sum() end):item() end
  local times = {}
  for round = 1, p.rounds do
    local start = pl.clock()
    for _ = 2, p.runs do free(run()) end
    local last = run()
    wait(last[count])
    free(last)
    if round > 1 then times[#times + 1] = (pl.clock() - start) * 1e6 / (p.runs * count) end
  end
  table.sort(times)
  print(("%s %.3f"):format(text, times[(#times + 1) // 2]))
  free(xs)
end
