local pl = require "perilune"
local w = pl.state(pl.ones({3}))
local loss = (w:detach() * 2):sum()
loss:backward()
