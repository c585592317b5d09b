local pl = require "perilune"
pl.seed("lucky")
