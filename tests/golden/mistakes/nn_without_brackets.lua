local pl = require "perilune"
local nn = pl.nn
local model = nn.Sequential { nn.Linear(4, 4), nn.ReLU }
local y = model(pl.zeros({2, 4}))
