local pl = require "perilune"
local nn = pl.nn
local conv = nn.Conv2d(1, 32, 3, { pading = 1 })
