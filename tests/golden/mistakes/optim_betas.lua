local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local opt = optim.Adam(nn.Linear(4, 4), { betas = { 0.9, 1.0 } })
