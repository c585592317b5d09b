-- optim/ema.lua: averages the weights of a model exponentially. Polyak and Juditsky, Acceleration of Stochastic Approximation by
-- Averaging (1992).
--
-- average = decay * average + (1 - decay) * weight, after each optimizer step. Float States are averaged, including running
-- statistics; other States are copied. Only copy_to and swap change the model.

local pl = require "perilune"
local check = require "perilune.check"
local tree = require "perilune.tree"

---@class perilune.EMA
---@field decay number
---@field count integer updates done
---@field warmup boolean
---@field averages {path: string, state: perilune.State, average: perilune.State}[]
local EMA = {}
local meta = { __index = EMA }

local function is_float(dtype)
  return dtype:sub(1, 1) == "f" or dtype == "bf16"
end

local function end_implicit_step()
  if not pl.in_step() then pl.end_step() end
end

---Updates the averages. Call it after opt:step(), to average the updated weights.
function EMA:update()
  local decay = self.decay
  if self.warmup then decay = math.min(decay, (1 + self.count) / (10 + self.count)) end
  self.count = self.count + 1
  for _, p in ipairs(self.averages) do
    if is_float(p.average.dtype) then
      p.average:assign(p.average * decay + p.state * (1 - decay))
    else
      p.average:assign(p.state:detach())
    end
  end
  end_implicit_step()
end

---Copies the averages to the model.
function EMA:copy_to()
  for _, p in ipairs(self.averages) do p.state:assign(p.average:detach():to(p.state.dtype)) end
  end_implicit_step()
end

---Swaps averages and weights: once to evaluate with the averages, once more to continue training.
function EMA:swap()
  for _, p in ipairs(self.averages) do
    local weight, average = p.state:detach(), p.average:detach()
    p.state:assign(average:to(p.state.dtype))
    p.average:assign(weight:to(p.average.dtype))
  end
  end_implicit_step()
end

---Lists every average as { path =, state = }, with the paths of the model.
---@return perilune.Entry[]
function EMA:states()
  local out = {}
  for i, p in ipairs(self.averages) do out[i] = { path = p.path, state = p.average } end
  return out
end

---Makes a moving average of the States of a model.
---With `warmup`, the decay after n updates is at most (1 + n) / (10 + n), so that the initial weights fade quickly.
---@param model perilune.Module
---@param decay number? 0.999 by default
---@param opts {warmup?: boolean}? warmup: after n updates the decay is at most (1 + n) / (10 + n)
---@return perilune.EMA
local function new(model, decay, opts)
  decay = check.between("optim.EMA", "decay", decay or 0.999, 0, 1)
  local o = check.options("optim.EMA", opts, { warmup = false })
  local self = setmetatable({ decay = decay, warmup = o.warmup, count = 0, averages = {} }, meta)
  for i, entry in ipairs(tree.states(model)) do
    local s = entry.state
    local start = (s.dtype == "bf16" or s.dtype == "f16") and s:detach():to("f32") or s:detach()
    self.averages[i] = { path = entry.path, state = s, average = pl.state(start, { trainable = false }) }
  end
  if #self.averages == 0 then pl.error("optim.EMA", "the model has no State", "give the module whose weights to average") end
  return self
end

return { EMA = new }
