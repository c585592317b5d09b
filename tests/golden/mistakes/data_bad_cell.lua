local pl = require "perilune"
local data = pl.data
local rows = data.csv("files/bad_cell.csv")
local set = rows:tensors { x = { columns = {0, 2} } }
