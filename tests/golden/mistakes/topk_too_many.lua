local pl = require "perilune"
local values, ids = pl.zeros({2, 3}):topk(5)
