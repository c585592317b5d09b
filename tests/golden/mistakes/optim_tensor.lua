local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local w = pl.zeros({4})
local opt = optim.SGD({ w }, { lr = 0.1 })
