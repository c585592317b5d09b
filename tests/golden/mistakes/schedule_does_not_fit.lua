local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local lr = optim.wsd { peak = 1e-3, steps = 100, warmup = 50, decay = 60 }
