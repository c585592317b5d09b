local pl = require "perilune"
local x, y = pl.zeros({3}), pl.ones({3})
if x < y then print("smaller") end
