local pl = require "perilune"
local x = pl.zeros({3, 4})
print(x[{0, 0, 0}])
