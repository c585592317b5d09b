local pl = require "perilune"
local recipe = pl.recipe { name = "r", params = { 1e-3, 100 } }
return recipe
