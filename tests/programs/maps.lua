-- Computes fused elementwise expressions: broadcasts, casts, strides, random numbers, many outputs.
local pl = require "perilune"

local cases = { { "f32", 3, 5 }, { "f32", 64, 1000 }, { "bf16", 1000, 17 }, { "f16", 64, 128 }, { "f64", 64, 33 } }
for _, case in ipairs(cases) do
  local dtype, rows, cols = case[1], case[2], case[3]
  local x, y = pl.randn({ rows, cols }):to(dtype), pl.randn({ rows, cols }):to(dtype)
  local row, col = pl.randn({ cols }):to(dtype), pl.randn({ rows }):to(dtype)
  pl.eval(x:gelu(), x:silu() * y, x:tanh() + row)
  pl.eval((x * 2 + y):relu():exp() / 3)
  pl.eval(x:transpose(0, 1) * col)
  pl.eval(x:flip(0):sigmoid())
  pl.eval(x:erf(), x:log1p(), x:sqrt(), x:rsqrt(), x:sin(), x:pow(3))
  pl.eval(pl.where(x:gt(y), x, y), x:maximum(y), x:clamp(-1, 1))
  pl.eval(pl.dropout(x, 0.1))
end
local x = pl.randn { 40, 50 }
for _, other in ipairs { "bf16", "f16", "f64", "i64", "i32", "u8", "bool" } do
  pl.eval(x:to(other), x:to(other):to("f32") + 1)
end
for _, dtype in ipairs { "i64", "i32", "u8" } do
  local n = pl.ones({ 40, 50 }):to(dtype)
  pl.eval(n + n * 3, n:eq(2), n:to("f32") / 7)
end
pl.eval(pl.rand { 100, 100 })
pl.eval(pl.randn { 1000 })
pl.eval(pl.arange(1000) * 2)
