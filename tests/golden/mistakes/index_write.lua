local pl = require "perilune"
local x = pl.zeros({3})
x[1] = 2
