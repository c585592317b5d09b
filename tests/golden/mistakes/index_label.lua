local pl = require "perilune"
local logits = pl.zeros({4, 10})
local labels = pl.tensor {1, 2, 3, 10}     -- 10 classes are 0 to 9
local loss = pl.cross_entropy(logits, labels)
print(loss:item())
