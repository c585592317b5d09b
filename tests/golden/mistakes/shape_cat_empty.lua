local pl = require "perilune"
local rows = {}
local x = pl.cat(rows, 0)
