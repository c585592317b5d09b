local pl = require "perilune"
local nn = pl.nn
local conv = nn.Conv2d(1, 4, 5)
local y = conv(pl.zeros({2, 1, 3, 3}))
