local pl = require "perilune"
local logits, labels = pl.zeros({32, 10}), pl.zeros({16}, {dtype = "i64"})
local loss = pl.cross_entropy(logits, labels)
