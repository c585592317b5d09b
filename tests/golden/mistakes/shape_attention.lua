local pl = require "perilune"
local q, k = pl.zeros({2, 4, 8, 16}), pl.zeros({2, 3, 8, 16})
local y = pl.scaled_dot_product_attention(q, k, k)
