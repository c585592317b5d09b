local pl = require "perilune"
local nn = pl.nn
local layer = nn.Linear(64, 10)
local y = layer(pl.zeros({8, 32}))
