-- Computes attention by head size, dtype, mask, window, groups and documents, forward and backward.
local pl = require "perilune"

local function case(dtype, q, k, options)
  local query = pl.randn(q):to(dtype)
  local key, value = pl.randn(k):to(dtype), pl.randn(k):to(dtype)
  if options.documents then options.documents = pl.zeros({ q[1], q[3] }, { dtype = "i64" }) end
  local y = pl.scaled_dot_product_attention(query, key, value, options)
  pl.eval(y, pl.grad((y * y):sum(), { query, key, value }))
end

for _, dtype in ipairs { "f32", "bf16" } do
  for _, d in ipairs { 32, 64, 128 } do
    case(dtype, { 2, 4, 192, d }, { 2, 4, 192, d }, { is_causal = true })
  end
  case(dtype, { 1, 4, 100, 64 }, { 1, 4, 77, 64 }, {})
  case(dtype, { 2, 8, 256, 64 }, { 2, 2, 256, 64 }, { is_causal = true, enable_gqa = true })
  case(dtype, { 2, 4, 256, 64 }, { 2, 4, 256, 64 }, { is_causal = true, window = 50 })
  case(dtype, { 2, 4, 256, 64 }, { 2, 4, 256, 64 }, { is_causal = true, documents = true })
end
case("f16", { 2, 4, 192, 64 }, { 2, 4, 192, 64 }, { is_causal = true })
case("f64", { 2, 4, 192, 64 }, { 2, 4, 192, 64 }, { is_causal = true })
