local pl = require "perilune"
local w = pl.state(pl.zeros({3}))
w.grad = pl.ones({4})
