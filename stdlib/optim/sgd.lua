-- optim/sgd.lua: updates weights by stochastic gradient descent with momentum, as torch.optim.SGD.
--
-- Sutskever et al., On the importance of initialization and momentum in deep learning (2013), in PyTorch's form:
-- v = momentum v + (1 - dampening) g;  w = w - lr v   (Nesterov: w = w - lr (g + momentum v)).

local pl = require "perilune"
local base = require "perilune.optim.base"

local rule = { name = "sgd" } ---@class perilune.SgdRule: perilune.Rule

function rule.slots(w, o)
  return o.momentum ~= 0 and { momentum = base.zeros(w) } or {}
end

-- The first gradient of a parameter is not dampened.
function rule.uses_step(o)
  return o.momentum ~= 0 and o.dampening ~= 0
end

function rule.update(w, g, s, o, lr, step)
  if o.weight_decay ~= 0 then g = g + w * o.weight_decay end
  if o.momentum ~= 0 then
    local keep = 1 - o.dampening ---@type any
    if pl.is_tensor(step) then keep = pl.where(step:eq(1), 1, keep) elseif step == 1 then keep = 1 end
    local v = s.momentum * o.momentum + g * keep
    s.momentum:assign(v)
    g = o.nesterov and g + v * o.momentum or v
  end
  w:assign(w - g * lr)
end

---@class perilune.SGDOptions
---@field lr number|perilune.Schedule? learning rate, schedule or function of the step; 1e-3 by default
---@field momentum number? decay of the sum of gradients
---@field dampening number? share of a gradient that is left out of the momentum
---@field nesterov boolean? whether the step looks ahead along the momentum
---@field weight_decay number? L2, added to the gradient
---@field clip_norm number? limit of the norm of all gradients together
---@field clip_value number? limit of each element of a gradient

---Makes stochastic gradient descent, optionally with (Nesterov) momentum. Sutskever et al. (2013).
---@param target perilune.Module|perilune.State[]|table[] model, list of States, or groups
---@param opts perilune.SGDOptions?
---@return perilune.Optimizer
local function SGD(target, opts)
  local defaults = { momentum = 0, dampening = 0, nesterov = false, weight_decay = 0 }
  local self = base.new("SGD", target, opts, defaults, nil, function(o)
    if o.nesterov and (o.momentum == 0 or o.dampening ~= 0) then
      pl.error("optim.SGD", ("nesterov with momentum = %g and dampening = %g"):format(o.momentum, o.dampening),
        "Nesterov needs a momentum, such as 0.9, and dampening = 0")
    end
    return rule, o
  end, 1e-3)
  return self
end

return { SGD = SGD, rule = rule }
