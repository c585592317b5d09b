-- Computes matrix products, linear layers, convolutions and pooling, forward and backward.
local pl = require "perilune"

local function both(y, wrt)
  pl.eval(y, pl.grad((y * y):sum(), wrt))
end

local sizes = { { 3, 5, 7 }, { 64, 64, 64 }, { 1, 768, 3072 }, { 200, 300, 100 } }
for _, dtype in ipairs { "f32", "bf16" } do
  for _, s in ipairs(sizes) do
    local a, b = pl.randn({ s[1], s[2] }):to(dtype), pl.randn({ s[2], s[3] }):to(dtype)
    both(a:matmul(b), { a, b })
    local w, bias = pl.randn({ s[3], s[2] }):to(dtype), pl.randn({ s[3] }):to(dtype)
    both(pl.linear(a, w, bias):gelu(), { a, w, bias })
  end
end
for _, dtype in ipairs { "f32", "bf16", "f16", "f64" } do
  local a, b = pl.randn({ 2, 12, 65, 64 }):to(dtype), pl.randn({ 2, 12, 64, 65 }):to(dtype)
  both(a:matmul(b), { a, b })
  local image, filter = pl.randn({ 4, 16, 28, 28 }):to(dtype), pl.randn({ 32, 16, 3, 3 }):to(dtype)
  both(pl.conv2d(image, filter, nil, { stride = 2, padding = 1 }):relu(), { image, filter })
  both(pl.max_pool2d(image, 3, { stride = 2, padding = 1 }), { image })
end
