local pl = require "perilune"
local nn = pl.nn
local layer = nn.Linear { 64, 10 }
