local pl = require "perilune"
local loss = pl.ones({})
while loss > 0.5 do break end
