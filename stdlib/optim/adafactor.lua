-- optim/adafactor.lua: updates weights by Adafactor. Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory
-- Cost (2018).
--
-- The second moment of a matrix is factored into row and column means, so memory grows with rows + columns. There is no first
-- moment. Defaults and arithmetic are those of torch.optim.Adafactor: steps relative to the weights, rate min(lr, 1 / sqrt(t)),
-- update clipped to rms d.

local pl = require "perilune"
local base = require "perilune.optim.base"

local rule = { name = "adafactor" } ---@class perilune.AdafactorRule: perilune.Rule

---@param x perilune.Tensor
---@return perilune.Tensor
local function rms(x)
  return (x * x):mean():sqrt()
end

function rule.slots(w)
  local shape = w.shape
  if #shape < 2 then return { v = base.zeros(w) } end
  local row, column = {}, {}
  table.move(shape, 1, #shape, 1, row)
  table.move(shape, 1, #shape, 1, column)
  row[#row], column[#column - 1] = 1, 1
  return { row = base.zeros(w, row), column = base.zeros(w, column) }
end

function rule.uses_step() return true end

function rule.update(w, g, s, o, lr, step)
  local fresh = step ^ o.beta2_decay -- weight of this gradient in the second moment
  local tiny = w.dtype == "f64" and 2.220446049250313e-16 or 1.1920928955078125e-07
  local square = g * g
  local v ---@type perilune.Tensor
  if #w.shape < 2 then
    v = s.v * (1 - fresh) + square * fresh
    s.v:assign(v)
  else
    local row = s.row * (1 - fresh) + square:mean(-1, { keepdim = true }) * fresh
    local column = s.column * (1 - fresh) + square:mean(-2, { keepdim = true }) * fresh
    s.row:assign(row)
    s.column:assign(column)
    v = row * column / row:mean(-2, { keepdim = true }):clamp(tiny)
  end
  local update = g * v:clamp(tiny * tiny):rsqrt()
  local bounded = pl.is_tensor(step) and step:rsqrt():clamp(nil, lr) or math.min(lr, 1 / math.sqrt(step)) ---@type any
  local rate = rms(w):clamp(o.eps) * bounded
  local bound = (rms(update) / o.d):clamp(1)
  w:assign(w * (1 - lr * o.weight_decay) - update * (rate / bound))
end

---Makes Adafactor: adaptive rates with factored second moments. Shazeer and Stern (2018).
---@param target perilune.Module|perilune.State[]|table[] model, list of States, or groups
---@param opts {lr?: number|perilune.Schedule, beta2_decay?: number, eps?: number, d?: number, weight_decay?: number, clip_norm?: number, clip_value?: number}? lr: learning rate, schedule or function of the step, the largest rate, 1e-2 by default; beta2_decay: exponent of the decay of the second moment; eps: smallest root mean square of a weight to which a step is relative; d: largest root mean square of an update; weight_decay: decoupled; clip_norm: limit of the norm of all gradients together; clip_value: limit of each element of a gradient
---@return perilune.Optimizer
local function Adafactor(target, opts)
  local defaults = { beta2_decay = -0.8, eps = 1e-3, d = 1.0, weight_decay = 0 }
  return base.new("Adafactor", target, opts, defaults, nil, function(o) return rule, o end, 1e-2)
end

return { Adafactor = Adafactor, rule = rule }
