local pl = require "perilune"
local x = pl.cat({pl.zeros({2, 3}), pl.zeros({2, 4})}, 0)
