local pl = require "perilune"
local hidden
pl.step(function()
  hidden = pl.randn({4}) * 2
end)
print(hidden)
