local pl = require "perilune"
local w, g, m, v = pl.ones({2}), pl.ones({2}), pl.zeros({2}), pl.zeros({2})
local new = pl.adamw_update(w, g, m, v, { lr = 0.1, step = 1 })
local meta = pl.grad(new:sum(), { g })
