-- set: lr=0.1
local pl = require "perilune"
print(pl.zeros({2}))
