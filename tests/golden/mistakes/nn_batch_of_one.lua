local pl = require "perilune"
local nn = pl.nn
local norm = nn.BatchNorm1d(4)
local y = norm(pl.zeros({1, 4}))
