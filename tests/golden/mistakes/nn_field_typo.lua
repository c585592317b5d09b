local pl = require "perilune"
local nn = pl.nn
local m = { first = nn.Linear(4, 4) }
function m:forward(x)
  local h = self.frist(x)
  return h:relu()
end
print(nn.module(m)(pl.ones({1, 4})))
