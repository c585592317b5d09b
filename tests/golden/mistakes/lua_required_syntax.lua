local pl = require "perilune"
local net = require "files.broken"
