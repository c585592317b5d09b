-- gradcheck.lua: tests gradients against central finite differences: pl.gradcheck.
--
--   pl.gradcheck(function(x, w) return (x:matmul(w)):tanh() end, { pl.randn({2, 3}), pl.randn({3, 4}) })
--
-- Inputs are converted to f64; constants in the function should not convert them back to f32. Each element of each input is
-- perturbed by +-eps, two evaluations per element, so use small tensors. The check fails at a kink (relu at 0), where the one-sided
-- derivatives differ.

local pl = require "perilune"
local check = require "perilune.check"

local op = "gradcheck"

---Formats flat position `k` of a shape as coordinates: {1, 0, 2}.
local function place(shape, k)
  local at = {}
  for d = #shape, 1, -1 do
    at[d] = tostring(k % shape[d])
    k = k // shape[d]
  end
  return "{" .. table.concat(at, ", ") .. "}"
end

---Reduces the results of `fn` to a scalar: a sum with fixed, distinct weights in [0.5, 1.5].
---@param fn fun(...: perilune.Tensor): perilune.Tensor ...
---@param inputs perilune.Tensor[]
---@return perilune.Tensor
local function scalar(fn, inputs)
  local sum ---@type any
  local results = { fn(table.unpack(inputs --[[@as any]])) }
  for i, y in ipairs(results) do
    if not pl.is_tensor(y) then pl.error(op, ("result %d of the function is %s"):format(i, check.show(y)), "it must return tensors") end
    if y.dtype == "f64" or y.dtype == "f32" then
      local n = y:numel()
      local weights = (pl.arange(n, { dtype = "f64" }) * 0.618034 + 0.31 * i) % 1 + 0.5
      local part = (y:reshape(n) * weights):sum()
      sum = sum and sum + part or part
    end
  end
  if not sum then pl.error(op, "the function returns no float tensor", "return the result to differentiate, in f32 or f64") end
  return sum
end

---Compares gradients with finite differences. Returns true, or raises with the element of largest error.
---@param fn fun(...: perilune.Tensor): perilune.Tensor ...
---@param inputs perilune.Tensor|perilune.Tensor[] floats; of a State its current value
---@param opts {eps?: number, tolerance?: number}? eps: 1e-6; tolerance: 1e-5, relative to max(1, |gradient|)
---@return boolean
local function gradcheck(fn, inputs, opts)
  if not check.is(fn, "function") then pl.error(op, "fn is " .. check.show(fn), "pl.gradcheck(function(x) ... end, { x })") end
  if pl.is_tensor(inputs) then inputs = { inputs --[[@as perilune.Tensor]] } end
  ---@cast inputs perilune.Tensor[]
  if type(inputs) ~= "table" or #inputs == 0 then pl.error(op, "inputs is " .. check.show(inputs), "a list of tensors: { x, w }") end
  local o = check.options(op, opts, { eps = 1e-6, tolerance = 1e-5 })
  if o.eps <= 0 then pl.error(op, ("eps is %g, but must be above 0"):format(o.eps)) end

  local wide = {}
  for i, x in ipairs(inputs) do
    if not pl.is_tensor(x) then pl.error(op, ("input %d is %s"):format(i, check.show(x)), "inputs must be tensors") end
    if x.dtype:sub(1, 1) ~= "f" and x.dtype ~= "bf16" then
      pl.error(op, ("input %d is %s, which has no gradient"):format(i, x.dtype), "let the function close over it instead")
    end
    wide[i] = x:detach():to("f64") + 0
  end
  pl.eval(table.unpack(wide))

  local grads = { pl.grad(scalar(fn, wide), wide, { allow_unused = true }) }
  local worst = { error = -1.0 }
  for i, x in ipairs(wide) do
    local shape, n = x.shape, x:numel()
    local given = grads[i] and grads[i]:reshape(n):tolist() or {}
    local flat = x:reshape(n)
    local position = pl.arange(n)
    for k = 0, n - 1 do
      local step = position:eq(k):to("f64") * o.eps
      local value = {}
      for side, moved in ipairs { flat + step, flat - step } do
        local changed = table.move(wide, 1, #wide, 1, {})
        changed[i] = moved:reshape(shape)
        value[side] = pl.no_grad(scalar, fn, changed):item()
      end
      local numeric, analytic = (value[1] - value[2]) / (2 * o.eps), given[k + 1] or 0
      local error = math.abs(numeric - analytic) / math.max(1, math.abs(numeric), math.abs(analytic))
      if error ~= error then error = math.huge end
      if error > worst.error then
        worst = { error = error, input = i, at = place(shape, k), numeric = numeric, analytic = analytic }
      end
    end
  end
  if worst.error > o.tolerance then
    pl.error(op, ("gradient of input %d at %s is %.8g, finite differences give %.8g (error %.2g, tolerance %.2g)"):format(
      worst.input, worst.at, worst.analytic, worst.numeric, worst.error, o.tolerance),
      "a wrong backward, a kink at this point, or a function that draws new random numbers at each call")
  end
  return true
end

return gradcheck
