local pl = require "perilune"
local x = pl.randn({3})
local loss = (x * x):sum()
loss:backward()
