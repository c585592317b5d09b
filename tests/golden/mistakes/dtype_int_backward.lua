local pl = require "perilune"
local w = pl.state(pl.zeros({3}))
local count = w:gt(0):sum()
count:backward()
