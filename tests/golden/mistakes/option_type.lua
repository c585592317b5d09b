local pl = require "perilune"
local m = pl.zeros({4, 3}):mean(-1, { keepdim = 1 })
