local pl = require "perilune"
local f, why = load("\27Lua\x54\0")
assert(f, why)
