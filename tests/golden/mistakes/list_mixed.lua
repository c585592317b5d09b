local pl = require "perilune"
local x = pl.tensor {{1, 2}, 3}
