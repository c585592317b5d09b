local pl = require "perilune"
local y = pl.conv2d(pl.zeros({1, 3, 8, 8}), pl.zeros({4, 3, 3, 3}), nil, { padding = "some" })
