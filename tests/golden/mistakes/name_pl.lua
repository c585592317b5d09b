local pl = require "perilune"
local loss = pl.crossentropy(pl.zeros({4, 10}), pl.zeros({4}, {dtype = "i64"}))
