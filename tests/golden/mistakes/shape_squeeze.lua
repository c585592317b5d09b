local pl = require "perilune"
local loss = pl.zeros({4, 3}):squeeze(1)
