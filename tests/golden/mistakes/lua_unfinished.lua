local pl = require "perilune"
local function f()
  return 1
