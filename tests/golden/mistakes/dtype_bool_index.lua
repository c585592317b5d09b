local pl = require "perilune"
local x = pl.tensor {1.0, -2.0, 3.0}
local positive = x[{ x:gt(0) }]
