local pl = require "perilune"
local nn = pl.nn
local attn = nn.MultiHeadAttention(100, 3)
