-- Computes norms, softmax and losses, forward and backward, over short and long rows.
local pl = require "perilune"

local function both(y, wrt)
  pl.eval(y, pl.grad((y * y):sum(), wrt))
end

local cases = {
  { "f32", 7, 33 },
  { "f32", 256, 768 },
  { "f32", 4, 5000 },
  { "bf16", 256, 768 },
  { "bf16", 3, 50304 },
  { "f16", 64, 1024 },
  { "f64", 7, 33 },
}
for _, case in ipairs(cases) do
  local dtype, rows, cols = case[1], case[2], case[3]
  local x = pl.randn({ rows, cols }):to(dtype)
  local w, b = pl.ones({ cols }):to(dtype), pl.zeros({ cols }):to(dtype)
  both(pl.layer_norm(x, w, b), { x, w, b })
  both(pl.rms_norm(x, w), { x, w })
  both(pl.softmax(x, -1), { x })
  local loss = pl.cross_entropy(x, pl.zeros({ rows }, { dtype = "i64" }))
  pl.eval(loss, pl.grad(loss, { x }))
end
local image = pl.randn { 4, 16, 9, 9 }
both(pl.batch_norm(image, image:mean { 0, 2, 3 }, image:var { 0, 2, 3 }), { image })
