-- augment/beta.lua: draws from the symmetric beta distribution, by the inverse of its distribution function.
--
-- The inverse is a table of 512 intervals, made on the host by bisection, between whose entries draws interpolate linearly.

local pl = require "perilune"

local INTERVALS <const> = 512

---Logarithm of the gamma function of x > 0 (Lanczos, SIAM J. Numer. Anal. 1, 1964).
local function log_gamma(x)
  local c = { 76.18009172947146, -86.50532032941677, 24.01409824083091, -1.231739572450155, 0.1208650973866179e-2, -0.5395239384953e-5 }
  local sum, y = 1.000000000190015, x
  for _, term in ipairs(c) do
    y = y + 1
    sum = sum + term / y
  end
  local tmp = x + 5.5
  return (x + 0.5) * math.log(tmp) - tmp + math.log(2.5066282746310005 * sum / x)
end

---The distribution function of Beta(a, a) at x <= 1/2, by its continued fraction (Lentz's method).
local function distribution(a, x)
  if x <= 0 then return 0 end
  local front = math.exp(log_gamma(2 * a) - 2 * log_gamma(a) + a * math.log(x) + a * math.log(1 - x)) / a
  local c, d = 1.0, 1 / (1 - 2 * a * x / (a + 1))
  local h = d
  for m = 1, 300 do
    local even = m * (a - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
    d, c = 1 / (1 + even * d), 1 + even / c
    h = h * d * c
    local odd = -(a + m) * (2 * a + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
    d, c = 1 / (1 + odd * d), 1 + odd / c
    h = h * d * c
    if math.abs(d * c - 1) < 1e-12 then break end
  end
  return front * h
end

---Makes the table of quantiles of Beta(a, a): entry i is that of i / 512.
---@param a number
---@return number[]
local function quantiles(a)
  local out = {}
  for i = 0, INTERVALS // 2 do
    local low, high = 0.0, 0.5
    for _ = 1, 60 do
      local middle = (low + high) / 2
      if distribution(a, middle) < i / INTERVALS then low = middle else high = middle end
    end
    local x = i == 0 and 0.0 or i == INTERVALS // 2 and 0.5 or high
    out[i + 1], out[INTERVALS + 1 - i] = x, 1 - x
  end
  return out
end

---Makes a function that draws one number of each sample from Beta(a, a).
---@param a number above 0
---@return fun(draws: perilune.Draws): perilune.Tensor (B) f32
local function beta(a)
  if a == 1 then return function(draws) return draws:uniform(1):squeeze(1) end end
  local list = quantiles(a)
  ---@param draws perilune.Draws
  return function(draws)
    local u = draws:uniform(1):squeeze(1) * INTERVALS
    local cell = u:floor()
    local at, knots = cell:to("i64"), pl.tensor(list)
    local below, above = knots:index_select(0, at), knots:index_select(0, at + 1)
    return below + (above - below) * (u - cell)
  end
end

return { beta = beta, quantiles = quantiles }
