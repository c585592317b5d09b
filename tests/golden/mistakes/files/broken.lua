local net = {}
function net.build(width)
  return width +
end
return net
