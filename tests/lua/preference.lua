-- Tests preference pairs: their encoding, and direct preference optimization against NumPy (golden/dpo.lua).

local pl = require "perilune"
local data, train = pl.data, require "perilune.train"
local t = require "support"
local describe, it, expect = t.describe, t.it, t.expect

local golden = require "golden.dpo"

describe("records:preference", function()
  local tok = data.bytes()

  ---The text of a row up to its padding, and the part that is trained.
  local function texts(row, targets)
    local trained, all = {}, {}
    for i, id in ipairs(targets) do
      if id ~= -100 then trained[#trained + 1] = id end
      if id ~= -100 and i < #row then expect(row[i + 1]):to_be(id) end
    end
    for _, id in ipairs(row) do
      if id ~= 0 then all[#all + 1] = id end
    end
    return tok:decode(all), tok:decode(trained)
  end

  it("gives both answers the same prompt and trains the answers", function()
    local pairs_ = data.list { { prompt = "2+2=", chosen = "4\n", rejected = "five\n", id = 0 }, { prompt = "1+1=", chosen = "2\n", rejected = "3\n", id = 1 } }
    local made = pairs_:preference(tok, { length = 10, keep = { "id" } })
    local r = made:get(0)
    local all, trained = texts(r.x[1], r.y[1])
    expect({ all, trained }):to_equal { "2+2=4\n", "4\n" }
    all, trained = texts(r.x[2], r.y[2])
    expect({ all, trained }):to_equal { "2+2=five\n", "five\n" }
    local batch = made:batch(2):batch_at(0)
    expect({ batch.x.dtype, batch.y.dtype, batch.id.dtype }):to_equal { "i32", "i64", "i64" }
    expect(batch.x.shape):to_equal { 2, 2, 10 }
    -- Rows of a pair are side by side, and equal up to the answer.
    local rows = batch.x:flatten(0, 1):tolist()
    for i = 1, 4 do expect({ rows[1][i], rows[3][i] }):to_equal { rows[2][i], rows[4][i] } end
    expect(batch.id):to_equal { 0, 1 }
  end)

  it("renders conversations by the chat template", function()
    local template = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}!{% endgeneration %}" ..
      "{% else %}{{ m.content }} {% endif %}{% endfor %}"
    local user, good, bad = { role = "user", content = "2+2" }, { role = "assistant", content = "4" }, { role = "assistant", content = "22" }
    local earlier = { role = "assistant", content = "hm" }
    local options = { length = 24, template = template }
    for _, pair in ipairs {
      { prompt = { user }, chosen = { good }, rejected = { bad } },
      { prompt = { user }, chosen = "4", rejected = "22" },
      { chosen = { user, good }, rejected = { user, bad } },
    } do
      local r = data.list({ pair }):preference(tok, options):get(0)
      local all, trained = texts(r.x[1], r.y[1])
      expect({ all, trained }):to_equal { "2+2 4!", "4!" }
      all, trained = texts(r.x[2], r.y[2])
      expect({ all, trained }):to_equal { "2+2 22!", "22!" }
    end
    -- Only the last answer is trained.
    local r = data.list({ { prompt = { user, earlier, user }, chosen = "4", rejected = "22" } }):preference(tok, options):get(0)
    local _, trained = texts(r.x[1], r.y[1])
    expect(trained):to_be "4!"
    local other = { role = "user", content = "2+3" }
    expect(function() data.list({ { chosen = { user, good }, rejected = { other, bad } } }):preference(tok, options):get(0) end):to_raise "the tokens before 'chosen' differ from those before 'rejected'"
  end)

  it("truncates answers, or refuses", function()
    local long = data.list { { prompt = "abc", chosen = "1234567", rejected = "12" } }
    expect(function() long:preference(tok, { length = 8 }):get(0) end):to_raise "the prompt with 'chosen' has 10 tokens, and a row holds 9"
    local r = long:preference(tok, { length = 8, too_long = "truncate" }):get(0)
    local _, trained = texts(r.x[1], r.y[1])
    expect(trained):to_be "123456"
    expect(function() long:preference(tok, { length = 2, too_long = "truncate" }):get(0) end):to_raise "no token of 'chosen' is left to train"
  end)

  it("refuses pairs that are none", function()
    local function fails(record, text, opts) expect(function() data.list({ record }):preference(tok, opts or { length = 8 }):get(0) end):to_raise(text) end
    fails({ prompt = "a", chosen = "b", rejected = "b" }, "list: record 0: 'chosen' and 'rejected' have the same tokens")
    fails({ prompt = "a", chosen = "b" }, "the record has no field 'rejected'")
    fails({ chosen = "b", rejected = "c" }, "the record has no field 'prompt'")
    fails({ prompt = "a", chosen = "b", rejected = 3 }, "'rejected' is an integer")
    fails({ prompt = 3, chosen = "b", rejected = "c" }, "'prompt' is an integer and 'chosen' a string")
    fails({ prompt = "a", chosen = "b", rejected = "c" }, "has no field 'id', which option 'keep' names", { length = 8, keep = { "id" } })
    fails({ prompt = "a", chosen = "b", rejected = "c" }, "option 'length' is missing", {})
    fails({ prompt = "a", chosen = "b", rejected = "c" }, "Did you mean 'length'?", { lenght = 8 })
    fails({ prompt = "a", chosen = "b", rejected = "c" }, "option 'length' is 0", { length = 0 })
    fails({ prompt = "a", chosen = "b", rejected = "c" }, "a token of the vocabulary", { length = 8, end_with = "<|end|>" })
    expect(function() data.list({ {} }):preference(3, { length = 8 }) end):to_raise "the tokenizer is 3"
  end)
end)

describe("direct preference optimization", function()
  it("has NumPy's log-probabilities, loss and gradient", function()
    local logits, targets = pl.tensor(golden.logits, { dtype = "f32" }), pl.tensor(golden.targets, { dtype = "i64" })
    local policy = train.answer_log_probs(logits, targets)
    expect(policy):to_be_near(golden.log_probs, 1e-5)
    local pairs_ = pl.state(policy:view(-1, 2))
    local loss, metrics = train.dpo_loss(pairs_, pl.tensor(golden.reference, { dtype = "f32" }), { beta = golden.beta })
    loss:backward()
    expect(loss:item()):to_be_near(golden.loss, 1e-5)
    expect(metrics.margin:item()):to_be_near(golden.margin, 1e-5)
    expect(metrics.preferred:item()):to_be_near(golden.preferred, 1e-6)
    expect(pairs_.grad):to_be_near(golden.gradient, 1e-5)
  end)

  it("refuses other shapes", function()
    local two = pl.zeros { 3, 2 }
    expect(function() train.dpo_loss(two, pl.zeros { 3 }) end):to_raise "the policy has the shape {3, 2} and the reference {3}"
    expect(function() train.dpo_loss(two, two, { beta = 0 }) end):to_raise "beta is 0"
    expect(function() train.dpo_loss(two, two, { bta = 1 }) end):to_raise "Did you mean 'beta'?"
    expect(function() train.answer_log_probs(pl.zeros { 2, 3 }, pl.zeros({ 2, 3 }, { dtype = "i64" })) end):to_raise "give logits (R, T, V)"
  end)
end)
