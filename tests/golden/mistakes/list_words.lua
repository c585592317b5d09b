local pl = require "perilune"
local x = pl.tensor {"1.5", "2.5"}
