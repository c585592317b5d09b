local pl = require "perilune"
local y = pl.zeros({1, 1, 2, 2}):max_pool2d(3)
