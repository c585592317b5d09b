local pl = require "perilune"
local w = pl.state({1, 2, 3})
