local pl = require "perilune"
local losses = pl.zeros({4})
print(losses:item())
