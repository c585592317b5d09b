-- data/text.lua: reads texts as token ids and batches windows of them for language models.
--
-- A batch has x (B, T) and y (B, T) i64, y shifted by one token. Training windows start at random positions; evaluation windows
-- are adjacent and cover the text once. Splits are contiguous ("train" in front), because overlapping windows would leak
-- validation tokens into training. data.text numbers the characters of a file in sorted order; other tokenizers write files of
-- ids for data.tokens.

local pl = require "perilune"
local check = require "perilune.check"
local native = require "perilune.data.native"
local splits = require "perilune.data.split"
local loader = require "perilune.data.loader"

---@class perilune.Text
---@field vocab any? of data.text, with :size(), :encode(text), :decode(ids)
---@field tokens perilune.Tensor (N) i64
---@field low integer first token of this split
---@field high integer end of this split, exclusive
---@field parts perilune.Parts splits taken from it
local Text = {}
local meta = { __index = Text }

---Reads a UTF-8 text file as character ids.
---@param path string relative to the recipe's folder, or absolute
---@param opts {level?: string, max_bytes?: integer}? level: "char"; max_bytes: limit of the text, by default 4 GiB; of a .gz 25 times its size or 32 MiB
---@return perilune.Text
local function text(path, opts)
  if type(path) ~= "string" then pl.error("data.text", "the path is " .. check.show(path)) end
  local o = check.options("data.text", opts, { level = "char" }, { max_bytes = "number" })
  if o.max_bytes then check.whole("data.text", "max_bytes", o.max_bytes) end
  check.word("data.text", "level", o.level, { "char" })
  local content = native.text(path, o.max_bytes)
  local vocab = native.chars(content)
  local tokens = vocab:encode(content)
  pl.eval(tokens)
  return setmetatable({ vocab = vocab, tokens = tokens, low = 0, high = tokens:size(0), parts = splits.new(tokens:size(0)) }, meta)
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
  return setmetatable({ tokens = ids, low = 0, high = ids:size(0), parts = splits.new(ids:size(0)) }, meta)
end

---Reads token ids from a file: .bin of u16 as llm.c and nanoGPT write it, or .npy or .safetensors of one integer tensor.
---@param path string relative to the recipe's folder, or absolute
---@return perilune.Tensor (N), i32 from .bin
local function tokens(path)
  if type(path) ~= "string" then pl.error("data.tokens", "the path is " .. check.show(path)) end
  if path:match "%.bin$" then return native.tokens(path) end
  local found = pl.load(path)
  if pl.is_tensor(found) then return found:flatten() end
  local name, more = next(found)
  if name == nil or next(found, name) ~= nil then
    pl.error("data.tokens", ("'%s' does not contain exactly one tensor"):format(path), "select one: data.sequence(pl.load(path).name)")
  end
  return (more --[[@as perilune.Tensor]]):flatten()
end

---Makes the loaders of a language model: windows of a token file, its first 95 % for training.
---With tokens = "" the ids are random, for measurements of speed.
---@param opts {tokens: string, vocab: integer, context: integer, batch: integer, seed: integer}
---@return {train: perilune.Loader, valid: perilune.Loader}
local function language(opts)
  local op = "data.language"
  local o = check.options(op, opts, {}, { tokens = "string", vocab = "number", context = "number", batch = "number", seed = "number" })
  check.required(op, o, { "tokens", "vocab", "context", "batch", "seed" })
  check.whole(op, "context", o.context)
  check.whole(op, "batch", o.batch)
  local ids
  if o.tokens == "" then
    ids = pl.randint(0, o.vocab, { 64 * o.context * o.batch + 1 }, { dtype = "i32" })
  else
    ids = tokens(o.tokens)
  end
  local all = sequence(ids)
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
  return setmetatable({ vocab = self.vocab, tokens = self.tokens, low = self.low + low, high = self.low + high, parts = splits.new(high - low) }, meta)
end

---Returns a loader of windows of `length` tokens: at random positions with a `seed`, else adjacent, one epoch in order.
---@param opts {length: integer, batch: integer, seed: integer?}
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
  local ids, low = self.tokens, self.low
  local windows = (n - 1) // T
  local function starts_of(first, count)
    if o.seed then return native.text_windows(o.seed, first, count, n, T + 1) end
    local list = {}
    for i = 1, count do list[i] = (first + i - 1) * T end
    return pl.tensor(list, { dtype = "i64" })
  end
  local function starts_list(first, count)
    return (starts_of(first, count) + low):tolist()
  end
  local function make(first, count)
    local starts = starts_of(first, count)
    local at_BT = (starts + low):unsqueeze(1) + pl.arange(T + 1)
    local both_BT = ids:index_select(0, at_BT:flatten()):view(count, T + 1)
    if both_BT.dtype ~= "i64" then both_BT = both_BT:to("i64") end
    return { x = both_BT:narrow(1, 0, T), y = both_BT:narrow(1, 1, T) }
  end
  return loader.new(op, { n = windows, size = o.batch, shuffled = o.seed ~= nil, drop_last = false, make = make, ids = starts_list,
                            what = "windows from token", tokens = T, context = T })
end

return { text = text, sequence = sequence, tokens = tokens, language = language }
