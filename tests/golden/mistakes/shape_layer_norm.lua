local pl = require "perilune"
local nn = pl.nn
local norm = nn.LayerNorm(32)
local y = norm(pl.zeros({4, 16}))
