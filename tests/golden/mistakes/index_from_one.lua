local pl = require "perilune"
local x = pl.tensor {10, 20, 30}
for i = 1, #x do
  print(x[i]:item())
end
