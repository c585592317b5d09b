local pl = require "perilune"
local p = pl.params { samples = 1e6 }
print(p.smaples)
