local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local model = nn.Linear(4, 4)
local opt = optim.SGD(model, { lr = 0.1 })
model(pl.ones({2, 4})):sum():backward()
opt.step()
