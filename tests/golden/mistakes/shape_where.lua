local pl = require "perilune"
local mask = pl.zeros({3}):lt(1)
local y = pl.where(mask, pl.zeros({4}), 0)
