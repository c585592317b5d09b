-- kernels/lab/sanitize.lua: runs every hand-written kernel at small and edge sizes under compute-sanitizer
--
--     compute-sanitizer --tool memcheck perilune run kernels/lab/sanitize.lua --device cuda
--
-- and with racecheck and synccheck (initcheck does not track what copies write). `--set only=attention` runs one part,
-- `--set precision=tf32` computes f32 products in TF32. Results are computed but not checked here (tests/tests/ops.rs
-- does that); the tool reports errors.

local pl = require "perilune"
local cfg = pl.params { only = "", precision = "f32" }
pl.seed(1)

local function rand(shape, dtype) return pl.randn(shape):to(dtype or "f32") end

---Computes the gradients of `fn(...)` with respect to its float arguments, and the result itself.
local function both(fn, ...)
  local inputs = {}
  for i = 1, select("#", ...) do inputs[i] = pl.eval((select(i, ...))) end
  local out = fn(table.unpack(inputs))
  local floats = {}
  for _, x in ipairs(inputs) do
    if x.dtype == "f32" or x.dtype == "bf16" or x.dtype == "f16" or x.dtype == "f64" then floats[#floats + 1] = x end
  end
  pl.eval(out, pl.grad((out:to("f32") * rand(out.shape)):sum(), floats))
end

local parts = {}

function parts.attention()
  local documents = pl.tensor { { 0, 0, 0, 1, 1 }, { 2, 2, 3, 3, 3 } }
  for _, dtype in ipairs { "bf16", "f16", "f32" } do
    for _, d in ipairs { 32, 64, 96, 128, 256 } do
      local t = d == 256 and 137 or 201
      local split = documents:repeat_interleave((t + 4) // 5, 1):narrow(1, 0, t)
      for _, c in ipairs { {}, { causal = true }, { causal = true, window = 50 }, { causal = true, documents = split } } do
        both(function(q, k, v)
          return pl.scaled_dot_product_attention(q, k, v,
            { is_causal = c.causal, window = c.window, documents = c.documents, enable_gqa = true })
        end,
          rand({ 2, 4, t, d }, dtype), rand({ 2, 2, t, d }, dtype), rand({ 2, 2, t, d }, dtype))
      end
    end
    both(pl.scaled_dot_product_attention, rand({ 1, 2, 3, 64 }, dtype), rand({ 1, 2, 300, 64 }, dtype), rand({ 1, 2, 300, 64 }, dtype))
  end
end

function parts.grouped()
  for _, dtype in ipairs { "bf16", "f16", "f32", "f64" } do
    for _, c in ipairs { { 512, 128, 256, { 100, 100, 300, 500 } }, { 70, 24, 40, { 0, 1, 70, 70 } }, { 33, 7, 5, { 5, 9, 9, 20 } } } do
      local rows, k, n, ends = table.unpack(c)
      both(function(x, w) return x:grouped_matmul(w, pl.tensor(ends)) end, rand({ rows, k }, dtype), rand({ 4, k, n }, dtype))
    end
  end
end

function parts.products()
  for _, dtype in ipairs { "f64", "f32", "bf16" } do
    both(function(x, y) return x:matmul(y) end, rand({ 65, 33 }, dtype), rand({ 33, 17 }, dtype))
    both(function(x, y) return x:matmul(y) end, rand({ 3, 9, 5 }, dtype), rand({ 3, 5, 7 }, dtype))
    -- The planner pads these to whole rows.
    both(function(x, y) return x:matmul(y):log_softmax(-1) end, rand({ 256, 192 }, dtype), rand({ 192, 5003 }, dtype))
  end
  local a, b = pl.randint(-9, 9, { 65, 33 }), pl.randint(-9, 9, { 33, 17 })
  pl.eval(a:matmul(b), a:to("i32"):matmul(b:to("i32")))
end

function parts.rows()
  for _, dtype in ipairs { "bf16", "f32" } do
    for _, n in ipairs { 1, 7, 300, 1600, 5000, 50257 } do
      local w, b = rand({ n }, dtype), rand({ n }, dtype)
      both(function(x, a, c) return x:layer_norm(a, c) end, rand({ 21, n }, dtype), w, b)
      both(function(x, a) return x:rms_norm(a) end, rand({ 21, n }, dtype), w)
      both(function(x) return x:softmax(-1) end, rand({ 21, n }, dtype))
      local y = pl.eval(pl.randint(0, n, { 21 }))
      both(function(x) return pl.cross_entropy(x, y) end, rand({ 21, n }, dtype))
    end
    both(function(x, w, b) return x:linear(w, b):gelu { approximate = "tanh" } end, rand({ 300, 64 }, dtype), rand({ 500, 64 }, dtype), rand({ 500 }, dtype))
    both(function(x) return x:sum(0) end, rand({ 4, 70000 }, dtype))
    both(function(x) return x:sum(0) end, rand({ 3000, 33 }, dtype))
  end
end

function parts.indices()
  local i = pl.eval(pl.randint(0, 50, { 300 }))
  for _, dtype in ipairs { "bf16", "f32" } do
    both(function(w) return w:index_select(0, i) end, rand({ 50, 37 }, dtype))
    both(function(x, v) return x:index_add(0, i, v) end, rand({ 50, 16 }, dtype), rand({ 300, 16 }, dtype))
    local at = pl.eval(pl.randint(0, 9, { 21, 5 }))
    both(function(x) return x:gather(1, at) end, rand({ 21, 9 }, dtype))
    both(function(x, v) return x:scatter_add(1, at, v) end, rand({ 21, 9 }, dtype), rand({ 21, 5 }, dtype))
  end
  pl.eval(rand { 40, 33 }:gt(0.5):nonzero(), (rand { 300 }:masked_select(rand { 300 }:gt(0))))
end

function parts.movement()
  for _, dtype in ipairs { "bf16", "f32", "f64" } do
    both(function(x, y) return pl.cat({ x, y }, 1) end, rand({ 33, 17 }, dtype), rand({ 33, 8 }, dtype))
    both(function(x) return x:pad { 1, 2, 3, 0 } end, rand({ 5, 33, 17 }, dtype))
    both(function(x) return x:pad { 0, 7 } end, rand({ 64, 4097 }, dtype))
    both(function(x) return x:permute(2, 0, 1):contiguous() * 1.5 end, rand({ 33, 65, 40 }, dtype))
    both(function(x) return x:flip(-1):roll(3, 0) end, rand({ 33, 17 }, dtype))
  end
end

function parts.images()
  for _, dtype in ipairs { "bf16", "f32" } do
    both(function(x, w) return x:conv2d(w, { stride = 2, padding = 3 }) end, rand({ 2, 3, 19, 23 }, dtype), rand({ 8, 3, 7, 7 }, dtype))
    both(function(x, w) return x:conv2d(w, { padding = 1, groups = 4 }) end, rand({ 2, 8, 9, 9 }, dtype), rand({ 8, 2, 3, 3 }, dtype))
    -- With a bias: channels in a multiple of 8, others, groups of many channels, groups of few.
    for _, c in ipairs { { 16, 24, 1 }, { 13, 20, 1 }, { 54, 60, 3 }, { 16, 16, 16 }, { 6, 9, 3 } } do
      local i, o, groups = c[1], c[2], c[3]
      local w = rand({ o, i // groups, 3, 3 }, dtype)
      both(function(x, w, b) return x:conv2d(w, b, { padding = 1, groups = groups }) end, rand({ 2, i, 9, 7 }, dtype), w, rand({ o }, dtype))
      both(function(x, w, b) return x:conv_transpose2d(w, b, { stride = 2, groups = groups }) end, rand({ 2, o, 9, 7 }, dtype), w, rand({ i }, dtype))
    end
    both(function(x, w) return x:conv1d(w, { padding = 1 }) end, rand({ 2, 16, 33001 }, dtype), rand({ 33, 16, 3 }, dtype))
    both(function(x) return (x:max_pool2d(3, { stride = 2, padding = 1 })) end, rand({ 2, 5, 13, 11 }, dtype))
    both(function(x) return x:avg_pool2d(3, { stride = 2 }) end, rand({ 2, 5, 13, 11 }, dtype))
  end
end

function parts.orders()
  for _, n in ipairs { 1, 33, 1000, 4096, 20000 } do
    local x = pl.eval(rand { 5, n })
    pl.eval((x:sort(-1)), (x:argsort(-1)), x:cumsum(-1), x:argmax(-1), (x:to("f64"):cumsum(0)))
    if n >= 33 then pl.eval((x:topk(7, -1))) end
  end
  pl.eval((pl.randint(0, 100, { 3000 }):unique()), (pl.randint(0, 1 << 30, { 70000 }):sort(0)))
end

pl.autocast(cfg.precision, function()
  for _, name in ipairs { "attention", "grouped", "products", "rows", "indices", "movement", "images", "orders" } do
    if cfg.only == "" or cfg.only == name then
      parts[name]()
      print(name)
    end
  end
end)
