local pl = require "perilune"
local w = pl.state(pl.zeros({3}))
w:assign(pl.zeros({4}))
