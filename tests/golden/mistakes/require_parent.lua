local pl = require "perilune"
local net = require "../shared/net"
