-- train/state.lua: names the States of a run and saves its position, for checkpoints, resume and hot reload.

local check = require "perilune.check"
local mixture = require "perilune.train.mixture"
local optimizers = require "perilune.train.optimizers"
local position = require "perilune.train.position"
local pseudo = require "perilune.train.pseudo"
local tree = require "perilune.tree"

---@class (partial) perilune.Run
local Run = {}

---Lists every State of the run under its checkpoint name: model.*, optim.*, ema.*, scaler.*, data.*, recipe.*.
---@return perilune.Entry[]
function Run:states()
  local out = {}
  local function append(prefix, entries)
    for _, entry in ipairs(entries) do out[#out + 1] = { path = tree.join(prefix, entry.path), state = entry.state } end
  end
  append("model", tree.states(self.model))
  append("optim", optimizers.states(self))
  if self.ema then append("ema", self.ema:states()) end
  if self.scaler then append("scaler", self.scaler:states()) end
  append("data", pseudo.states(self))
  if self.recipe.states then append("recipe", tree.states(self.recipe.states)) end
  return out
end

---Returns the position of the run as plain numbers, which a checkpoint stores besides the States.
---@return table cursor for `seek`
function Run:cursor()
  local es = self.early_stop
  local cursor = {
    step = self.count, seed = self.seed, stopped = self.stopped,
    ema_updates = self.ema and self.ema.count, best = es and es.best, bad = es and es.bad,
  }
  position.save(self, cursor)
  mixture.save(self, cursor)
  optimizers.save(self, cursor)
  return cursor
end

---Lists the States that count updates on the device, by their names in a checkpoint.
---@return string[]
function Run:counters() return optimizers.counters(self) end

---Returns the number of updates that each State of the optimizers has had, by its name in a checkpoint.
---@return table<string, integer>
function Run:updates_of_states() return optimizers.updates_of_states(self) end

---Moves the run to the position that `cursor` returned. States are loaded separately.
---@param cursor table
---@param slots table<string, integer>? updates of the optimizers' States that do not come from where the cursor does: 0 for new ones
function Run:seek(cursor, slots)
  self.count = check.whole("run:seek", "step", cursor.step, 0)
  self.stopped = cursor.stopped or false
  position.load(self, cursor)
  mixture.load(self, cursor)
  pseudo.load(self, cursor)
  optimizers.load(self, cursor, slots)
  if self.ema then self.ema.count = cursor.ema_updates or self.count end
  if self.early_stop then self.early_stop.best, self.early_stop.bad = cursor.best, cursor.bad or 0 end
end

return { methods = Run }
