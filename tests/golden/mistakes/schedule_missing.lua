local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local lr = optim.cosine { peak = 1e-3, warmup = 10 }
