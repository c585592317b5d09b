local pl = require "perilune"
local nn = pl.nn
local rnn = nn.GRU(8, 16, { batch_first = true })
local y = rnn(pl.zeros({4, 10, 6}))
