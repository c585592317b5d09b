local pl = require "perilune"
local nn = pl.nn
local act = nn.GELU { approximate = "sigmoid" }
