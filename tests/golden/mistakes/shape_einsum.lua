local pl = require "perilune"
local y = pl.einsum("ij,jk->ik", {pl.zeros({2, 3}), pl.zeros({4, 5})})
