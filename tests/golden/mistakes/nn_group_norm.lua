local pl = require "perilune"
local nn = pl.nn
local norm = nn.GroupNorm(32, 4)
