local pl = require "perilune"
local x = pl.zeros({1000000, 1000000, 10}) + 1
print(x)
