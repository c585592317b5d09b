local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local w = pl.state(pl.zeros({4}))
local opt = optim.SGD({ w, w }, { lr = 0.1 })
