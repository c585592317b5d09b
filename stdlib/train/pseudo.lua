-- train/pseudo.lua: lets the model of a run label the unlabelled records of data.pseudo, and restores the labels of a checkpoint.
--
-- A round classifies all unlabelled records, chooses among them on the host, and assigns the choice to States between two steps. The stream
-- of samples has the choice from the next step on; batches that were made ahead are dropped. A resume reads the States.

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local check = require "perilune.check"
local position = require "perilune.train.position"
local recipes = require "perilune.train.recipe"
local scope = require "perilune.train.scope"
local tree = require "perilune.tree"

local pseudo = {}

---@class (partial) perilune.Run
local Run = {}

---@param run perilune.Run
---@return perilune.PseudoLabels?
local function of(run)
  return run.data.train.pseudo
end

---Raises if another loader than that of the training data has pseudo-labels.
---@param run perilune.Run
function pseudo.start(run)
  for _, name in ipairs(tree.names(run.data)) do
    if name ~= "train" and type(run.data[name]) == "table" and run.data[name].pseudo then
      pl.error("recipe.data", ("'%s' has pseudo-labels, which only the training data may have"):format(name), "give labelled records: held:batch(256)")
    end
  end
end

---Lists the States of the labels.
---@param run perilune.Run
---@return perilune.Entry[]
function pseudo.states(run)
  local p = of(run)
  return p and tree.states { pseudo = p.states } or {}
end

