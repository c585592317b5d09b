local pl = require "perilune"
local net = require "mynet"
