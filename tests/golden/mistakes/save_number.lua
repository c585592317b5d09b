local pl = require "perilune"
pl.save("weights.safetensors", { w = pl.zeros({2}), step = 3 })
