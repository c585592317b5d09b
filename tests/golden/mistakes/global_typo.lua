local pl = require "perilune"
for i = 1, 3 do
  prnt(i)
end