---Classifies all unlabelled records.
---@param run perilune.Run
---@param p perilune.PseudoLabels
---@return integer[] labels of the rows, from row 0 at index 1
---@return number[] confidences
local function classify(run, p)
  local labels, confidences = {}, {}
  local _back <close> = scope.evaluation(run)
  for k = 0, p.loader:batches() - 1 do
    local values = scope.evaluate(function()
      local _placed <close> = scope.at_place(run)
      return pl.no_grad(function()
        local batch, samples = p.loader:batch_at(k)
        local scores = recipes.call(run, p.predict, run.model, batch) ---@type any
        if not pl.is_tensor(scores) or scores:dim() ~= 2 or scores:size(0) ~= samples then
          local got = pl.is_tensor(scores) and ("a tensor of shape {%s}"):format(table.concat(scores.shape, ", ")) or check.show(scores)
          pl.error(p.op, "predict returned " .. got, ("return the scores of the classes for each of the %d records, (B, classes)"):format(samples), p.predict)
        end
        local confidence, label = scores:to("f32"):softmax(-1):max(-1)
        return { confidence = confidence, label = label }
      end)
    end)
    local label, confidence = values.label:tolist(), values.confidence:tolist()
    table.move(label, 1, #label, #labels + 1, labels)
    table.move(confidence, 1, #confidence, #confidences + 1, confidences)
  end
  return labels, confidences
end

---Chooses the rows to keep.
---@param p perilune.PseudoLabels
---@param candidates perilune.Candidate[] by row
---@return perilune.Candidate[] chosen by row
local function choose(p, candidates)
  local kept = {} ---@type perilune.Candidate[]
  for _, c in ipairs(candidates) do
    local keep = c.confidence >= p.confidence
    if keep and p.filter then
      keep = p.filter(c)
      if type(keep) ~= "boolean" then pl.error(p.op, "filter returned " .. check.show(keep), "return true or false", p.filter) end
    end
    if keep then kept[#kept + 1] = c end
  end
  local most = p.per_class
  if not most then return kept end
  table.sort(kept, function(a, b)
    if a.confidence ~= b.confidence then return a.confidence > b.confidence end
    return a.row < b.row
  end)
  local counts, out = {}, {}
  for _, c in ipairs(kept) do
    counts[c.label] = (counts[c.label] or 0) + 1
    if counts[c.label] <= most then out[#out + 1] = c end
  end
  table.sort(out, function(a, b) return a.row < b.row end)
  return out
end

---@class perilune.train.Labelled a row that the model has labelled
---@field row integer
---@field class integer
---@field confidence number
---@field round integer

---@class perilune.train.LabelPlace where the labels hold
---@field round integer the last one
---@field first integer the first sample of the stream that they apply to
---@field taken integer records of the labelled dataset taken before it
---@field share integer
---@field seed integer
---@field digest integer of the unlabelled records

---Reads the labels that the States have: those of rows with one.
---@param p perilune.PseudoLabels
---@return perilune.train.Labelled[] labelled by row
---@return perilune.train.LabelPlace place
local function read(p)
  local label, confidence, round = p.states.label:tolist(), p.states.confidence:tolist(), p.states.round:tolist()
  local out = {}
  for i, class in ipairs(label) do
    if class >= 0 then out[#out + 1] = { row = i - 1, class = class, confidence = confidence[i], round = round[i] } end
  end
  local place = p.states.place:tolist()
  return out, { round = place[1], first = place[2], taken = place[3], share = place[4], seed = place[5], digest = place[6] }
end

---Assigns a choice to the States.
---@param p perilune.PseudoLabels
---@param chosen perilune.train.Labelled[]
---@param place perilune.train.LabelPlace
local function assign(p, chosen, place)
  local label, confidence, round = {}, {}, {}
  for i = 1, p.rows do label[i], confidence[i], round[i] = -1, 0.0, 0 end
  for _, c in ipairs(chosen) do label[c.row + 1], confidence[c.row + 1], round[c.row + 1] = c.class, c.confidence, c.round end
  p.states.label:assign(pl.tensor(label, { dtype = "i64" }))
  p.states.confidence:assign(pl.tensor(confidence, { dtype = "f32" }))
  p.states.round:assign(pl.tensor(round, { dtype = "i64" }))
  p.states.place:assign(pl.tensor({ place.round, place.first, place.taken, place.share, place.seed, place.digest }, { dtype = "i64" }))
end

---Labels the unlabelled records after a step, where a round is due.
---@param run perilune.Run
function pseudo.after_step(run)
  local p = of(run)
  if not p or run.count < p.start or (run.count - p.start) % p.every ~= 0 then return end
  -- The plans of a round are its own and no sign of a step that changed.
  pl.switches({ report_misses = false }, function()
    local before, place = read(p)
    local round, known = place.round + 1, {} ---@type integer, table<integer, perilune.train.Labelled>
    for _, c in ipairs(before) do known[c.row] = c end
    local labels, confidences = classify(run, p)
    local candidates = {} ---@type perilune.Candidate[]
    for i, label in ipairs(labels) do
      local was, confidence = known[i - 1], confidences[i] --[[@as number]]
      candidates[i] = { row = i - 1, label = label, confidence = confidence, round = round, previous = was and was.class }
    end
    local chosen = {} ---@type perilune.train.Labelled[]
    for i, c in ipairs(choose(p, candidates)) do
      -- A row that keeps its label keeps the round that gave it.
      local was = known[c.row]
      chosen[i] = { row = c.row, class = c.label, confidence = c.confidence, round = was and was.class == c.label and was.round or round }
    end
    local first = position.sample(run, run.count)
    local taken = p.stream:taken(first)
    pl.step(function() assign(p, chosen, { round = round, first = first, taken = taken, share = p.share, seed = p.seed, digest = p.digest }) end)
    p.stream:choose(first, taken, chosen)
  end)
end

---Restores the stream from the States, when a run goes on from a checkpoint or an edit. With another share or seed the labels hold from
---the next sample on; of other unlabelled records they mean nothing, and the run goes on without until the next round.
---@param run perilune.Run
---@param cursor table
function pseudo.load(run, cursor)
  local p = of(run)
  if not p or cursor.sample == nil then return end
  local chosen, place = read(p)
  local first, taken = place.first, place.taken
  if place.share ~= p.share or place.seed ~= p.seed or place.digest ~= p.digest then
    local sample = check.whole("run:seek", "sample", cursor.sample, 0)
    taken = p.stream:taken_by(place.seed, place.share, first, taken, #chosen > 0, sample)
    if place.digest ~= p.digest and #chosen > 0 then
      native.notice(("data.pseudo: the unlabelled records are others than those that the model has labelled; the run goes on without its %d labels until the next round"):format(#chosen))
      chosen = {}
    end
    first = sample
    assign(p, chosen, { round = place.round, first = first, taken = taken, share = p.share, seed = p.seed, digest = p.digest })
  end
  p.stream:choose(first, taken, chosen)
end

---@class perilune.PseudoLabel
---@field row integer of the unlabelled records, from 0, without those that are left out
---@field file string where the record is from
---@field origin integer its row there
---@field line integer? its line there
---@field label integer
---@field confidence number probability of the label
---@field round integer the round that gave the row this label

---Lists the unlabelled records that the model has labelled in the last round of data.pseudo, in the order of their rows.
---@return perilune.PseudoLabel[]
function Run:pseudo_labels()
  local p = of(self)
  if not p then pl.error("run:pseudo_labels", "the training data has no pseudo-labels", "make it by data.pseudo(labelled, unlabelled, { ... })") end
  ---@cast p perilune.PseudoLabels
  local out = {}
  for i, c in ipairs((read(p))) do
    local from = p.unlabelled:origins(c.row)[1] or {}
    out[i] = { row = c.row, file = from.file or "records", origin = from.row or c.row, line = from.line, label = c.class, confidence = c.confidence, round = c.round }
  end
  return out
end

pseudo.methods = Run

return pseudo
