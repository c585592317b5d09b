local pl = require "perilune"
local w = pl.state(pl.zeros({3}))
local y = w * 2
y:backward()
