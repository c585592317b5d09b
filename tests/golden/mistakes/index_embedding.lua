local pl = require "perilune"
local nn = pl.nn
local words = nn.Embedding(10, 4)
local ids = pl.tensor {1, 99, 3}
local x = words(ids)                       -- recorded here
local y = x:sum()
print(y:item())                            -- evaluated here
