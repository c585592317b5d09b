local pl = require "perilune"
local logp = pl.randn({3, 4}):log_softmax(-1)
local labels = pl.tensor {0, -1, 3}
local loss = pl.nll_loss(logp, labels, { ignore_index = -2 })
print(loss)
