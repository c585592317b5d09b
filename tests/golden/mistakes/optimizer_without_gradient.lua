local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local w = pl.state(pl.ones({2}))
local opt = optim.SGD({ w }, { lr = 0.1 })
opt:step()
