local pl = require "perilune"
local ids = pl.state(pl.tensor {1, 2, 3}, { trainable = true })
