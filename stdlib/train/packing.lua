-- train/packing.lua: tests before the first step whether documents that are packed into one sequence are trained as if alone.
--
-- Both tests evaluate the recipe's loss twice, on sequences of the first batch that hold several documents.
--
-- documents  In between, the tokens of the first document change places, and nothing else does. The losses of the other documents' tokens
--            must keep their bits. A model that ignores the document numbers attends from one document to another, and they change.
-- positions  In between, another document moves to the front of its sequence, with its positions. Its loss must stay the same but for
--            rounding. A model that counts positions from the start of the sequence computes another one. The test runs in f32, whose
--            rounding is smaller than such differences. A model whose weights begin at zero hides them.

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local position = require "perilune.train.position"
local recipes = require "perilune.train.recipe"
local sample_log = require "perilune.train.sample_log"
local scope = require "perilune.train.scope"
local tree = require "perilune.tree"

-- Sequences that the tests compare.
local ROWS = 2
-- The target that cross_entropy ignores.
local IGNORED = -100
-- The largest difference of two losses that rounding in f32 explains, relative to a loss of 1 or more.
local ROUNDING = 2e-4

---@class perilune.train.Packed a batch of packed sequences
---@field batch table on one device only the sequences to compare, on a mesh all, since their number must divide
---@field columns table<string, number[][]> the fields (B, T) of the batch
---@field places integer[] the sequences to compare

---@class perilune.train.Documents where the documents of a sequence lie
---@field last integer the last position of the first one
---@field from integer the first position of another one with a target
---@field to integer its last position

---Whether a value is a tensor (B, T) of integers.
local function is_tokens(value)
  return pl.is_tensor(value) and value:dim() == 2 and (value.dtype == "i32" or value.dtype == "i64")
end

---The end of the document that begins at a position.
local function end_of(documents, from)
  local last = from
  while documents[last + 1] == documents[from] do last = last + 1 end
  return last
end

---Finds the first document of a sequence, and another one with a target.
---@param y number[] targets
---@param documents number[] numbers of documents
---@return perilune.train.Documents? found nil if there is none
local function find_documents(y, documents)
  local last = end_of(documents, 1)
  local from = last + 1
  while from <= #documents do
    local to = end_of(documents, from)
    for i = from, to do
      if y[i] ~= IGNORED then return { last = last, from = from, to = to } end
    end
    from = to + 1
  end
end

---Whether a document is not its own reverse.
local function is_changed(x, last)
  for i = 1, last do
    if x[i] ~= x[last + 1 - i] then return true end
  end
  return false
end

---Selects the first sequences of a batch that can be tested.
---@param batch table
---@return perilune.train.Packed? packed nil if there are none
local function select_rows(batch)
  local x, y, documents = batch.x:tolist(), batch.y:tolist(), batch.documents:tolist()
  local rows = {}
  for row = 1, #x do
    local found = find_documents(y[row], documents[row])
    if found and is_changed(x[row], found.last) and #rows < ROWS then rows[#rows + 1] = row end
  end
  if #rows == 0 then return nil end
  local packed = { batch = batch, columns = {}, places = rows }
  if not native.mesh() then
    local index = pl.tensor(rows, { dtype = "i64" }) - 1
    packed.batch, packed.places = {}, {}
    for _, name in ipairs(tree.names(batch)) do
      local value = batch[name]
      local is_column = pl.is_tensor(value) and value:dim() > 0 and value.shape[1] == #x
      packed.batch[name] = is_column and value:index_select(0, index) or value
    end
    for i = 1, #rows do packed.places[i] = i end
  end
  for _, name in ipairs(tree.names(batch)) do
    local value = packed.batch[name]
    if pl.is_tensor(value) and value:dim() == 2 and value.shape[2] == #x[1] then packed.columns[name] = value:tolist() end
  end
  return packed
end

