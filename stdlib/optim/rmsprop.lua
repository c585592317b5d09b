-- optim/rmsprop.lua: updates weights by RMSprop, as torch.optim.RMSprop. Tieleman and Hinton, Lecture 6.5 (2012).
--
-- v = alpha v + (1 - alpha) g^2;  w = w - lr g / (sqrt(v) + eps); centered: v - mean^2 instead of v.

local base = require "perilune.optim.base"

local rule = { name = "rmsprop" } ---@class perilune.RmspropRule: perilune.Rule

function rule.slots(w, o)
  local slots = { v = base.zeros(w) }
  if o.centered then slots.mean = base.zeros(w) end
  if o.momentum ~= 0 then slots.momentum = base.zeros(w) end
  return slots
end

function rule.update(w, g, s, o, lr)
  if o.weight_decay ~= 0 then g = g + w * o.weight_decay end
  local v = s.v * o.alpha + g * g * (1 - o.alpha)
  s.v:assign(v)
  if o.centered then
    local mean = s.mean * o.alpha + g * (1 - o.alpha)
    s.mean:assign(mean)
    v = v - mean * mean
  end
  local update = g / (v:sqrt() + o.eps)
  if o.momentum ~= 0 then
    update = s.momentum * o.momentum + update
    s.momentum:assign(update)
  end
  w:assign(w - update * lr)
end

---@class perilune.RMSpropOptions
---@field lr number|perilune.Schedule? learning rate, schedule or function of the step; 1e-2 by default
---@field alpha number? decay of the second moment, 0.99 by default
---@field eps number? added to the root mean square
---@field momentum number? decay of the sum of updates
---@field centered boolean? whether the variance takes the place of the mean square
---@field weight_decay number? L2, added to the gradient
---@field clip_norm number? limit of the norm of all gradients together
---@field clip_value number? limit of each element of a gradient

---Makes RMSprop: the gradient divided by its root mean square. Tieleman and Hinton (2012).
---@param target perilune.Module|perilune.State[]|table[] model, list of States, or groups
---@param opts perilune.RMSpropOptions?
---@return perilune.Optimizer
local function RMSprop(target, opts)
  local defaults = { alpha = 0.99, eps = 1e-8, momentum = 0, centered = false, weight_decay = 0 }
  return base.new("RMSprop", target, opts, defaults, nil, function(o) return rule, o end, 1e-2)
end

return { RMSprop = RMSprop, rule = rule }
