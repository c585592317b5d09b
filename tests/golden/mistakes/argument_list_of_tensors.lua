local pl = require "perilune"
local y = pl.cat(pl.zeros({2}), pl.zeros({2}))
