local pl = require "perilune"
pl.step(function()
  pl.step(function() return pl.ones({}) end)
end)
