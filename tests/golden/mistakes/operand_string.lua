local pl = require "perilune"
local y = "2" * pl.zeros({2})
