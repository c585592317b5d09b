local pl = require "perilune"
local data = pl.data
local rows = data.csv("files/cars.csv")
local set = rows:tensors { y = { column = "wieght" } }
