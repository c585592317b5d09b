local pl = require "perilune"
local data = pl.data
local text = data.text("files/short.txt")
print(text.vocab:decode({ 0, 1, 400 }))
