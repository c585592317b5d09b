local pl = require "perilune"
local y = pl.zeros({2}) + {1, 2}
