local pl = require "perilune"
local net = require "files.net"
print(net.build(3))
