local pl = require "perilune"
local weights = pl.load("files/model.safetensors")
