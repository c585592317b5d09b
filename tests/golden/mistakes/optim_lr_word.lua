local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local opt = optim.SGD(nn.Linear(4, 4), { lr = "fast" })
