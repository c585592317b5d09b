local pl = require "perilune"
local x = pl.zeros({2, 3, 4}):permute(0, 1, 1)