---Makes a batch with other sequences at the places that are compared.
---@param packed perilune.train.Packed
---@param change fun(name: string, row: number[], found: perilune.train.Documents): number[] computes a field of a sequence
local function changed(packed, change)
  local out, y, documents = {}, packed.columns.y, packed.columns.documents
  for _, name in ipairs(tree.names(packed.batch)) do out[name] = packed.batch[name] end
  for name, rows in pairs(packed.columns) do
    local list = table.move(rows, 1, #rows, 1, {})
    for _, place in ipairs(packed.places) do
      local found = find_documents(assert(y[place]), assert(documents[place]))
      list[place] = change(name, assert(rows[place]), assert(found))
    end
    out[name] = pl.tensor(list, { dtype = packed.batch[name].dtype })
  end
  return out
end

---Computes the losses of the sequences of a batch that are compared.
---@return number[]? losses nil if the loss does not show them
local function losses_of(run, packed, batch)
  local samples = batch.x.shape[1]
  local loss, _, _, own = recipes.check_loss(run.recipe, "loss", samples, recipes.call(run, run.recipe.loss, run.model, batch))
  if own == nil and not native.sample_losses(loss, samples) then return nil end
  local all, out = sample_log.values(run, "loss", samples, loss, own).loss:flatten():tolist(), {}
  for i, place in ipairs(packed.places) do out[i] = all[place] end
  return out
end

---The first document with its tokens reversed, and without its targets.
local function reversed(reverse)
  return function(name, row, found)
    local out = table.move(row, 1, #row, 1, {})
    for i = 1, found.last do
      if name == "y" then out[i] = IGNORED elseif name == "x" and reverse then out[i] = row[found.last + 1 - i] end
    end
    return out
  end
end

---Another document alone has targets, where it lies or at the front.
local function moved(to_front)
  return function(name, row, found)
    local out = table.move(row, 1, #row, 1, {})
    if name == "y" then
      for i = 1, #row do
        if i < found.from or i > found.to then out[i] = IGNORED end
      end
    end
    if not to_front then return out end
    local before, front = table.move(out, 1, found.from - 1, 1, {}), table.move(out, found.from, found.to, 1, {})
    return table.move(before, 1, #before, #front + 1, table.move(front, 1, #front, 1, out))
  end
end

---Compares the losses of two batches.
---@param equal fun(a: number, b: number): boolean
---@return boolean? equal nil if they cannot be compared
local function compare(run, packed, first, second, equal)
  local before, again, after = losses_of(run, packed, first), losses_of(run, packed, first), losses_of(run, packed, second)
  if not (before and again and after) then return nil end
  local all = true
  for i, loss in ipairs(before) do
    -- A loss with random numbers of its own differs from itself, as does one that is not a number.
    if loss ~= again[i] then return nil end
    all = all and equal(loss, assert(after[i]))
  end
  return all
end

local function is_rounded(a, b) return math.abs(a - b) <= ROUNDING * math.max(1, math.abs(a)) end

---Runs both tests.
---@return ("documents"|"positions")? fault
local function find_fault(run, packed)
  local separate = compare(run, packed, changed(packed, reversed(false)), changed(packed, reversed(true)), rawequal)
  if separate == false then return "documents" end
  -- Layers of fp8 quantize whatever the precision of the call is.
  if not separate or run.precision == "fp8" then return nil end
  local in_f32 = setmetatable({ precision = "f32" }, { __index = run })
  if compare(in_f32, packed, changed(packed, moved(false)), changed(packed, moved(true)), is_rounded) == false then return "positions" end
end

---@class (partial) perilune.Run
local Run = {}

---Tests whether documents that are packed into one sequence are trained as if alone. No State, counter or random number of the run changes.
---@return ("documents"|"positions")? fault documents read each other, or their losses depend on where they lie; nil if there is none, the training data is not packed, or the losses cannot be compared
function Run:fault_of_packing()
  local train = self.data.train
  if not train.packed or type(self.recipe.loss) ~= "function" then return nil end
  local _back <close> = scope.finally(function() self.model:train() end)
  self.model:eval()
  local fault, done = nil, false
  local ok, problem = pcall(pl.switches, { report_misses = false }, pl.step, function()
    pl.no_grad(function()
      local batch = position.batch(self, 0)
      if is_tokens(batch.x) and is_tokens(batch.y) and is_tokens(batch.documents) then
        local packed = select_rows(batch)
        if packed then fault = find_fault(self, packed) end
      end
    end)
    done = true
    error("abort the step scope: its assignments must not run")
  end)
  if not (ok or done) then error(problem, 0) end
  return fault
end

return { methods = Run }
