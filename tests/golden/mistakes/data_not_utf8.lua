local pl = require "perilune"
local data = pl.data
local text = data.text("files/latin1.txt")
