local pl = require "perilune"
local y = pl.zeros({2, 3}):matmul({1, 2, 3})
