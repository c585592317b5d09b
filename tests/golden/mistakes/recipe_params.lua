local pl = require "perilune"
local recipe = pl.recipe { name = "r", params = 100 }
return recipe
