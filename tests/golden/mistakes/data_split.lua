local pl = require "perilune"
local data = pl.data
local set = data.tensors { x = pl.zeros({10, 2}) }
local train, valid = set:split("train", 0.8, 1), set:split("valid", 0.3, 1)
