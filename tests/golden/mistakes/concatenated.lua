local pl = require "perilune"
local loss = pl.zeros({})
print("loss: " .. loss)
