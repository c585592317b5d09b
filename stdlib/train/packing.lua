-- train/packing.lua: tests before the first step whether a document in a packed sequence reads another one.
--
-- The test evaluates the recipe's loss on a few packed sequences twice. In between, the tokens of each sequence's first document change
-- places, and nothing else does. The losses of the other documents' tokens must keep their bits. A model that ignores the document numbers
-- attends from one document to another, and its losses change. Differences in positions alone are not found.

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local position = require "perilune.train.position"
local recipes = require "perilune.train.recipe"
local sample_log = require "perilune.train.sample_log"
local scope = require "perilune.train.scope"
local tree = require "perilune.tree"

-- Sequences that the test evaluates: few, since it compares bits, and bits do not depend on chance.
local ROWS = 2
-- The target that cross_entropy ignores.
local IGNORED = -100

---@class perilune.train.Changed packed sequences with the tokens of their first documents changed
---@field rows integer[] of the batch
---@field x integer[][]
---@field y integer[][] without the targets of the first documents

---Reverses the tokens of the first document of a sequence and removes its targets from the loss.
---@param x integer[] tokens
---@param y integer[] targets
---@param documents integer[] numbers of documents
---@return integer[]? x nil if nothing would change or no target of another document remains
---@return integer[]? y
local function change(x, y, documents)
  local last = 1
  while documents[last + 1] == documents[1] do last = last + 1 end
  local out, targets, changed, others = table.move(x, 1, #x, 1, {}), table.move(y, 1, #y, 1, {}), false, false
  for i = 1, last do
    out[i], targets[i] = x[last + 1 - i], IGNORED
    changed = changed or out[i] ~= x[i]
  end
  for i = last + 1, #y do others = others or y[i] ~= IGNORED end
  if changed and others then return out, targets end
end

---Whether a value is a tensor (B, T) of integers.
local function is_tokens(value)
  return pl.is_tensor(value) and value:dim() == 2 and (value.dtype == "i32" or value.dtype == "i64")
end

---Selects the first sequences of a batch that can be tested, and changes them.
---@param batch table
---@return perilune.train.Changed? changed nil if there are none
local function select_rows(batch)
  local changed = { rows = {}, x = {}, y = {} }
  local x, y, documents = batch.x:tolist(), batch.y:tolist(), batch.documents:tolist()
  for row = 1, #x do
    local tokens, targets = change(x[row], y[row], documents[row])
    if tokens and #changed.rows < ROWS then
      local n = #changed.rows + 1
      changed.rows[n], changed.x[n], changed.y[n] = row - 1, tokens, targets
    end
  end
  return #changed.rows > 0 and changed or nil
end

---Computes the losses of the sequences of a batch.
---@return number[]? losses nil if the loss does not show them
local function losses_of(run, batch, samples)
  local loss, _, _, own = recipes.check_loss(run.recipe, "loss", samples, recipes.call(run, run.recipe.loss, run.model, batch))
  if own == nil and not native.sample_losses(loss, samples) then return nil end
  return sample_log.values(run, "loss", samples, loss, own).loss:flatten():tolist()
end

---Evaluates the losses of the other documents before and after the change.
---@return boolean? equal nil if the losses cannot be compared
local function keeps_losses(run, batch, changed)
  local count, part = #changed.rows, {}
  local rows = pl.tensor(changed.rows, { dtype = "i64" })
  for _, name in ipairs(tree.names(batch)) do
    local value = batch[name]
    local is_column = pl.is_tensor(value) and value:dim() > 0 and value.shape[1] == batch.x.shape[1]
    part[name] = is_column and value:index_select(0, rows) or value
  end
  part.y = pl.tensor(changed.y, { dtype = batch.y.dtype })
  local before, again = losses_of(run, part, count), losses_of(run, part, count)
  part.x = pl.tensor(changed.x, { dtype = batch.x.dtype })
  local after = losses_of(run, part, count)
  if not (before and again and after) then return nil end
  for i = 1, count do
    -- A loss with random numbers of its own differs from itself, as does one that is not a number.
    if before[i] ~= again[i] then return nil end
    if before[i] ~= after[i] then return false end
  end
  return true
end

---@class (partial) perilune.Run
local Run = {}

---Tests whether documents that are packed into one sequence read each other. No State, counter or random number of the run changes.
---@return boolean? separate nil if the training data is not packed or the recipe's losses cannot be compared
function Run:documents_are_separate()
  local train = self.data.train
  if not train.packed or type(self.recipe.loss) ~= "function" or native.mesh() then return nil end
  local _back <close> = scope.finally(function() self.model:train() end)
  self.model:eval()
  local separate, done = nil, false
  local ok, problem = pcall(pl.switches, { report_misses = false }, pl.step, function()
    pl.no_grad(function()
      local batch = position.batch(self, 0)
      if is_tokens(batch.x) and is_tokens(batch.y) and is_tokens(batch.documents) then
        local changed = select_rows(batch)
        if changed then separate = keeps_losses(self, batch, changed) end
      end
    end)
    done = true
    error("abort the step scope: its assignments must not run")
  end)
  if not (ok or done) then error(problem, 0) end
  return separate
end

return { methods = Run }
