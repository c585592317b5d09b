-- data/pseudo.lua: mixes labelled records with unlabelled ones that the model in training labels (pseudo-labels).
--
-- Every so many steps the run lets the model classify all unlabelled records and keeps those that a filter accepts; they are trained on
-- with the class that the model gave them, until the next round. train/pseudo.lua runs the rounds. Lee, "Pseudo-Label: The simple and
-- efficient semi-supervised learning method for deep neural networks", ICML workshop 2013; thresholds of 0.95: Sohn et al., FixMatch, 2020.
--
-- The choice is held in States: row i has label[i], -1 without one, its confidence and its round. So the stream of samples is a
-- function of the seed, the place and these States, and a checkpoint has all of it (docs/adr/194-pseudo-labels-are-states.md).

local pl = require "perilune"
local check = require "perilune.check"
local native = require "perilune.data.native"
local records = require "perilune.data.records"

local pseudo = {}

---@class perilune.Candidate an unlabelled record that the model has classified
---@field row integer of the unlabelled dataset, from 0, after those that are left out
---@field label integer the class of the highest score
---@field confidence number its probability
---@field round integer from 1
---@field previous integer? the class that the row had until now

---@class perilune.PseudoStates
---@field label perilune.State (rows) i64, -1 where the row has none
---@field confidence perilune.State (rows) f32, 0 where the row has no label
---@field round perilune.State (rows) i64: the round that gave the row its label, 0 where it has none
---@field place perilune.State (6) i64: rounds, the first place of the stream with these labels, labelled records before it, share, seed, digest

---@class perilune.PseudoLabels
---@field op string
---@field stream perilune.NativeRecords
---@field unlabelled perilune.NativeRecords
---@field loader perilune.Loader all unlabelled records in order
---@field rows integer
---@field predict fun(model: perilune.Module, batch: table): perilune.Tensor scores (B, classes)
---@field confidence number
---@field filter (fun(candidate: perilune.Candidate): boolean)?
---@field per_class integer?
---@field every integer
---@field start integer
---@field share integer places of chosen records in 1,024
---@field seed integer
---@field digest integer of the unlabelled records
---@field states perilune.PseudoStates

---Lists the held-out datasets.
---@param op string
---@param held any
---@return perilune.Records[]
local function held_out(op, held)
  local list = held.native and { held } or held
  for _, set in ipairs(list) do records.of(op, set) end
  if #list == 0 and next(list) ~= nil then pl.error(op, "option 'held' is a table of names", "give the dataset, or a list: held = { valid, test }") end
  return list
end

---Makes the stream of labelled records and of unlabelled ones that the model labels during the run. `predict` returns the scores of a batch of
---unlabelled records, (B, classes) logits. After `start` steps and then every `every` steps the run classifies all unlabelled records in
---evaluation mode (with the averaged weights if the recipe has `ema`) and keeps the rows whose highest probability is at least `confidence`,
---for which `filter` returns true, and of each class the `per_class` most confident. A round replaces the labels of the one before.
---  local train = data.pseudo(few, many, { held = valid, predict = function(model, batch) return model(batch.x) end })
---  return { train = train:batch(64), valid = valid:batch(256) }
---A record of the stream has the fields of the labelled ones and `pseudo` (bool), whether its label is the model's, and `confidence` (f32), 1
---for the others. Unlabelled records need the same fields but the label. Unlabelled records whose `fields` a labelled or a held-out record has are left out, by hash.
---Of any 1,024 samples after a round the `share` is pseudo-labelled. Only map, tokenize, chat, select, rename and pad may follow.
---`records:origins(i)` of the stream and run:pseudo_labels() name row, label, confidence and round.
---@param labelled perilune.Records with an integer class in the field `label`
---@param unlabelled perilune.Records ready for a batch: numbers, and lists of them
---@param opts {predict: (fun(model: perilune.Module, batch: table): perilune.Tensor), held: perilune.Records|perilune.Records[], label: string?, fields: (string|string[])?, confidence: number?, filter: (fun(candidate: perilune.Candidate): boolean)?, per_class: integer?, share: number?, every: integer?, start: integer?, batch: integer?, seed: integer?} predict: returns the scores (B, classes) of a batch; held: what evaluations use, {} for nothing; label: field of the class; fields: those that are compared, by default all of the unlabelled records; confidence: least probability of a label; filter: may refuse a candidate; per_class: keeps the most confident of each class; share: of pseudo-labelled samples; every: steps between two rounds; start: first round, `every` by default; batch: records that are classified together; seed: of the order
---@return perilune.Records
function pseudo.pseudo(labelled, unlabelled, opts)
  local op = "data.pseudo"
  local o = check.options(op, opts, { label = "y", confidence = 0.95, share = 0.5, every = 100, batch = 256, seed = 0 },
    { predict = "function", held = "table", fields = "string|table", filter = "function", per_class = "number", start = "number" })
  if o.held == nil then pl.error(op, "option 'held' is missing", "name the records of evaluations, held = valid, which must not be trained on; or held = {}") end
  check.required(op, o, { "predict" })
  check.between(op, "confidence", o.confidence, 0, 1)
  check.between(op, "share", o.share, 1 / 1024, 1023 / 1024)
  check.whole(op, "every", o.every)
  if o.start then check.whole(op, "start", o.start) end
  if o.per_class then check.whole(op, "per_class", o.per_class) end
  check.whole(op, "seed", o.seed, 0)
  local own, others = records.of(op, labelled), records.of(op, unlabelled)
  for _, set in ipairs { own, others } do
    if set.live or set.pseudo then pl.error(op, "a dataset is a mixture that changes during the run", "give the datasets that it mixes") end
  end
  if own:size() == 0 then pl.error(op, "there are no labelled records", "look at the filters before") end
  -- A shuffle of the unlabelled records has no use: their order is that of the choice.
  local rest = records.new(native.unordered(op, others.native), others)
  if rest:size() == 0 then pl.error(op, "there are no unlabelled records", "look at the filters before") end
  local fields = o.fields ---@type any
  if fields == nil then
    fields = {}
    for name in pairs(rest:get(0)) do
      if name ~= o.label then fields[#fields + 1] = name end
    end
    table.sort(fields)
  end
  local before = rest:size()
  rest = rest:without(own, fields)
  for _, held in ipairs(held_out(op, o.held)) do rest = rest:without(held, fields) end
  if rest:size() == 0 then
    pl.error(op, ("none of the %d unlabelled records is left: labelled or held-out ones have the same content"):format(before),
      "give other records, or compare more fields: fields = { \"x\" }")
  end
  local n = rest:size()
  local function state(x) return pl.state(x, { trainable = false }) end
  local stream = native.pseudo(own.native, rest.native, o.label, o.share, o.seed)
  local share, seed = stream:pseudo()
  local digest = rest.native:digest(type(fields) == "string" and { fields } or fields)
  local out = records.new(stream, own)
  out.checked = own.checked or { texts = own.native }
  out.pseudo = {
    op = op, stream = stream, unlabelled = rest.native, loader = rest:batch(math.min(check.whole(op, "batch", o.batch), n)), rows = n, predict = o.predict,
    confidence = o.confidence, filter = o.filter, per_class = o.per_class, every = o.every, start = o.start or o.every,
    share = share --[[@as integer]], seed = seed --[[@as integer]], digest = digest,
    states = {
      label = state(pl.full({ n }, -1)), confidence = state(pl.zeros { n }), round = state(pl.full({ n }, 0)),
      place = state(pl.tensor({ 0, 0, 0, share, seed, digest }, { dtype = "i64" })),
    },
  }
  return out
end

return pseudo
