local pl = require "perilune"
local x = pl.zeros({3, 4}):narrow(1, 2, 3)
