local pl = require "perilune"
local m = pl.tensor({1, 2, 3}):mean()
