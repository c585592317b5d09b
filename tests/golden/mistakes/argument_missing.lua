local pl = require "perilune"
local y = pl.zeros({2, 3}):transpose(0)
