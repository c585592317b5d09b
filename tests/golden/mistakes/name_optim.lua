local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local opt = optim.Adamw(nn.Linear(4, 4), { lr = 1e-3 })
