local pl = require "perilune"
local loss = pl.mse_loss(pl.zeros({4}), pl.zeros({4}), { reduction = "average" })
