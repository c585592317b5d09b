local pl = require "perilune"
pl.switches { check_nan = true }
local x = pl.tensor {1.0, 0.0, -1.0}
local y = x:log()
local loss = y:sum()
print(loss:item())
