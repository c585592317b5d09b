local pl = require "perilune"
local nn = pl.nn
local layer = nn.Linear(65 / 2, 10)
