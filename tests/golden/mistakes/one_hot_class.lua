local pl = require "perilune"
local ids = pl.tensor { 0, 3, 1 }
print(pl.one_hot(ids, 3))
