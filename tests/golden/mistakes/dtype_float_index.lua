local pl = require "perilune"
local table_ = pl.zeros({10, 4})
local rows = table_:index_select(0, pl.tensor {0.0, 1.0})
