local pl = require "perilune"
local f = pl.custom { forward = function(x) x:relu() end, backward = function(g) return g end }
local y = f(pl.ones({2}))
