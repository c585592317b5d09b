-- data/tokenizer.lua: opens tokenizers, which encode texts and conversations as token ids.
--
-- A tokenizer is native: it never changes, and threads share it. Ids of texts come as lists, for records; `tensor = true` gives a
-- tensor. `chat` renders messages by the chat template of the tokenizer's folder and marks the tokens that the loss trains.

local pl = require "perilune"
local check = require "perilune.check"
local native = require "perilune.data.native"
local address = require "perilune.data.address"

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
---@field decode fun(self, ids: integer[]|perilune.Tensor, opts: {skip_specials: boolean?}?): string
---@field chat fun(self, messages: perilune.Message[], opts: perilune.ChatOptions?): perilune.ChatSample
---@field render fun(self, messages: perilune.Message[], opts: perilune.RenderOptions?): string

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
