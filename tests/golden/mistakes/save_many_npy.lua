local pl = require "perilune"
pl.save("both.npy", { a = pl.zeros({2}), b = pl.zeros({2}) })
