local pl = require "perilune"
local function depth(n) return 1 + depth(n + 1) end
print(depth(0))
