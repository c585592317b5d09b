local pl = require "perilune"
local data = pl.data
local rows = data.csv("files/car.csv")
