local pl = require "perilune"
local x = pl.zeros({3, 4})
local y = x + pl.ones({3})
