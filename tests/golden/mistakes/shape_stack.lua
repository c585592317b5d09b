local pl = require "perilune"
local x = pl.stack({pl.zeros({2, 3}), pl.zeros({3, 2})}, 0)
