local pl = require "perilune"
local nn = pl.nn
local conv = nn.Conv2d(1, 4, 3)
local y = conv(pl.zeros({32, 64}))
