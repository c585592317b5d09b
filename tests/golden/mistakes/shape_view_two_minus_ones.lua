local pl = require "perilune"
local x = pl.zeros({6, 5}):view(-1, -1)
