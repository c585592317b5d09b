local pl = require "perilune"
local data = require "perilune.dat"
