local pl = require "perilune"
local nn = pl.nn
local y = nn.CrossEntropyLoss()
