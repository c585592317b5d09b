-- data/tokenizer.lua: opens tokenizers, which encode texts and conversations as token ids.
--
-- A tokenizer is native: it never changes, and threads share it. Ids of texts come as lists, for records; `tensor = true` gives a
-- tensor. `chat` renders messages by the chat template of the tokenizer's folder and marks the tokens that the loss trains.

local pl = require "perilune"
local check = require "perilune.check"
local native = require "perilune.data.native"
local address = require "perilune.data.address"
local sources = require "perilune.data.sources"
local records = require "perilune.data.records"

---@class perilune.Message a turn of a conversation; templates may use further fields
---@field role string "system", "user", "assistant", "tool"
---@field content any? text, or a list of parts

---@class perilune.ChatSample
---@field ids integer[]
---@field mask integer[] 1 where the loss of predicting the token counts, else 0

---@class perilune.RenderOptions
---@field template string? the template, instead of the tokenizer's own
---@field tools (table|string)? schemas of tools as a table, or as JSON, which keeps the order of keys
---@field variables table<string, any>? further variables of the template
---@field add_generation_prompt boolean? ends the text with the header of an answer
---@field date string? what strftime_now returns, by default "2024-07-26"

---@class perilune.ChatOptions: perilune.RenderOptions
---@field train_on ("assistant"|"last"|"all")? all turns of the assistant, its last one, or every token
---@field specials ("text"|"parse")? "parse": special tokens in messages become their ids, as in transformers
---@field max_length integer? tokens beyond are dropped

---@class perilune.Tokenizer
---@field size fun(self): integer number of ids
---@field id fun(self, token: string): integer? the id of a token
---@field token fun(self, id: integer): string? the token of an id, as it stands in the vocabulary
---@field encode fun(self, text: string, opts: {specials: ("text"|"parse")?, add_specials: boolean?, tensor: boolean?}?): any ids as a list, or (N) i64
---@field decode fun(self, ids: integer[]|perilune.Tensor, opts: {skip_specials: boolean?}?): string the text of ids
---@field chat fun(self, messages: perilune.Message[], opts: perilune.ChatOptions?): perilune.ChatSample ids of a conversation by the chat template, and which of them the loss trains
---@field render fun(self, messages: perilune.Message[], opts: perilune.RenderOptions?): string the text of a conversation by the chat template

local tokenizer = {}

---Opens a tokenizer.json of Hugging Face's library, or a folder with one and its tokenizer_config.json and chat_template.jinja.
---Special tokens in texts are text, unless `specials = "parse"`; none are added, unless `add_specials = true`.
---  local tok = data.tokenizer("tokenizer")
---  local ids = tok:encode("Down the rabbit hole")
---@param path string relative to the recipe's folder, or absolute; or the address of a tokenizer.json
---@param opts {hash: perilune.Hash?}? hash: of the content of an address
---@return perilune.Tokenizer
function tokenizer.open(path, opts)
  if type(path) ~= "string" then pl.error("data.tokenizer", "the path is " .. check.show(path)) end
  local o = check.options("data.tokenizer", opts, {}, { hash = "string|table" })
  return native.tokenizer(address.with_hash("data.tokenizer", path, o.hash))
end

---Trains a tokenizer on the texts of records, of files of records, or of text files (a document each, also .gz). The program's cache keeps
---it by the texts and the options, so that a second start does not train.
---  local tok = data.train_tokenizer("corpus.jsonl", { vocab = 8000, field = "text", out = "tok.json" })
---`model` is "bpe" (byte-level, Sennrich et al. 2016), "wordpiece" (Schuster and Nakajima 2012) or "unigram" (Kudo 2018). The same texts and
---options give the same tokenizer. `special` lists special tokens, which get the first ids; the first of a bpe vocabulary ends documents.
---@param source string|string[]|perilune.Records paths relative to the recipe's folder, or absolute; or records
---@param opts {vocab: integer, model?: "bpe"|"wordpiece"|"unigram", field?: string, pattern?: "gpt2"|"llama3"|"qwen2", special?: string[], min_frequency?: integer, out?: string, hash?: perilune.Hash} vocab: ids in all; model: kind of vocabulary; field: of a text or of messages; pattern: how bpe splits text; special: tokens that get the first ids; min_frequency: of pairs that merge; out: the path of a tokenizer.json to write; hash: of the content of an address
---@return perilune.Tokenizer
function tokenizer.train(source, opts)
  local op = "data.train_tokenizer"
  local o = check.options(op, opts, { model = "bpe", pattern = "gpt2", min_frequency = 2 },
    { vocab = "number", field = "string", special = "table", out = "string", hash = "string|table" })
  check.required(op, o, { "vocab" })
  check.whole(op, "vocab", o.vocab)
  check.whole(op, "min_frequency", o.min_frequency, 0)
  check.word(op, "model", o.model, { "bpe", "wordpiece", "unigram" })
  check.word(op, "pattern", o.pattern, { "gpt2", "llama3", "qwen2" })
  if o.model ~= "bpe" and opts.pattern then pl.error(op, ("'pattern' has no effect with model = \"%s\""):format(o.model), "it belongs to model = \"bpe\"") end
  for _, token in ipairs(o.special or {}) do
    if type(token) ~= "string" then pl.error(op, "option 'special' has " .. check.show(token), "list texts: special = { \"<|endoftext|>\", \"<|user|>\" }") end
  end
  local given = source ---@type any
  if not records.is(source) then
    if type(source) ~= "string" and type(source) ~= "table" then
      pl.error(op, "the texts are " .. check.show(source), "give records, a path, or a list of paths: data.train_tokenizer(\"corpus.jsonl\", { vocab = 8000 })")
    end
    local paths = sources.files(op, source, o.hash)
    if sources.has_records(paths[1]) then
      given = sources.records(paths)
    else
      if o.field then pl.error(op, ("option 'field' is given, and %s is a text, which has no fields"):format(check.show(paths[1])), "leave it out, or name a file of records, such as .jsonl") end
      given = paths
    end
  elseif o.hash then
    pl.error(op, "option 'hash' is given, and no path", "leave it out: hashes name the content of addresses")
  end
  o.field, o.hash = o.field or "text", nil
  return native.train_tokenizer(records.is(given) and given.native or given, o)
end

---Makes the tokenizer of bytes: ids 0 to 255.
---@return perilune.Tokenizer
function tokenizer.bytes()
  return native.byte_tokenizer()
end

---Makes a tokenizer of the characters of a text, numbered in sorted order as data.text does.
---@param text string has every character of the vocabulary
---@return perilune.Tokenizer
function tokenizer.chars(text)
  if type(text) ~= "string" then pl.error("data.chars", "the text is " .. check.show(text)) end
  return native.char_tokenizer(text)
end

return tokenizer
