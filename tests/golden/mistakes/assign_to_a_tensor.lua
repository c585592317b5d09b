local pl = require "perilune"
local x = pl.zeros({3})
x:assign(pl.ones({3}))
