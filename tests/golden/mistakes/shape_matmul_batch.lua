local pl = require "perilune"
local a, b = pl.zeros({2, 3, 4}), pl.zeros({5, 4, 6})
print(a:matmul(b))
