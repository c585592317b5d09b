local pl = require "perilune"
local nn = pl.nn
local drop = nn.Dropout(20)
