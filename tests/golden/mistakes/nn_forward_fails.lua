local pl = require "perilune"
local nn = pl.nn
local function Block(width)
  local m = { a = nn.Linear(width, width), b = nn.Linear(2 * width, width) }
  function m:forward(x)
    return self.b(self.a(x))
  end
  return nn.module(m)
end

local model = nn.Sequential { nn.Linear(8, 16), Block(16) }
local function loss_of(x)
  return model(x):mean()
end
print(loss_of(pl.zeros({4, 8})))
