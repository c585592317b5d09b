local pl = require "perilune"
local g = pl.grad(3.0, {pl.ones({2})})
