-- Reduces tensors along rows, along columns and completely, scans and sorts, in several dtypes.
local pl = require "perilune"

local cases = {
  { "f32", 5, 7 },
  { "f32", 64, 1000 },
  { "f32", 3, 20000 },
  { "f32", 20000, 3 },
  { "bf16", 64, 1000 },
  { "f16", 33, 65 },
  { "f64", 64, 100 },
  { "i64", 64, 100 },
  { "u8", 33, 65 },
}
for _, case in ipairs(cases) do
  local x = pl.ones({ case[2], case[3] }):to(case[1])
  for dim = 0, 1 do
    pl.eval(x:sum(dim))
    pl.eval(x:max(dim))
    pl.eval(x:cumsum(dim))
  end
  pl.eval(x:sum(), x:max())
  pl.eval(x:argmax(-1))
  pl.eval(x:argsort(-1))
end
for _, shape in ipairs { { 64, 1000 }, { 8, 33, 65 }, { 100000 } } do
  local x = pl.randn(shape)
  pl.eval(x:var(-1), x:mean(-1))
  pl.eval((x:exp() * 2 + 1):sum(-1))
  pl.eval(x:transpose(0, -1):sum(0))
  pl.eval(x:logsumexp(-1))
end
