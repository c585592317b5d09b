local pl = require "perilune"
local x, y = pl.randn({3}), pl.randn({3})
local g = pl.grad((x * x):sum(), {x, y})
