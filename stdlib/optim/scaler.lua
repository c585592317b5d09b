-- optim/scaler.lua: scales the loss dynamically for fp16. Micikevicius et al., Mixed Precision Training, arXiv:1710.03740.
--
--   local scaler = optim.LossScaler()
--   scaler:scale(loss):backward()
--   opt:step { scaler = scaler }
--
-- Gradients below 6e-8 underflow in fp16. So the loss is multiplied by a large power of two before the backward pass, and the
-- gradients are divided by it, exactly, before clipping and the update. If a gradient overflows, the update is skipped: weights,
-- moments and the count of updates do not change, and the factor is halved. After `growth_interval` successful updates in a row
-- the factor is doubled. The decision is made on the device, with no read-back.

local pl = require "perilune"
local check = require "perilune.check"

---@class perilune.LossScaler
---@field factor perilune.State the loss scale, f32 scalar
---@field good perilune.State successful updates since the factor last changed, f32 scalar
---@field updates perilune.State successful updates in total, f32 scalar
---@field options {growth: number, backoff: number, growth_interval: integer}
local Scaler = {}
local meta = { __index = Scaler }

---Multiplies the loss by the factor: call backward() on the result.
---@param loss perilune.Tensor
---@return perilune.Tensor
function Scaler:scale(loss)
  return loss:to("f32") * self.factor
end

---Records the change of the factor after an update. Optimizers call it.
---@param ok perilune.Tensor bool scalar: whether all gradients were finite
function Scaler:update(ok)
  local o = self.options
  local factor, good = self.factor:detach(), self.good:detach() + 1
  local grows = good:ge(o.growth_interval)
  local grown = pl.where(grows, factor * o.growth, factor)
  -- An infinite factor would never recover.
  grown = pl.where(grown:isfinite(), grown, factor)
  self.factor:assign(pl.where(ok, grown, factor * o.backoff))
  self.good:assign(pl.where(ok:logical_and(grows:logical_not()), good, pl.zeros({})))
  self.updates:assign(self.updates:detach() + ok:to("f32"))
end

---Lists its States, for checkpoints.
---@return perilune.Entry[]
function Scaler:states()
  return { { path = "factor", state = self.factor }, { path = "good", state = self.good }, { path = "updates", state = self.updates } }
end

---Makes a dynamic loss scaler: its factor grows until gradients overflow and is then halved.
---@param opts {init: number?, growth: number?, backoff: number?, growth_interval: integer?}? init: first factor; growth: factor of its growth; backoff: factor after an overflow; growth_interval: updates without an overflow before it grows
---@return perilune.LossScaler
local function LossScaler(opts)
  local op = "optim.LossScaler"
  local o = check.options(op, opts, { init = 65536, growth = 2, backoff = 0.5, growth_interval = 2000 })
  if not (o.init > 0 and o.init < math.huge) then pl.error(op, "init is " .. check.show(o.init), "it must be a positive number, preferably a power of two") end
  if not (o.growth >= 1) then pl.error(op, "growth is " .. check.show(o.growth), "it must be at least 1; with 1 the factor never grows") end
  if not (o.backoff > 0 and o.backoff < 1) then pl.error(op, "backoff is " .. check.show(o.backoff), "it must be between 0 and 1") end
  check.whole(op, "growth_interval", o.growth_interval)
  local function number(x) return pl.state(pl.full({}, x), { trainable = false }) end
  return setmetatable({ factor = number(o.init), good = number(0), updates = number(0),
                        options = { growth = o.growth, backoff = o.backoff, growth_interval = o.growth_interval } }, meta)
end

return { LossScaler = LossScaler }
