local pl = require "perilune"
local data = pl.data
local set = data.tensors { x = pl.zeros({10, 2}), y = pl.zeros({9}) }
