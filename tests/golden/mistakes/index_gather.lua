local pl = require "perilune"
local x = pl.zeros({2, 3})
print(x:gather(1, pl.tensor {{0}, {3}}))
