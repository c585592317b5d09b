local pl = require "perilune"
local weights = pl.load("model.pt")
