-- optim/init.lua: collects optimizers, learning-rate schedules, gradient clipping, weight averages and loss scaling.
--
--   local opt = optim.AdamW(model, { lr = optim.cosine { peak = 1e-3, warmup = 100, steps = 2000 }, clip_norm = 1 })
--   loss:backward(); opt:step()
--
-- The first argument is a module, a list of States, or a list of groups, each with its own options:
--   optim.AdamW({ model = model, { params = function(path, w) return #w.shape < 2 end, weight_decay = 0 }, {} }, { lr = 1e-3 })

local check = require "perilune.check"
local clip = require "perilune.optim.clip"
local schedule = require "perilune.optim.schedule"

---Makes parameter groups that apply weight decay to matrices only, not to vectors and scalars (biases, scales of norms):
---optim.AdamW(optim.decay_matrices(model, 0.1), { lr = 1e-3 })
---@param model perilune.Module
---@param weight_decay number
---@return table groups
local function decay_matrices(model, weight_decay)
  check.between("optim.decay_matrices", "weight_decay", weight_decay, 0, math.huge)
  return {
    model = model,
    { params = function(_, w) return #w.shape >= 2 end, weight_decay = weight_decay },
    { weight_decay = 0 },
  }
end

return {
  decay_matrices = decay_matrices,

  SGD = require("perilune.optim.sgd").SGD,
  Adam = require("perilune.optim.adam").Adam,
  AdamW = require("perilune.optim.adam").AdamW,
  Lion = require("perilune.optim.lion").Lion,
  RMSprop = require("perilune.optim.rmsprop").RMSprop,
  Adafactor = require("perilune.optim.adafactor").Adafactor,
  Muon = require("perilune.optim.muon").Muon,
  EMA = require("perilune.optim.ema").EMA,
  LossScaler = require("perilune.optim.scaler").LossScaler,

  constant = schedule.constant,
  linear_warmup = schedule.linear_warmup,
  cosine = schedule.cosine,
  wsd = schedule.wsd,
  one_cycle = schedule.one_cycle,
  piecewise = schedule.piecewise,

  clip_grad_norm = clip.clip_grad_norm,
  clip_grad_value = clip.clip_grad_value,
}
