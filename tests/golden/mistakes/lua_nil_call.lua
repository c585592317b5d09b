local pl = require "perilune"
local model = { forward = nil }
model.forward(pl.zeros({2}))
