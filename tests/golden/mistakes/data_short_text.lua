local pl = require "perilune"
local data = pl.data
local text = data.text("files/short.txt")
local windows = text:windows { length = 64, batch = 2 }
