local pl = require "perilune"
print(#pl.zeros({}))
