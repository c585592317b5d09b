local pl = require "perilune"
local x = pl.zeros({2, 3})
x.shape = {3, 2}
