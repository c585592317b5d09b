local pl = require "perilune"
local x = pl.randn(2, 3)
