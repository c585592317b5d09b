local pl = require "perilune"
local predicted, y = pl.zeros({32, 1}), pl.zeros({32})
local loss = pl.mse_loss(predicted, y)
