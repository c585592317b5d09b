local pl = require "perilune"
error("the input is empty")
