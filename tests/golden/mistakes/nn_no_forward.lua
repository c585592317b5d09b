local pl = require "perilune"
local nn = pl.nn
local m = nn.module { w = pl.state(pl.zeros({2})) }
local y = m(pl.zeros({2}))
