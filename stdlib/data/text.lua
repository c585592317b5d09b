-- data/text.lua: reads texts as token ids and batches windows of them for language models.
--
-- A batch has x (B, T) and y (B, T) i64, y shifted by one token. Training windows start at random positions; evaluation windows
-- are adjacent and cover the text once. Splits are contiguous ("train" in front), because overlapping windows would leak
-- validation tokens into training. data.text numbers the characters of a file in sorted order; other tokenizers write files of
-- ids for data.token_files, which are read where a batch needs them.

local pl = require "perilune"
local check = require "perilune.check"
local native = require "perilune.data.native"
local address = require "perilune.data.address"
local corpora = require "perilune.data.corpus"
local splits = require "perilune.data.split"
local loader = require "perilune.data.loader"
local checked = require "perilune.data.checked"

---@class perilune.Text
---@field vocab any? of data.text, with :size(), :encode(text), :decode(ids)
---@field corpus perilune.Corpus
---@field vocabulary integer? ids are below it, where a recipe states that
---@field low integer first token of this split
---@field high integer end of this split, exclusive
---@field parts perilune.Parts splits taken from it
---@field tokens perilune.Tensor all ids (N) i64, made at every read
local Text = {}

local meta = {}
function meta.__index(text, key)
  if key == "tokens" then return text.corpus.ids(0, text.corpus.size):to("i64") end
  return Text[key]
end
meta.__methods, meta.__made = Text, { "tokens" } -- names for completion

---Makes a text of a whole corpus.
---@param corpus perilune.Corpus
---@param vocab any?
---@return perilune.Text
local function new(corpus, vocab)
  return setmetatable({ vocab = vocab, corpus = corpus, low = 0, high = corpus.size, parts = splits.new(corpus.size) }, meta) --[[@as perilune.Text]]
end

---Reads a UTF-8 text file as character ids.
---@param path string relative to the recipe's folder, or absolute; or an address
---@param opts {level?: string, max_bytes?: integer, hash?: perilune.Hash}? level: "char"; hash: of the content of an address; max_bytes: limit of the text, by default 4 GiB; of a .gz 25 times its size or 32 MiB
---@return perilune.Text
local function text(path, opts)
  if type(path) ~= "string" then pl.error("data.text", "the path is " .. check.show(path)) end
  local o = check.options("data.text", opts, { level = "char" }, { max_bytes = "number", hash = "string|table" })
  if o.max_bytes then check.whole("data.text", "max_bytes", o.max_bytes) end
  check.word("data.text", "level", o.level, { "char" })
  local content = native.text(address.with_hash("data.text", path, o.hash), o.max_bytes)
  local vocab = native.chars(content)
  return new(corpora.host(vocab:corpus(content)), vocab)
end

---Makes a text of token ids, for `split` and `windows`.
---@param ids perilune.Tensor (N) i32 or i64
---@return perilune.Text
local function sequence(ids)
  if not pl.is_tensor(ids) or ids:dim() ~= 1 or (ids.dtype ~= "i32" and ids.dtype ~= "i64") then
    local got = pl.is_tensor(ids) and ("a %s tensor of shape {%s}"):format(ids.dtype, table.concat(ids.shape, ", ")) or check.show(ids)
    pl.error("data.sequence", "the ids are " .. got, "give a tensor of shape {N}, i32 or i64")
  end
  pl.eval(ids)
  return new(corpora.device(ids))
end

---Opens files of token ids as one text, of any size: they are read where a batch needs them, and memory stays flat.
---A file is .bin of u16 as nanoGPT writes it, .bin of u16 or u32 with llm.c's header, or .npy of one dim (u1, u2, u4, i4, i8).
---  data.token_files("fineweb/train_*.bin"):windows { length = 1024, batch = 32, seed = 1 }
---A manifest.json of `perilune tokens encode` stands for its shards. A file that changes while it is in use is an error that names it.
---@param paths string|string[] relative to the recipe's folder, or absolute; the last part may be a pattern, whose files are sorted by name; or addresses
---@param opts {hash: perilune.Hash?}? hash: of the content of addresses
---@return perilune.Text
local function token_files(paths, opts)
  local o = check.options("data.token_files", opts, {}, { hash = "string|table" })
  local list = paths ---@type any
  if type(paths) == "string" then list = { paths } end
  if type(list) ~= "table" or #list == 0 then
    pl.error("data.token_files", "the paths are " .. check.show(paths), "name a file, a pattern like \"train_*.bin\", or a list of them")
  end
  return new(corpora.files(address.with_hashes("data.token_files", list, o.hash)))
end

