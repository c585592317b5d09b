local pl = require "perilune"
local recipe = pl.recipe { params = { steps = 3 } }
return recipe
