local pl = require "perilune"
local y = pl.zeros({2, 3}):relu(0.1)
