local pl = require "perilune"
local text = string.dump(function() end)
