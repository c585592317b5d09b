-- optim/lion.lua: updates weights by Lion. Chen et al., Symbolic Discovery of Optimization Algorithms (2023).
--
-- w = w - lr (sign(beta1 m + (1 - beta1) g) + weight_decay w);  m = beta2 m + (1 - beta2) g
-- Every weight changes by lr, so use a rate 3 to 10 times smaller than AdamW's, and a decay as many times larger.

local base = require "perilune.optim.base"
local adam = require "perilune.optim.adam"

local rule = { name = "lion" } ---@class perilune.LionRule: perilune.Rule

function rule.slots(w)
  return { m = base.zeros(w) }
end

function rule.update(w, g, s, o, lr)
  local b1, b2 = o.betas[1], o.betas[2]
  local direction = (s.m * b1 + g * (1 - b1)):sign()
  w:assign(w * (1 - lr * o.weight_decay) - direction * lr)
  s.m:assign(s.m * b2 + g * (1 - b2))
end

---Makes Lion: steps of size lr along the sign of an averaged gradient. Chen et al. (2023).
---@param target perilune.Module|perilune.State[]|table[] model, list of States, or groups
---@param opts {lr?: number|perilune.Schedule, betas?: number[], weight_decay?: number, clip_norm?: number, clip_value?: number}? lr: learning rate, schedule or function of the step, 1e-4 by default; betas: decays of the update and of the average; weight_decay: decoupled; clip_norm: limit of the norm of all gradients together; clip_value: limit of each element of a gradient
---@return perilune.Optimizer
local function Lion(target, opts)
  return base.new("Lion", target, opts, { betas = { 0.9, 0.99 }, weight_decay = 0 }, nil, function(o)
    adam.check_betas("optim.Lion", o.betas)
    return rule, o
  end, 1e-4)
end

return { Lion = Lion, rule = rule }
