local pl = require "perilune"
local y = pl.autocast("int8", function() return pl.zeros({2, 2}) end)
