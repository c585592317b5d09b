local pl = require "perilune"
local a, b = pl.zeros({10}):split({3, 4})
