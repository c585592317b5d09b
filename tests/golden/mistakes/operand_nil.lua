local pl = require "perilune"
local scale
local y = pl.zeros({2}) * scale
