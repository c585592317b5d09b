local pl = require "perilune"
local nn = pl.nn
local layer = nn.LoRA(nn.ReLU())
