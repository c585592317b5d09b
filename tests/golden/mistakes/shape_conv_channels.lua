local pl = require "perilune"
local images, weight = pl.zeros({8, 3, 32, 32}), pl.zeros({16, 1, 3, 3})
local y = pl.conv2d(images, weight)
