local pl = require "perilune"
local x, w = pl.zeros({64, 63}), pl.zeros({64, 128})
print(x:matmul(w))
