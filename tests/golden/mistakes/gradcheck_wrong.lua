local pl = require "perilune"
local double = pl.custom {
  name = "double",
  forward = function(x) return x * 2 end,
  backward = function(g, x) return g * 3 end,
}
pl.gradcheck(function(x) return double(x) end, { pl.ones({3}) })
