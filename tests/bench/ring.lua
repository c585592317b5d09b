-- tests/bench/ring.lua: times attention with gradients over sequences that devices along cp divide. Prints the median milliseconds
-- of a run, the peak bytes of device memory, and the root mean square of the result and of each gradient. `documents`: the positions
-- of each of the documents that do not attend to each other, or 0. `ring.py` calls it.

local pl = require "perilune"

local p = pl.params { batch = 1, heads = 16, length = 131072, size = 128, dtype = "bf16", seconds = 3.0, documents = 0 }

local function rand()
  return pl.eval(pl.randn({ p.batch, p.heads, p.length, p.size }):to(p.dtype):shard { cp = 2 })
end

local q, k, v, g = rand(), rand(), rand(), rand()
local documents
if p.documents > 0 then documents = pl.eval(pl.arange(p.length) // p.documents) end

local function run()
  return { pl.step(function()
    local y = pl.scaled_dot_product_attention(q, k, v, { is_causal = true, documents = documents })
    local dq, dk, dv = pl.grad((y * g):sum(), { q, k, v })
    return y:shard { cp = 2 }, dq:shard { cp = 2 }, dk:shard { cp = 2 }, dv:shard { cp = 2 }
  end) }
end

-- Waits for the run by a sum of a column of its result, which each device adds over its block, and frees the results.
local function wait(out)
  local first = pl.step(function() return out[1]:narrow(1, 0, 1):narrow(3, 0, 1):to("f32"):sum() end)
  first:item()
  for _, x in ipairs { first, table.unpack(out) } do x:free() end
end

-- The first run compiles, those after it record and replay.
local out = run()
local norms = {}
for i, x in ipairs(out) do
  local mean = pl.step(function()
    local y = x:to("f32")
    return (y * y):mean():sqrt()
  end)
  norms[i] = ("%.6g"):format(mean:item())
end
wait(out)
for _ = 1, 3 do wait(run()) end
local times, start = {}, pl.clock()
while #times < 3 or pl.clock() - start < p.seconds do
  local before = pl.clock()
  wait(run())
  times[#times + 1] = (pl.clock() - before) * 1e3
end
table.sort(times)
print(("%.4f %d %s"):format(times[(#times + 1) // 2], pl.memory().peak, table.concat(norms, " ")))
