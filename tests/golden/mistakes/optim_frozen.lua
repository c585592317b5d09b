local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local layer = nn.Linear(4, 4)
for _, p in ipairs(layer:parameters()) do p.state.trainable = false end
local opt = optim.SGD(layer, { lr = 0.1 })
