local pl = require "perilune"
pl.step(3)
