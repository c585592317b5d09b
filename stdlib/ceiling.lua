-- ceiling.lua: what the device at hand reaches, measured: bytes a second through memory and operations a second in matrix
-- products. `perilune profile` compares kernels with it. Takes a second or less.

local pl = require "perilune"

---The rate of `work` units done by one call of `fn`, which returns a tensor: what longer rounds take beyond short ones, which
---leaves out what a round costs by itself; the median of five.
local function rate(work, fn)
  local function round(n)
    local start = pl.clock()
    local y = pl.step(fn)
    for _ = 2, n do
      y:free()
      y = pl.step(fn)
    end
    pl.step(function() return y:flatten():narrow(0, 0, 1) end):item() -- waits for the device
    y:free()
    return pl.clock() - start
  end
  round(3) -- compiles, and lets the device wake up
  local rounds = {}
  for i = 1, 5 do
    local short = round(5)
    rounds[i] = math.max(round(20) - short, 1e-9) / 15
  end
  table.sort(rounds)
  return work / rounds[3]
end

---@param dtype perilune.DType|"tf32" of the products
---@return {bytes: number, flops: number} a second
local function ceiling(dtype)
  local gpu = pl.zeros({ 1 }).device ~= "cpu"
  local n, side = gpu and 64 * 1024 * 1024 or 4 * 1024 * 1024, gpu and 4096 or 512
  local x = pl.eval(pl.zeros { n })
  local bytes = rate(8.0 * n, function() return x + 1 end)
  x:free()
  local stored = dtype == "tf32" and "f32" or dtype --[[@as perilune.DType]]
  local a, b = pl.eval(pl.randn({ side, side }, { dtype = stored }), pl.randn({ side, side }, { dtype = stored }))
  local function product() return a:matmul(b) end
  local flops = rate(2.0 * side ^ 3, function() return dtype == "tf32" and pl.autocast("tf32", product) or product() end)
  a:free()
  b:free()
  return { bytes = bytes, flops = flops }
end

return ceiling
