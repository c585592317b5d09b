local pl = require "perilune"
local f = pl.custom { forward = function(x) return x end }
