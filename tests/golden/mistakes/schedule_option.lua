local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local lr = optim.cosine { peak = 1e-3, steps = 100, warm_up = 10 }
