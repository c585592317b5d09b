-- kernels/lab/rows_bits.lua: prints checksums of norms, softmax, losses and column sums for many shapes, to
-- detect any change of a result bit
--
-- On a GPU, run it without options, with --set apart=true (each as a separate step) and with PERILUNE_FUSION=0 (each primitive
-- as a separate kernel). The three outputs must be equal, byte for byte:
--
--     perilune run kernels/lab/rows_bits.lua --device cuda [--set apart=true]

local pl = require "perilune"
local cfg = pl.params { apart = false }
pl.seed(7)
---@param y perilune.Tensor
---@param r perilune.Tensor
---@return perilune.Tensor
local function mix(y, r) return (y:to("f64") * r:to("f64")):sum() end
for _, dt in ipairs { "bf16", "f32", "f16" } do
  local shapes = dt == "f16" and { { 500, 50304 }, { 600, 20000 }, { 3000, 4096 } } or {
    { 700, 50304 }, { 600, 50257 }, { 900, 20000 }, { 3000, 4096 }, { 5000, 768 },
    { 2999, 1000 }, { 1500, 3072 }, { 4001, 300 }, { 3000, 1536 }, { 20000, 64 },
  }
  for _, s in ipairs(shapes) do
    local R, C = s[1], s[2] ---@type integer, integer
    pl.seed(R * 100003 + C)
    ---@type any, any, any
    local x, w, b = pl.eval((pl.randn { R, C } * 3):to(dt), pl.randn { C }:to(dt), pl.randn { C }:to(dt))
    ---@type any, any
    local g, t = pl.eval(pl.randn { R, C }:to(dt), pl.randint(0, C, { R }))
    local fns = {
      function() return pl.layer_norm(x, w, b) end,
      function() return pl.rms_norm(x, w) end,
      function() return x:softmax(-1) end,
      function() return pl.cross_entropy(x, t) end,
      function() return pl.grad((pl.layer_norm(x, w, b) * g):sum(), { x, w, b }) end,
      function() return pl.grad((pl.rms_norm(x, w) * g):sum(), { x, w }) end,
      function()
        local y = x:softmax(-1) * g ---@type any
        return pl.grad(y:sum(), { x })
      end,
      function() return pl.grad(pl.cross_entropy(x, t), { x }) end,
      function()
        local h = x * 2 ---@type any
        return h, h:sum(0)
      end,
      function()
        local h = x:relu() ---@type any
        return h:sum(0), h:sum(1)
      end,
      function() return pl.grad(pl.cross_entropy(x, t, { label_smoothing = 0.1 }), { x }) end,
      function()
        local hit = pl.arange(C):eq(t:unsqueeze(1)) ---@type any
        local below = x - x:amax(-1, { keepdim = true }) ---@type any
        local e = below:exp()
        return pl.where(hit, x * 2, e), pl.where(hit, e, 0):sum(-1), e:sum(-1), x:amin(-1)
      end,
    }
    local out = {}
    if cfg.apart then
      for _, f in ipairs(fns) do for _, o in ipairs { pl.step(f) } do out[#out + 1] = o end end
    else
      out = { pl.step(function()
        local all = {}
        for _, f in ipairs(fns) do for _, o in ipairs { f() } do all[#all + 1] = o end end
        return table.unpack(all)
      end) }
    end
    local line = {}
    for _, o in ipairs(out) do
      local v = o ---@type any
      local n = o:numel()
      if n == R * C then v = mix(o, g) elseif n == C then v = mix(o, w) elseif n == R then v = o:to("f64"):sum() end
      line[#line + 1] = ("%.17g"):format(v:item())
    end
    print(dt, R, C, table.concat(line, " "))
  end
end
