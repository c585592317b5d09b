-- recipes/montecarlo.lua: estimates pi by Monte Carlo integration: a tensor program without training
--
-- Points are uniform in a square; the fraction of them within the quarter circle is pi / 4. A million points give two or three
-- digits; `--set samples=1e8` gives four, in seconds. The error is proportional to 1 / sqrt(samples).

local pl = require "perilune"

local p = pl.params { samples = 1e6, chunk = 1e6, seed = 1 }

pl.seed(p.seed)
local chunk = math.floor(math.min(p.chunk, p.samples))
local rounds = math.max(1, p.samples // chunk)

local hits = 0
for _ = 1, rounds do                       -- in chunks of constant memory
  hits = hits + pl.step(function()
    local x, y = pl.rand { chunk }, pl.rand { chunk }
    return (x * x + y * y):lt(1):sum()
  end):item()
end

local n = rounds * chunk
local share = hits / n
local pi, deviation = 4 * share, 4 * math.sqrt(share * (1 - share) / n)
print(("pi = %.6f +- %.6f from %d samples (error %.6f)"):format(pi, deviation, n, math.abs(pi - math.pi)))
