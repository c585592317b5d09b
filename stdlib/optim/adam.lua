-- optim/adam.lua: updates weights by Adam and AdamW, through one fused op.
--
-- Kingma and Ba, Adam (2015); Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019). `pl.adamw_update` computes in
-- f32, with bias correction. The weight decay of Adam is L2: it adds weight_decay * w to the gradient.

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local check = require "perilune.check"
local base = require "perilune.optim.base"

local function slots(w)
  return { m = base.zeros(w), v = base.zeros(w) }
end

-- For each parameter: w, m, v = pl.adamw_update(w, g, s.m, s.v, options), assigned. One native call records all of them.
local function fused(batch, grads, lr, step, weight_decay)
  if not batch.lists then
    local w, m, v = {}, {}, {}
    for i, p in ipairs(batch.params) do w[i], m[i], v[i] = p.state, p.slots.m, p.slots.v end
    batch.lists = { w = native.state_list(w), m = native.state_list(m), v = native.state_list(v) }
  end
  local of, o = batch.lists, batch.options
  native.adamw(of.w, of.m, of.v, grads, batch.first,
    { lr = lr, beta1 = o.betas[1], beta2 = o.betas[2], eps = o.eps, weight_decay = weight_decay, step = step })
end

-- The bias correction of a parameter depends on the number of its updates.
local function uses_step() return true end

local adamw = { name = "adamw", slots = slots, uses_step = uses_step }
function adamw.update_all(batch, grads, lr, step)
  fused(batch, grads, lr, step, batch.options.weight_decay)
end

local adam = { name = "adam", slots = slots, uses_step = uses_step }
function adam.update_all(batch, grads, lr, step)
  local decay = batch.options.weight_decay
  if decay ~= 0 then
    grads = grads:copy()
    for i, p in ipairs(batch.params) do
      local k = batch.first + i - 1
      grads:set(k, grads:get(k) + p.state * decay)
    end
  end
  fused(batch, grads, lr, step, 0)
end

---Checks that betas is { beta1, beta2 }, both in [0, 1).
---@param op string
---@param betas number[]
local function check_betas(op, betas)
  if type(betas) ~= "table" or #betas ~= 2 then
    pl.error(op, "betas is " .. check.show(betas), "give both: betas = { 0.9, 0.999 }")
  end
  for i, beta in ipairs(betas) do
    if type(beta) ~= "number" or beta < 0 or beta >= 1 then
      pl.error(op, ("betas[%d] is %s, but must be a number from 0 to below 1"):format(i, check.show(beta)))
    end
  end
end

---@class perilune.AdamOptions
---@field lr number|perilune.Schedule? learning rate, schedule or function of the step; 1e-3 by default
---@field betas number[]? decays of the mean and of the mean square; { 0.9, 0.999 } by default
---@field eps number? added to the root mean square; 1e-8 by default
---@field weight_decay number? L2 for Adam, 0 without it; decoupled for AdamW, 0.01 without it
---@field clip_norm number? limit of the norm of all gradients together
---@field clip_value number? limit of each element of a gradient

local function new(kind, rule, weight_decay, target, opts)
  local defaults = { betas = { 0.9, 0.999 }, eps = 1e-8, weight_decay = weight_decay }
  return base.new(kind, target, opts, defaults, nil, function(o)
    check_betas("optim." .. kind, o.betas)
    return rule, o
  end, 1e-3)
end

---Makes Adam: mean gradient divided by the root mean square, weight decay as L2. Kingma and Ba (2015).
---@param target perilune.Module|perilune.State[]|table[] model, list of States, or groups
---@param opts perilune.AdamOptions?
---@return perilune.Optimizer
local function Adam(target, opts) return new("Adam", adam, 0, target, opts) end

---Makes AdamW: Adam with decoupled weight decay. Loshchilov and Hutter (2019).
---@param target perilune.Module|perilune.State[]|table[] model, list of States, or groups
---@param opts perilune.AdamOptions?
---@return perilune.Optimizer
local function AdamW(target, opts) return new("AdamW", adamw, 0.01, target, opts) end

return { Adam = Adam, AdamW = AdamW, adamw_rule = adamw, check_betas = check_betas }
