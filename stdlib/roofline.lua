-- roofline.lua: measures the memory bandwidth and the matrix-product throughput of the device, in about a second.
--
-- `perilune profile` compares kernels with these rates. Williams et al., Roofline (2009).

local pl = require "perilune"

---Measures the rate of `fn`, which does `work` units of work and returns a tensor. Takes the median of five differences between
---a round of 20 calls and one of 5, which cancels the fixed cost of a round.
local function rate(work, fn)
  local function round(n)
    local start = pl.clock()
    local y = pl.step(fn)
    for _ = 2, n do
      y:free()
      y = pl.step(fn)
    end
    pl.step(function() return y:flatten():narrow(0, 0, 1) end):item() -- synchronizes with the device
    y:free()
    return pl.clock() - start
  end
  round(3) -- compiles the kernels and raises the clocks
  local rounds = {}
  for i = 1, 5 do
    local short = round(5)
    rounds[i] = math.max(round(20) - short, 1e-9) / 15
  end
  table.sort(rounds)
  return work / rounds[3]
end

---Measures the device: an elementwise kernel for bandwidth, a square matrix product for throughput.
---@param dtype perilune.DType|"tf32" of the matrix product
---@return {bytes: number, flops: number} bytes and floating-point operations per second
local function roofline(dtype)
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

return roofline