---Reads token ids from a file: .bin of u16 or u32 as llm.c and nanoGPT write it, or .npy or .safetensors of one integer tensor.
---A manifest.json stands for its shards. All ids become a tensor; data.token_files reads only what batches need.
---@param path string relative to the recipe's folder, or absolute; or an address
---@param opts {hash: perilune.Hash?}? hash: of the content of an address
---@return perilune.Tensor (N), i32 from .bin
local function tokens(path, opts)
  if type(path) ~= "string" then pl.error("data.tokens", "the path is " .. check.show(path)) end
  local o = check.options("data.tokens", opts, {}, { hash = "string|table" })
  path = address.with_hash("data.tokens", path, o.hash)
  local bare = address.name(path)
  if bare:match "%.bin$" then return native.tokens(path) end
  if bare:match "%.json$" then
    local all = token_files(path)
    return all:ids(0, all:size())
  end
  local found = pl.load(path)
  if pl.is_tensor(found) then return found:flatten() end
  local name, more = next(found)
  if name == nil or next(found, name) ~= nil then
    pl.error("data.tokens", ("'%s' does not contain exactly one tensor"):format(path), "select one: data.sequence(pl.load(path).name)")
  end
  return (more --[[@as perilune.Tensor]]):flatten()
end

---Makes the loaders of a language model: windows of token files, the first 95 % for training.
---`tokens` is a path or pattern for data.token_files, or a .safetensors file. With "" the ids are random, for measurements of speed.
---@param opts {tokens: string, vocab: integer, context: integer, batch: integer, seed: integer} tokens: a path or pattern for data.token_files, or a .safetensors file; vocab: number of different ids; context: tokens of a window; batch: windows of a batch; seed: of the positions
---@return {train: perilune.Loader, valid: perilune.Loader}
local function language(opts)
  local op = "data.language"
  local o = check.options(op, opts, {}, { tokens = "string", vocab = "number", context = "number", batch = "number", seed = "number" })
  check.required(op, o, { "tokens", "vocab", "context", "batch", "seed" })
  check.whole(op, "context", o.context)
  check.whole(op, "batch", o.batch)
  local all
  if o.tokens == "" then
    all = sequence(pl.randint(0, o.vocab, { 64 * o.context * o.batch + 1 }, { dtype = "i32" }))
  elseif o.tokens:match "%.safetensors$" then
    all = sequence(tokens(o.tokens))
  else
    all = token_files(o.tokens)
  end
  all.vocabulary = check.whole(op, "vocab", o.vocab)
  return {
    train = all:split("train", 0.95):windows { length = o.context, batch = o.batch, seed = o.seed },
    valid = all:split("valid", 0.05):windows { length = o.context, batch = o.batch },
  }
end

---Number of tokens.
---@return integer
function Text:size()
  return self.high - self.low
end

---Returns a contiguous part: "train" from the front, other names from the back (data/split.lua).
---@param name string
---@param fraction number
---@return perilune.Text
function Text:split(name, fraction)
  local low, high = splits.take("text:split", self.parts, name, fraction)
  return setmetatable({ vocab = self.vocab, corpus = self.corpus, vocabulary = self.vocabulary, low = self.low + low, high = self.low + high, parts = splits.new(high - low) }, meta) --[[@as perilune.Text]]
end

---Reads token ids: `count` of them from token `first` of this text on.
---@param first integer
---@param count integer
---@return perilune.Tensor (count), i32 or i64
function Text:ids(first, count)
  check.whole("text:ids", "first", first, 0)
  check.whole("text:ids", "count", count)
  if first + count > self:size() then
    pl.error("text:ids", ("tokens %d to %d are not in a text of %d"):format(first, first + count, self:size()), "ids(first, count) counts from 0")
  end
  return self.corpus.ids(self.low + first, count)
end

---Returns a loader of windows of `length` tokens: at random positions with a `seed`, else adjacent, one epoch in order.
---@param opts {length: integer, batch: integer, seed: integer?} length: tokens of a window; batch: windows of a batch; seed: of random positions, without it windows are adjacent and cover the text once
---@return perilune.Loader
function Text:windows(opts)
  local op = "text:windows"
  local o = check.options(op, opts, {}, { length = "number", batch = "number", seed = "number" })
  check.required(op, o, { "length", "batch" })
  local T, n = check.whole(op, "length", o.length), self:size()
  check.whole(op, "batch", o.batch)
  if n < T + 1 then
    pl.error(op, ("a window of %d tokens and the token after it do not fit into %d tokens"):format(T, n), "use a shorter context or a longer text")
  end
  local reader, low = self.corpus.reader(self.low, self.high, T + 1), self.low
  local windows = (n - 1) // T
  ---Computes where windows `first` .. `first + count - 1` start in this text.
  ---@return integer[]
  local function starts(first, count)
    if o.seed then return native.window_starts(o.seed, first, count, n, T + 1) end
    local list = {}
    for i = 1, count do list[i] = (first + i - 1) * T end
    return list
  end
  local function places(first, count)
    local list = starts(first, count)
    for i = 1, #list do list[i] = list[i] + low end
    return list
  end
  local function make(first, count)
    local both_BT = reader.batch(starts(first, count), first)
    return { x = both_BT:narrow(1, 0, T), y = both_BT:narrow(1, 1, T) }
  end
  local prefetch = reader.prefetch and function(first, count) reader.prefetch(starts(first, count), first) end
  return loader.new(op, { n = windows, size = o.batch, shuffled = o.seed ~= nil, drop_last = false, make = make, prefetch = prefetch, ids = places,
                            what = "windows from token", tokens = T, context = T,
                            corpus = checked.corpus(self.corpus, self.low, self.high, self.vocabulary, self.vocab) })
end

return { text = text, sequence = sequence, tokens = tokens, token_files = token_files, language = language }
