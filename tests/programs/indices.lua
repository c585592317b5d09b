-- Gathers, scatters, concatenates, pads and unfolds.
local pl = require "perilune"

for _, dtype in ipairs { "f32", "bf16", "f64", "i64", "u8" } do
  local x = pl.ones({ 40, 30 }):to(dtype)
  local ids = pl.zeros({ 25 }, { dtype = "i64" })
  local grid = pl.zeros({ 40, 5 }, { dtype = "i64" })
  pl.eval(x:index_select(0, ids))
  pl.eval(x:gather(1, grid), x:scatter(1, grid, x:narrow(1, 0, 5)))
  pl.eval(x:scatter_add(1, grid, x:narrow(1, 0, 5)), x:index_add(0, ids, x:narrow(0, 0, 25)))
  pl.eval(pl.cat({ x, x }, 0), pl.cat({ x, x:transpose(0, 1):reshape(40, 30) }, 1))
  pl.eval(pl.pad(x, { 1, 2, 3, 4 }))
end
local w, ids = pl.randn { 1000, 64 }, pl.zeros({ 8, 32 }, { dtype = "i64" })
local y = pl.embedding(w, ids)
pl.eval(y, pl.grad((y * y):sum(), { w }))
