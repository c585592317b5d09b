local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local model = nn.Linear(2, 1)
local opt = optim.SGD(model, { lr = function(step) if step > 10 then return 0.1 end end })
model(pl.ones({1, 2})):sum():backward()
opt:step()
