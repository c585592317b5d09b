local pl = require "perilune"
local loss = pl.cross_entropy(pl.zeros({4, 10}), pl.zeros({4}, { dtype = "i64" }), { weight = pl.ones({9}) })
