-- optim/scaler.lua: dynamic loss scaling for fp16. Micikevicius et al., Mixed Precision Training, arXiv:1710.03740.
--
--   local scaler = optim.LossScaler()
--   scaler:scale(loss):backward()
--   opt:step { scaler = scaler }
--
-- Gradients of fp16 products vanish below 6e-8, so the loss is multiplied by a large power of two before the backward pass
-- and the gradients are divided by it, exactly, before clipping and the update. A gradient that overflowed makes the whole
-- update void: weights, moments and the count of updates stay as they are, and the factor is halved; after
-- `growth_interval` good updates in a row it is doubled. All of it happens on the device, and nothing is read back.

local pl = require "perilune"
local check = require "perilune.check"

---@class perilune.LossScaler
---@field factor perilune.State what the loss is multiplied by, f32
---@field good perilune.State good updates since the factor last changed, f32
---@field updates perilune.State good updates in all, f32
---@field options {growth: number, backoff: number, growth_interval: integer}
local Scaler = {}
local meta = { __index = Scaler }

---The loss times the factor: call backward() on the result.
---@param loss perilune.Tensor
---@return perilune.Tensor
function Scaler:scale(loss)
  return loss:to("f32") * self.factor
end

---Records what the factor is after an update; optimizers call it.
---@param ok perilune.Tensor bool scalar: whether all gradients were finite
function Scaler:update(ok)
  local o = self.options
  local factor, good = self.factor:detach(), self.good:detach() + 1
  local grows = good:ge(o.growth_interval)
  local grown = pl.where(grows, factor * o.growth, factor)
  -- A factor that left f32 would never come back.
  grown = pl.where(grown:isfinite(), grown, factor)
  self.factor:assign(pl.where(ok, grown, factor * o.backoff))
  self.good:assign(pl.where(ok:logical_and(grows:logical_not()), good, pl.zeros({})))
  self.updates:assign(self.updates:detach() + ok:to("f32"))
end

---Its States, for checkpoints.
---@return perilune.Entry[]
function Scaler:states()
  return { { path = "factor", state = self.factor }, { path = "good", state = self.good }, { path = "updates", state = self.updates } }
end

---The factor that the loss is multiplied by in fp16, which grows until gradients overflow and then halves.
---@param opts {init: number?, growth: number?, backoff: number?, growth_interval: integer?}? 65536, 2, 0.5 and 2000 by default, as in PyTorch
---@return perilune.LossScaler
local function LossScaler(opts)
  local op = "optim.LossScaler"
  local o = check.options(op, opts, { init = 65536, growth = 2, backoff = 0.5, growth_interval = 2000 })
  if not (o.init > 0 and o.init < math.huge) then pl.error(op, "init is " .. check.show(o.init), "it is a positive number, best a power of two") end
  if not (o.growth >= 1) then pl.error(op, "growth is " .. check.show(o.growth), "it is 1 (the factor never grows) or more") end
  if not (o.backoff > 0 and o.backoff < 1) then pl.error(op, "backoff is " .. check.show(o.backoff), "it is between 0 and 1") end
  check.whole(op, "growth_interval", o.growth_interval)
  local function number(x) return pl.state(pl.full({}, x), { trainable = false }) end
  return setmetatable({ factor = number(o.init), good = number(0), updates = number(0),
                        options = { growth = o.growth, backoff = o.backoff, growth_interval = o.growth_interval } }, meta)
end

return { LossScaler = LossScaler }
