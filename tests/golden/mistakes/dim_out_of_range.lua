local pl = require "perilune"
local p = pl.zeros({4, 10}):softmax(2)
