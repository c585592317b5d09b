local pl = require "perilune"
local t = setmetatable({}, { __gc = function() print("bye") end })
