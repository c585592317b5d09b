local pl = require "perilune"
pl.save("weights.bin", { w = pl.zeros({2}) })
