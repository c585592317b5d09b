local pl = require "perilune"
x = pl.zeros({2})
