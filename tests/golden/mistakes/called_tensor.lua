local pl = require "perilune"
local x = pl.zeros({4})
print(x(0))
