local pl = require "perilune"
local x = pl.zeros({10, 4})
local half = x:narrow(0, 0, 10 / 4)
