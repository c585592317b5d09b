-- Tests tokenizers and chat templates as recipes use them; runtime/tokenizer/tests compares them with Hugging Face's libraries.

local pl = require "perilune"
local data = pl.data
local t = require "support"
local describe, it, expect = t.describe, t.it, t.expect

local tok = data.tokenizer "../../runtime/tokenizer/tests/chat/tokenizer.json"
local chatml = [[
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}]]
local talk = { { role = "user", content = "Who?" }, { role = "assistant", content = "Alice." } }

describe("tokenizer", function()
  it("encodes and decodes", function()
    local ids = tok:encode "Alice was beginning to get very tired — naïve"
    expect(type(ids)):to_be "table"
    expect(tok:decode(ids)):to_be "Alice was beginning to get very tired — naïve"
    local tensor = tok:encode("Alice", { tensor = true })
    expect(tensor.dtype):to_be "i64"
    expect(tensor):to_equal(tok:encode "Alice")
    expect(tok:decode(tensor)):to_be "Alice"
    expect(tok:size()):to_be(500)
  end)

  it("takes special tokens as text unless told to parse them", function()
    local stop = tok:id "<|im_end|>"
    expect(tok:token(stop)):to_be "<|im_end|>"
    expect(tok:encode("<|im_end|>", { specials = "parse" })):to_equal { stop }
    local text = tok:encode "<|im_end|>"
    expect(#text > 1):to_be(true)
    expect(tok:decode(text)):to_be "<|im_end|>"
    expect(tok:decode({ stop }, { skip_specials = true })):to_be ""
    expect(tok:id "no such token"):to_be(nil)
  end)

  it("numbers bytes and characters", function()
    expect(data.bytes():encode "hé"):to_equal { 104, 195, 169 }
    expect(data.bytes():size()):to_be(256)
    local chars = data.chars "banana"
    expect(chars:encode "nab"):to_equal { 2, 0, 1 }
    expect(chars:decode { 1, 0, 2 }):to_be "ban"
    expect(function() chars:encode "x" end):to_raise "'x': is not in the vocabulary"
  end)

  it("refuses what it cannot use", function()
    expect(function() tok:encode(3) end):to_raise "the text is 3"
    expect(function() tok:encode("a", { special = "parse" }) end):to_raise "Did you mean 'specials'?"
    expect(function() tok:encode("a", { specials = "token" }) end):to_raise 'it must be "text" or "parse"'
    expect(function() tok:decode { 500 } end):to_raise "id 500: is not in a vocabulary of 500 tokens"
    expect(function() tok:decode { -1 } end):to_raise "ids count from 0"
    expect(function() data.tokenizer "files/text.txt" end):to_raise "is not JSON"
    expect(function() data.tokenizer "files" end):to_raise "has no tokenizer.json"
    expect(function() data.tokenizer "nowhere" end):to_raise "there is no file or folder"
  end)
end)

describe("chat", function()
  it("renders messages and masks all but answers", function()
    expect(tok:render(talk, { template = chatml })):to_be "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nAlice.<|im_end|>\n"
    local sample = tok:chat(talk, { template = chatml })
    local trained = {}
    for k, id in ipairs(sample.ids) do
      if sample.mask[k] == 1 then trained[#trained + 1] = id end
    end
    expect(tok:decode(trained)):to_be "Alice.<|im_end|>"
    expect(#sample.mask):to_be(#sample.ids)
    local all = tok:chat(talk, { template = chatml, train_on = "all" })
    expect(all.ids):to_equal(sample.ids)
    for _, mask in ipairs(all.mask) do expect(mask):to_be(1) end
  end)

  it("passes tools in sorted or given order, variables and a date", function()
    local template = "{{ tools | tojson }} {{ name }} {{ strftime_now('%d %B %Y') }}"
    local tools = { { name = "f", args = { b = 1, a = { 1.5, true } } } }
    local text = tok:render(talk, { template = template, tools = tools, variables = { name = "x" }, date = "2026-11-26" })
    expect(text):to_be '[{"args": {"a": [1.5, true], "b": 1}, "name": "f"}] x 26 November 2026'
    local given = tok:render(talk, { template = template, tools = '[{"name": "f", "args": {}}]' })
    expect(given):to_be '[{"name": "f", "args": {}}]  26 July 2024'
  end)

  it("refuses what it cannot train", function()
    expect(function() tok:chat(talk) end):to_raise "has no chat template"
    expect(function() tok:chat({ talk[1] }, { template = chatml }) end):to_raise 'no turn whose role is "assistant"'
    expect(function() tok:chat(talk, { template = chatml, max_length = 3 }) end):to_raise "leave no token to train"
    expect(function() tok:chat(talk, { template = chatml, train_on = "user" }) end):to_raise '"assistant" or "last" or "all"'
    expect(function() tok:chat("Hi", { template = chatml }) end):to_raise "the messages are"
    expect(function() tok:chat({ { content = "x" } }, { template = chatml }) end):to_raise "message 1: has no role"
    expect(function() tok:chat(talk, { template = "{% for %}" }) end):to_raise "the chat template, line 1"
    expect(function() tok:chat(talk, { template = "{{ raise_exception('no') }}" }) end):to_raise "refuses these messages: no"
    expect(function() tok:render(talk, { template = chatml, date = "today" }) end):to_raise "a date like"
    local cycle = {}
    cycle[1] = cycle
    expect(function() tok:render({ { role = "user", content = cycle } }, { template = chatml }) end):to_raise "tables within each other"
    expect(function() tok:render({ { role = "user", content = print } }, { template = chatml }) end):to_raise "it holds texts"
  end)
end)

describe("training a tokenizer", function()
  local BOOK = "../../recipes/data/alice.txt"
  local texts = { { text = ("low lower lowest "):rep(40) }, { text = ("new newer widest "):rep(30) } }

  it("makes each model, the same from the same texts", function()
    for _, model in ipairs { "bpe", "wordpiece", "unigram" } do
      local tokenizer = data.train_tokenizer(BOOK, { model = model, vocab = 400 })
      expect(tokenizer:size() > 300 and tokenizer:size() <= 400):to_be(true)
      local ids = tokenizer:encode "Alice was beginning to get very tired"
      expect(#ids < 30):to_be(true)
      expect(data.train_tokenizer(BOOK, { model = model, vocab = 400 }):encode "Alice was beginning to get very tired"):to_equal(ids)
    end
  end)

  it("takes records and conversations", function()
    local own = data.train_tokenizer(data.list(texts), { vocab = 270, special = { "<eot>", "<|user|>" } })
    expect({ own:id "<eot>", own:id "<|user|>", own:size() }):to_equal { 0, 1, 270 }
    expect(own:decode(own:encode "lowest newest")):to_be "lowest newest"
    expect(#own:encode " lowest" < 4):to_be(true)
    local chats = { { messages = { { role = "user", content = texts[1].text }, { role = "assistant", content = texts[2].text } } } }
    local two = data.train_tokenizer(data.list(chats), { vocab = 270, field = "messages", special = { "<eot>", "<|user|>" } })
    expect(two:encode "lower newer"):to_equal(own:encode "lower newer")
    local file = data.train_tokenizer("../../recipes/data/sums.jsonl", { vocab = 280, field = "question" })
    expect(#file:encode "What is 1 + 17?" < 15):to_be(true)
    local names = data.train_tokenizer("files/reviews.csv", { vocab = 260, field = "text" })
    -- Its texts have no pair twice: the bytes and the special token.
    expect(names:size()):to_be(257)
  end)

  it("refuses what makes no sense, at the recipe's line", function()
    local function refused(source, opts, message)
      expect(function() data.train_tokenizer(source, opts) end):to_raise(message)
    end
    local records = data.list(texts)
    refused(records, nil, "option 'vocab' is missing")
    refused(records, { vocab = 0 }, "vocab is 0")
    refused(records, { vocab = 200 }, "the size of the vocabulary: is 200; it is at least 257")
    refused(records, { vocab = 300, model = "bep" }, "bep")
    refused(records, { vocab = 300, model = "unigram", pattern = "gpt2" }, "'pattern' has no effect with model = \"unigram\"")
    refused(records, { vocab = 300, special = { 7 } }, "option 'special' has 7")
    refused(records, { vocab = 300, special = { "a", "a" } }, "doubled")
    refused(records, { vocab = 300, field = "txet" }, "list: record 0: the record has no field 'txet' (fields: text)")
    refused(records, { vocab = 300, vocabulary = 300 }, "vocab")
    refused(records, { vocab = 6, model = "unigram" }, "training: ")
    refused(data.list { { text = 7 } }, { vocab = 300 }, "list: record 0: 'text' is an integer")
    refused(data.list { { text = "" } }, { vocab = 300 }, "have no words")
    refused(BOOK, { vocab = 300, field = "text" }, "is a text, which has no fields")
    refused("none.txt", { vocab = 300 }, "there is no file \"none.txt\"")
    refused(7, { vocab = 300 }, "the texts are 7")
    refused(records, { vocab = 300, out = "/proc/tok.json" }, "may be written")
    refused(records, { vocab = 300, out = "tok.txt" }, ".json")
    refused(records, { vocab = 300, hash = "sha256:0" }, "option 'hash' is given")
  end)
end)
