local pl = require "perilune"
error({ code = 7 })
