local pl = require "perilune"
local nn = pl.nn
local layer = nn.Liner(64, 10)
