local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local model = nn.Linear(2, 1)
local opt = optim.SGD({ model = model, { params = function(path) return path == "bias" end, lr = 0.1 } }, { lr = 0.2 })
