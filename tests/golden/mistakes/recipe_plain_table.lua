local pl = require "perilune"

return { data = function() end, model = function() end, loss = function() end }
