local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local opt = optim.AdamW(nn.Linear(4, 4), { learning_rate = 1e-3 })
