-- train/state.lua: names the States of a run and saves its position, for checkpoints, resume and hot reload.

local check = require "perilune.check"
local tree = require "perilune.tree"

---@class (partial) perilune.Run
local Run = {}

---Lists every State of the run under its checkpoint name: model.*, optim.*, ema.*, scaler.*, recipe.*.
---@return perilune.Entry[]
function Run:states()
  local out = {}
  local function append(prefix, entries)
    for _, entry in ipairs(entries) do out[#out + 1] = { path = tree.join(prefix, entry.path), state = entry.state } end
  end
  append("model", tree.states(self.model))
  if self.opt then append("optim", self.opt:states()) end
  if self.ema then append("ema", self.ema:states()) end
  if self.scaler then append("scaler", self.scaler:states()) end
  if self.recipe.states then append("recipe", tree.states(self.recipe.states)) end
  return out
end

---Returns the position of the run as plain numbers, which a checkpoint stores besides the States.
---@return table cursor for `seek`
function Run:cursor()
  local at = self.data.train:position(self.count * self.accumulate)
  local es = self.early_stop
  return {
    step = self.count, epoch = at.epoch, index = at.index, seed = self.seed, stopped = self.stopped,
    updates = self.opt and self.opt.count, ema_updates = self.ema and self.ema.count,
    best = es and es.best, bad = es and es.bad,
  }
end

---Moves the run to the position that `cursor` returned. States are loaded separately.
---@param cursor table
function Run:seek(cursor)
  self.count = check.whole("run:seek", "step", cursor.step, 0)
  self.stopped = cursor.stopped or false
  if self.opt then self.opt.count = cursor.updates or self.count end
  if self.ema then self.ema.count = cursor.ema_updates or self.count end
  if self.early_stop then self.early_stop.best, self.early_stop.bad = cursor.best, cursor.bad or 0 end
end

return { methods = Run }
