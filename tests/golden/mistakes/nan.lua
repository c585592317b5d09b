local pl = require "perilune"
pl.switches { check_nan = true }
local w = pl.state(pl.tensor {1.0, 0.0, -1.0})
pl.step(function()
  local y = w:log()
  local loss = y:sum()
  return loss
end)
