-- data/records.lua: defines datasets of records and the stages of a pipeline over them.
--
-- A record is a table of named values: strings, numbers, booleans, lists and tables. Files of records are read where a batch needs them
-- (data.jsonl, data.parquet ...). A stage returns a new dataset and copies no data:
--
--   local chats = data.jsonl "train.jsonl":filter(function(r) return #r.answer > 0 end):shuffle(1)
--
-- All records are numbered in one stream, epoch after epoch, and reading one is a pure function of its number. So the order does not depend
-- on workers, prefetching or devices, and a resumed run goes on where it was. Functions run in parallel workers, each with a Lua state of
-- its own: they see the record, and copies of the values that they capture, and must depend on nothing else.

local pl = require "perilune"
local check = require "perilune.check"
local tree = require "perilune.tree"
local native = require "perilune.data.native"
local splits = require "perilune.data.split"
local loader = require "perilune.data.loader"

---@alias perilune.Record table<string, any>
---@alias perilune.Rewrites perilune.Record|perilune.Record[]|false what a function of records:rewrite gives for a record

---@class perilune.CheckedRecords the records behind a loader, for checks before the first step
---@field texts perilune.NativeRecords the records before they were encoded
---@field encoded perilune.NativeRecords? those with token ids, before they were packed
---@field vocabulary integer? number of ids of the tokenizer

---@class perilune.Records
---@field native perilune.NativeRecords
---@field pads {field: string, length: integer, value: number}[] how batches pad lists
---@field context integer? positions of the sequences that `pack` makes
---@field parts table<integer, perilune.Parts> by seed
---@field checked perilune.CheckedRecords? what checks of data read, of records that have been encoded
---@field live perilune.LiveMixture? of a mixture whose weights are a function
---@field pseudo perilune.PseudoLabels? of records that the model in training labels
local Records = {}
local meta = { __index = Records }
function meta.__tostring(records) return ("records: %d"):format(records.native:size()) end

-- Hashes of contents are divided as finely as this.
local UNITS <const> = 1 << 30

---Makes a dataset of a native one.
---@param made perilune.NativeRecords
---@param like perilune.Records? whose options of batches stay
---@return perilune.Records
local function new(made, like)
  return setmetatable({ native = made, pads = like and like.pads or {}, context = like and like.context, parts = {}, checked = like and like.checked, live = like and like.live, pseudo = like and like.pseudo }, meta) --[[@as perilune.Records]]
end

---Makes a dataset of encoded records, which remembers the texts for checks.
---@param made perilune.NativeRecords
---@param from perilune.Records
---@param tokenizer perilune.Tokenizer
---@return perilune.Records
local function encoded(made, from, tokenizer)
  local out = new(made, from)
  out.checked = { texts = from.checked and from.checked.texts or from.native, encoded = made, vocabulary = tokenizer:size() }
  return out
end

---Whether a value is a dataset of records.
---@param value any
---@return boolean
local function is(value)
  return getmetatable(value) == meta
end

---@param op string
---@param value any
---@return perilune.Records
local function records(op, value)
  if not is(value) then pl.error(op, "it got " .. check.show(value), "give a dataset of records, such as data.jsonl(path)") end
  return value
end

---@param op string
---@param others any[]
---@return perilune.NativeRecords[]
local function natives(op, others)
  local out = {}
  for i, other in ipairs(others) do
    local set = records(op, other)
    if set.live or set.pseudo then pl.error(op, "a dataset is a mixture that changes during the run", "apply " .. op .. " to the datasets that it mixes") end
    out[i] = set.native
  end
  return out
end

---@param op string
---@param fn any
---@param fields boolean? whether the name of a field is a function too
---@return any
local function callable(op, fn, fields)
  if type(fn) == "function" or fields and type(fn) == "string" then return fn end
  pl.error(op, "the function is " .. check.show(fn), fields and "give function(record) ... end, or the name of a field" or "give function(record) ... end")
end

---@param op string
---@param list any
---@return string[]
local function names(op, list)
  if type(list) == "string" then list = { list } end
  if type(list) ~= "table" or #list == 0 then pl.error(op, "the fields are " .. check.show(list), "name them: { \"question\", \"answer\" }") end
  for _, name in ipairs(list) do
    if type(name) ~= "string" then pl.error(op, "a field is " .. check.show(name), "name fields by strings") end
  end
  return list
end

---Number of records in an epoch.
---@return integer
function Records:size()
  return self.native:size()
end

---Returns a record by its number in the stream, counted from 0: those of the first epoch come first.
---@param index integer
---@return perilune.Record
function Records:get(index)
  check.whole("records:get", "index", index, 0)
  if self:size() == 0 then pl.error("records:get", "there are no records", "look at the filters before it") end
  return self.native:get(index)
end

---Lists the rows of files that a record is made of: one, or several of a pack or a group. Lines count from 1, rows from 0. Of a record that the
---model has labelled (data.pseudo) they have the label, its confidence and the round that gave it.
---`rewritten` is true where `augment` has rewritten the record.
---@param index integer
---@return {file: string, row: integer, line: integer?, label: integer?, confidence: number?, round: integer?, rewritten: boolean?}[]
function Records:origins(index)
  check.whole("records:origins", "index", index, 0)
  if self:size() == 0 then pl.error("records:origins", "there are no records", "look at the filters before it") end
  return self.native:origins(index)
end

---Iterates over the records of the first epoch: for record in records:rows() do ... end
---@return fun(): perilune.Record?
function Records:rows()
  local at, size = -1, self:size()
  return function()
    at = at + 1
    if at < size then return self.native:get(at) end
  end
end

---@param op string
---@param opts {seed: integer?}?
---@return integer
local function seed_of(op, opts)
  return check.whole(op, "seed", check.options(op, opts, { seed = 0 }).seed, 0)
end

---Applies a function to each record; it returns the new one. It runs in parallel workers, each with a copy of the values that it captures.
---Its `math.random` is a function of the seed and of the record's number in the stream.
---@param fn fun(record: perilune.Record): perilune.Record
---@param opts {seed: integer?}? seed: that of math.random
---@return perilune.Records
function Records:map(fn, opts)
  local op = "records:map"
  return new(self.native:map(callable(op, fn), seed_of(op, opts)), self)
end

---Rewrites records by a function, each in another way in each epoch. `draw` is math.random: what it gives is a function of the seed, the
---record and the epoch, so it depends on neither order nor workers, also behind a shuffle. By default each record is rewritten.
---  keep = 0.5: a record stays the original in an epoch with this probability.
---  copies = 2: an epoch has each record and so many rewrites of it.
---`pl.augment.text` has functions of texts. Split before: a record and its rewrites belong to one part.
---  records:augment(function(r, draw) r.text = pl.augment.text.delete(r.text, draw, 0.1); return r end, { seed = 1, keep = 0.5 })
---@param fn fun(record: perilune.Record, draw: fun(low: integer?, high: integer?): number): perilune.Record
---@param opts {seed: integer?, keep: number?, copies: integer?}? seed: of the draws; keep: probability that an epoch has the original; copies: rewrites of each record in an epoch, beside the original
---@return perilune.Records
function Records:augment(fn, opts)
  local op = "records:augment"
  local o = check.options(op, opts, { seed = 0 }, { keep = "number", copies = "number" })
  check.whole(op, "seed", o.seed, 0)
  if o.keep and o.copies then pl.error(op, "'keep' and 'copies' are both given", "'copies' has the original of each record already: leave out 'keep'") end
  if o.copies then check.between(op, "copies", check.whole(op, "copies", o.copies), 1, 1000) end
  local keep = check.between(op, "keep", o.keep or 0, 0, 1)
  return new(self.native:augment(callable(op, fn), o.seed, keep, o.copies), self)
end

---Returns the rewrites of a record that the function of `rewrite` gave: a record, a list of them, or false.
---@param op string
---@param given any
---@param place string
---@return perilune.Record[]
local function rewrites_of(op, given, place)
  if given == false or given == nil then return {} end
  if type(given) ~= "table" then
    pl.error(op, ("the function gave %s for %s"):format(check.show(given), place), "give a record { text = ... }, a list of records, or false for none")
  end
  -- A record has names; a list of records, or an empty one, has numbers.
  local name = next(given)
  return type(name) == "string" and { given } or given
end

---Adds rewrites that a model makes, such as paraphrases. `fn` gets lists of up to `batch` records and returns a list with a record, a list of
---records, or false, for each. It is called here, once for all records, in the recipe's own state and without gradients: so it may use
---modules and tensors, which functions of workers may not. All epochs have the same rewrites, in the memory of the host. `original =
---"replace"` leaves out records that have rewrites. A resumed run calls `fn` again, so what it gives must follow from the records, weights that the
---recipe reads, and the seed. Split before: a record and its rewrites belong to one part. `origins` says which records are rewritten.
---  local more = train:rewrite(function(list) return paraphrase(model, list) end, { batch = 16 })
---@param fn fun(list: perilune.Record[]): perilune.Rewrites[]
---@param opts {batch: integer?, original: ("keep"|"replace")?}? batch: records of a call; original: what becomes of a record that has rewrites
---@return perilune.Records
function Records:rewrite(fn, opts)
  local op = "records:rewrite"
  local o = check.options(op, opts, { batch = 32, original = "keep" })
  check.whole(op, "batch", o.batch)
  check.word(op, "original", o.original, { "keep", "replace" })
  callable(op, fn)
  if self.live or self.pseudo then pl.error(op, "the dataset is a mixture that changes during the run", "rewrite the datasets that it mixes") end
  local beneath = native.unordered(op, self.native)
  local n, lists = beneath:size(), {}
  for first = 0, n - 1, o.batch do
    local list = {}
    for row = first, math.min(first + o.batch, n) - 1 do list[#list + 1] = beneath:get(row) end
    local count = #list
    local given = pl.no_grad(fn, list)
    if type(given) ~= "table" then
      pl.error(op, ("the function returned %s for %d records"):format(check.show(given), count), "return a list with a record, a list of records, or false, for each")
    elseif given[count + 1] ~= nil then
      pl.error(op, ("the function returned more than %d entries for %d records"):format(count, count), "return one entry for each record, in order")
    end
    for k = 1, count do
      local row = first + k - 1
      lists[row + 1] = rewrites_of(op, given[k], ("record %d"):format(row))
    end
  end
  return new(self.native:rewrite(lists, o.original == "replace"), self)
end

---Encodes a text field as token ids (N) i32, in another field. `end_with` appends a token, such as "<|endoftext|>".
---@param tokenizer perilune.Tokenizer
---@param opts {field: string?, to: string?, end_with: string?, specials: ("text"|"parse")?, add_specials: boolean?}? field: that has the text, "text" by default; to: that gets the ids, "ids" by default; end_with: a token to append, such as "<|endoftext|>"; specials: whether special tokens in a text are text or tokens; add_specials: whether those of the tokenizer are added
---@return perilune.Records
function Records:tokenize(tokenizer, opts)
  return encoded(self.native:tokenize(tokenizer, opts), self, tokenizer)
end

---Renders conversations by the chat template of a tokenizer: records with `ids` (N) i32 and `mask` (N) bool, which says what the loss trains.
---@param tokenizer perilune.Tokenizer
---@param opts (perilune.ChatOptions|{field: string?})? field: that has the conversation, a list of { role =, content = }, "messages" by default
---@return perilune.Records
function Records:chat(tokenizer, opts)
  return encoded(self.native:chat(tokenizer, opts), self, tokenizer)
end

---@class perilune.PreferenceOptions: perilune.RenderOptions
---@field length integer positions of a row
---@field prompt string? field, "prompt" by default
---@field chosen string? field of the preferred answer, "chosen" by default
---@field rejected string? field of the other one, "rejected" by default
---@field too_long ("error"|"truncate")? "truncate" cuts answers at their end
---@field end_with string? token behind an answer of text, such as "<|endoftext|>"
---@field padding integer? id behind the answers, 0 by default
---@field keep string[]? fields that stay, such as a number of the pair
---@field specials ("text"|"parse")? whether special tokens in a text are text ("text", the default) or tokens ("parse")
---@field add_specials boolean? those of the tokenizer in front of a prompt of text

---Encodes preference pairs { prompt, chosen, rejected }, for direct preference optimization (Rafailov et al. 2023): texts, or lists of messages,
---which the chat template renders. A record has `x` (2, T) i32 and `y` (2, T) i64, the next token in the answer and -100 elsewhere; row 0 is that
---of the chosen answer. Both rows have the same tokens in front of it. A batch is (B, 2, T): `x:flatten(0, 1)` has the rows of a pair side by side.
---  local pairs = data.jsonl("pairs.jsonl"):preference(tokenizer, { length = 512 })
---@param tokenizer perilune.Tokenizer
---@param opts perilune.PreferenceOptions
---@return perilune.Records
function Records:preference(tokenizer, opts)
  local out = new(self.native:preference(tokenizer, opts), self)
  out.checked = { texts = self.checked and self.checked.texts or self.native }
  return out
end

---Keeps the records for which a function returns true.
---@param fn fun(record: perilune.Record): boolean
---@param opts {seed: integer?}? seed: that of math.random in `fn`
---@return perilune.Records
function Records:filter(fn, opts)
  local op = "records:filter"
  return new(self.native:filter(callable(op, fn), seed_of(op, opts)), self)
end

---Applies a function that returns a list of records for each.
---@param fn fun(record: perilune.Record): perilune.Record[]
---@param opts {seed: integer?}? seed: that of math.random in `fn`
---@return perilune.Records
function Records:flat_map(fn, opts)
  local op = "records:flat_map"
  return new(self.native:flat_map(callable(op, fn), seed_of(op, opts)), self)
end

---Shuffles the records, in a different order for each epoch. Stages that follow apply to the shuffled records as they would before.
---@param seed integer?
---@return perilune.Records
function Records:shuffle(seed)
  return new(self.native:shuffle(check.whole("records:shuffle", "seed", seed or 0, 0)), self)
end

---Keeps the first `n` records of each epoch.
---@param n integer
---@return perilune.Records
function Records:take(n)
  return new(self.native:range(0, check.whole("records:take", "n", n, 0)), self)
end

---Leaves out the first `n` records of each epoch.
---@param n integer
---@return perilune.Records
function Records:skip(n)
  return new(self.native:range(check.whole("records:skip", "n", n, 0), math.maxinteger), self)
end

---Makes one epoch of `n`.
---@param n integer
---@return perilune.Records
function Records:repeated(n)
  return new(self.native:repeated(check.whole("records:repeated", "n", n)), self)
end

---Joins each `size` consecutive records to one, whose fields are the lists of theirs.
---@param size integer
---@param stride integer? from one window to the next, by default `size`
---@return perilune.Records
function Records:window(size, stride)
  check.whole("records:window", "size", size)
  return new(self.native:windows(size, check.whole("records:window", "stride", stride or size)), self)
end

---Keeps only these fields. A file of columns reads no others.
---@param fields string|string[]
---@return perilune.Records
function Records:select(fields)
  return new(self.native:select(names("records:select", fields)), self)
end

---Gives fields other names: records:rename { instruction = "prompt" }
---@param fields table<string, string> new names by old ones
---@return perilune.Records
function Records:rename(fields)
  local op = "records:rename"
  if type(fields) ~= "table" or next(fields) == nil then pl.error(op, "the names are " .. check.show(fields), "as in { old = \"new\" }") end
  for old, to in pairs(fields) do
    if type(old) ~= "string" or type(to) ~= "string" then pl.error(op, ("the name of %s is %s"):format(check.show(old), check.show(to)), "as in { old = \"new\" }") end
  end
  return new(self.native:rename(fields), self)
end

---Appends other datasets.
---@param ... perilune.Records
---@return perilune.Records
function Records:concat(...)
  return new(self.native:concat(natives("records:concat", { ... })), self)
end

---Takes a record of each dataset in turn, until the shortest ends.
---@param ... perilune.Records
---@return perilune.Records
function Records:interleave(...)
  return new(self.native:interleave(natives("records:interleave", { ... })), self)
end

---Joins records of the same number to one that has the fields of all.
---@param ... perilune.Records of the same size
---@return perilune.Records
function Records:zip(...)
  return new(self.native:zip(natives("records:zip", { ... })), self)
end

---Adds the fields of the record of `other` that has the same value in a field. Records without one are left out.
---@param other perilune.Records the values of the field must be distinct
---@param field string
---@return perilune.Records
function Records:join(other, field)
  if type(field) ~= "string" then pl.error("records:join", "the field is " .. check.show(field), "name the field that both have") end
  return new(self.native:join(records("records:join", other).native, field), self)
end

---Sorts the records by a field or the result of a function: numbers or strings.
---@param key string|fun(record: perilune.Record): number|string
---@param opts {descending: boolean?}? descending: whether the largest comes first
---@return perilune.Records
function Records:sort(key, opts)
  local o = check.options("records:sort", opts, { descending = false })
  return new(self.native:sort(callable("records:sort", key, true), o.descending), self)
end

---Collects the records with the same value of a field or a function: a record { key, rows } for each.
---@param key string|fun(record: perilune.Record): string|number|boolean
---@return perilune.Records
function Records:group(key)
  return new(self.native:group(callable("records:group", key, true)), self)
end

---Drops records that equal an earlier one in these fields, by default in all.
---@param fields (string|string[])?
---@return perilune.Records
function Records:unique(fields)
  return new(self.native:unique(fields and names("records:unique", fields) or {}), self)
end

---Leaves out the records whose content another dataset has, by hash: rows of an evaluation that are in the training data too.
---All fields are compared, or those that are named. Numbers are compared by value, so 1 equals 1.0, and texts by their bytes.
---  local train = all:without(valid, "text")
---@param other perilune.Records
---@param fields (string|string[])? by default all, which both datasets must have
---@return perilune.Records
function Records:without(other, fields)
  local op = "records:without"
  return new(self.native:without(records(op, other).native, fields and names(op, fields) or {}), self)
end

---Draws `n` records without replacement, the same in every epoch.
---@param n integer
---@param seed integer?
---@return perilune.Records
function Records:sample(n, seed)
  check.whole("records:sample", "n", n)
  return new(self.native:sample(n, check.whole("records:sample", "seed", seed or 0, 0)), self)
end

---Keeps a part of the records, by a hash of their content: new records move none to another part, and equal ones stay together.
---Parts of different names and the same seed are disjoint (data/split.lua). Sizes are those of the fractions but for chance.
---@param name string "train", "valid", "test" or another
---@param fraction number
---@param seed integer?
---@return perilune.Records
function Records:split(name, fraction, seed)
  local op = "records:split"
  seed = check.whole(op, "seed", seed or 0, 0)
  self.parts[seed] = self.parts[seed] or splits.new(UNITS)
  local low, high = splits.take(op, self.parts[seed], name, fraction)
  return new(self.native:part(op, seed, low / UNITS, high / UNITS), self)
end

---Holds out a part of the records by a hash of their content, for evaluation. Returns it, and the others.
---@param fraction number
---@param seed integer?
---@return perilune.Records held
---@return perilune.Records others
function Records:holdout(fraction, seed)
  check.between("records:holdout", "fraction", fraction, 0, 1)
  return self:split("holdout", fraction, seed), self:split("train", 1 - fraction, seed)
end

---Divides the records into `n` folds by a hash of their content. Returns all but fold `k` for training, and fold `k` for evaluation.
---@param k integer from 1
---@param n integer
---@param seed integer?
---@return perilune.Records train
---@return perilune.Records valid
function Records:fold(k, n, seed)
  local op = "records:fold"
  check.whole(op, "n", n, 2)
  check.between(op, "k", check.whole(op, "k", k), 1, n)
  seed = check.whole(op, "seed", seed or 0, 0)
  local function part(low, high) return new(self.native:part(op, seed, low / n, high / n), self) end
  local before, after = part(0, k - 1), part(k, n)
  return k == 1 and after or k == n and before or before:concat(after), part(k - 1, k)
end

---Keeps the records in host memory once they have been made, so that functions before run once and not in each epoch.
---@return perilune.Records
function Records:cache()
  return new(self.native:cached(), self)
end

---Orders records by the length of a list or text, in shuffled blocks of a batch: the samples of a batch are of about one length.
---@param field string
---@param batch integer the batch size
---@param seed integer?
---@return perilune.Records
function Records:bucket(field, batch, seed)
  if type(field) ~= "string" then pl.error("records:bucket", "the field is " .. check.show(field), "name a field with a list or a text") end
  check.whole("records:bucket", "batch", batch)
  return new(self.native:bucket(field, batch, check.whole("records:bucket", "seed", seed or 0, 0)), self)
end

---Pads the lists of fields in batches: records:pad { ids = 256, mask = { length = 256, value = 0 } }
---@param fields table<string, integer|{length: integer, value: number?}> the length; the value is 0 by default
---@return perilune.Records
function Records:pad(fields)
  local op = "records:pad"
  if type(fields) ~= "table" or next(fields) == nil then pl.error(op, "the fields are " .. check.show(fields), "as in { ids = { length = 256, value = 0 } }") end
  local pads = table.move(self.pads, 1, #self.pads, 1, {})
  for _, field in ipairs(tree.names(fields)) do
    local given = fields[field] ---@type any
    if type(given) == "number" then given = { length = given } end
    local o = check.options(("%s '%s'"):format(op, field), given, { value = 0 }, { length = "number" })
    check.required(op, o, { "length" })
    pads[#pads + 1] = { field = field, length = check.whole(op, "length", o.length), value = o.value }
  end
  local out = new(self.native, self)
  out.pads = pads
  return out
end

---Packs documents of token ids into sequences of `length` positions, without attention or loss across documents (first-fit decreasing).
---A record has x (T) i32, y (T) i64 (the next token of the document, or -100, which cross_entropy ignores), documents (T) i32, numbers for
---attention, and positions (T) i32, from 0 in each document. `ids` and `mask` name the fields of a document: its token ids, and which of
---them are trained, as `chat` makes them. A document without a field `mask` is trained whole.
---@param length integer
---@param opts {ids: string?, mask: string?, padding: integer?, too_long: string?}? ids: field of the ids; mask: field of the mask; padding: id of positions that are not used; too_long: "error", "truncate" or "split"
---@return perilune.Records
function Records:pack(length, opts)
  local op = "records:pack"
  local o = check.options(op, opts, { ids = "ids", padding = 0, too_long = "error" }, { mask = "string" })
  check.word(op, "too_long", o.too_long, { "error", "truncate", "split" })
  check.whole(op, "padding", o.padding, 0)
  o.length = check.whole(op, "length", length)
  local out = new(self.native:pack(o), self)
  out.context = length
  out.checked = self.checked or { texts = self.native }
  return out
end

---Returns a loader of batches of `size` records: an endless stream if they are shuffled or mixed, else one epoch in order (data/loader.lua).
---Each field becomes a tensor (size, ...): integers i64, other numbers f32, booleans bool, lists of numbers with their dims.
---@param size integer
---@param opts {drop_last: boolean?, threads: integer?, context: integer?}? drop_last: whether an incomplete last batch is left out; threads: by default one per processor; context: as of set:batch
---@return perilune.Loader
function Records:batch(size, opts)
  local op = "records:batch"
  local o = check.options(op, opts, { drop_last = false }, { threads = "number", context = "number" })
  if o.threads then check.whole(op, "threads", o.threads) end
  if o.context then check.whole(op, "context", o.context) end
  if self.live and not self.native:mixture() then
    pl.error(op, "a stage after a mixture whose weights are a function changes the order of its records",
      "apply it to the datasets that are mixed; only map, tokenize, chat, select, rename and pad may follow")
  end
  if self.pseudo and not self.native:pseudo() then
    pl.error(op, "a stage after data.pseudo changes the order of its records",
      "apply it to the datasets that data.pseudo gets; only map, tokenize, chat, select, rename and pad may follow")
  end
  local columns, reader = self.native:reader(self.pads, o.threads)
  local set = self.native
  ---@return integer[]
  local function stream(first, count)
    local rows = {}
    for i = 1, count do rows[i] = first + i - 1 end
    return rows
  end
  local function make(first, count)
    local tensors, batch = { reader:batch(stream(first, count), first) }, {}
    for i, name in ipairs(columns) do batch[name] = tensors[i] end
    return batch
  end
  local function prefetch(first, count) reader:prefetch(stream(first, count), first) end
  local function ids(first, count)
    local rows = {}
    for i = 1, count do
      local from = set:origins(first + i - 1)[1]
      rows[i] = from and from.row or first + i - 1
    end
    return rows
  end
  return loader.new(op, { n = self:size(), size = size, shuffled = set:varies(), drop_last = o.drop_last, make = make, prefetch = prefetch,
                          ids = ids, what = "records", records = set, context = o.context or self.context, tokens = self.context,
                          checked = self.checked or { texts = set }, live = self.live, pseudo = self.pseudo,
                          packed = self.context ~= nil })
end

return { new = new, of = records, is = is }
