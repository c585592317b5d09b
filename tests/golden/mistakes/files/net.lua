local pl = require "perilune"

local net = {}

function net.build(width)
  return pl.zeros({ width, 2 }):matmul(pl.zeros({ 3, width }))
end

return net
