local pl = require "perilune"
local x = pl.zeros({2, 3}, "bf16")
