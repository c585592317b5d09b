-- recipes/montecarlo.lua: pi by throwing darts: a plain tensor program, no training
--
-- Points fall evenly on a square; the share of them within the circle is pi / 4. A million points give two or three digits,
-- at once; `--set samples=1e8` gives four, in seconds. The error falls with the root of the number of points.

local pl = require "perilune"

local p = pl.params { samples = 1e6, chunk = 1e6, seed = 1 }

pl.seed(p.seed)
local chunk = math.floor(math.min(p.chunk, p.samples))
local rounds = math.max(1, p.samples // chunk)

local hits = 0
for _ = 1, rounds do                       -- by chunks, so that memory stays flat however many samples there are
  hits = hits + pl.step(function()
    local x, y = pl.rand { chunk }, pl.rand { chunk }
    return (x * x + y * y):lt(1):sum()
  end):item()
end

local n = rounds * chunk
local share = hits / n
local pi, deviation = 4 * share, 4 * math.sqrt(share * (1 - share) / n)
print(("pi = %.6f +- %.6f from %d samples (error %.6f)"):format(pi, deviation, n, math.abs(pi - math.pi)))
