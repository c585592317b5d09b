-- recipes/sft.lua: tunes a small transformer on questions and answers of a JSONL file, and answers a few that it has not seen
--
--   perilune run recipes/sft.lua
--   perilune run recipes/sft.lua --set records=train.jsonl --set tokenizer=FOLDER --set context=1024
--
-- A conversation is rendered by a chat template; the loss trains the answers only. Conversations are packed into sequences without attention
-- from one to another. The default file has sums of two numbers (recipes/data/make.py), and bytes as tokens: after 500 steps, two seconds on a
-- GPU and a minute on two cores, 80 of 80 held-out sums are right.
--
-- Dims: B batch, T positions, C width, V vocabulary.

local pl = require "perilune"
local nn, optim, data = pl.nn, pl.optim, pl.data

local recipe = pl.recipe {
  name = "sft",
  description = "instruction tuning on JSONL",
  params = {
    records = "data/sums.jsonl",       -- objects with `question` and `answer`
    tokenizer = "",                    -- a folder with tokenizer.json and a chat template; "" is bytes
    layers = 4, heads = 4, width = 128, context = 128,
    batch = 16, steps = 500, lr = 1e-3, warmup = 50, seed = 1, samples = 5,
  },
}

-- For bytes. The newline after an answer ends it, so it is trained too.
local template = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}\n{% endgeneration %}" ..
  "{% else %}{{ m.content }} {% endif %}{% endfor %}"

function recipe.data(p)
  local tokenizer = p.tokenizer == "" and data.bytes() or data.tokenizer(p.tokenizer)
  local chats = data.jsonl(p.records):map(function(r)
    return { messages = { { role = "user", content = r.question }, { role = "assistant", content = r.answer } } }
  end)
  local valid, train = chats:holdout(0.05)
  local options = { template = p.tokenizer == "" and template or nil }
  return {
    train = train:chat(tokenizer, options):pack(p.context):shuffle(p.seed):batch(p.batch),
    valid = valid:chat(tokenizer, options):pack(p.context):batch(p.batch),
    held = valid, tokenizer = tokenizer,
  }
end

function recipe.model(p, d)
  local V = d.tokenizer:size()
  local m = {
    tokens = nn.Embedding(V, p.width, { std = 0.02 }),
    blocks = {},
    norm = nn.RMSNorm(p.width),
    head = nn.Linear(p.width, V, { bias = false }),
  }
  for i = 1, p.layers do
    m.blocks[i] = nn.TransformerBlock(p.width, p.heads, { norm = "rms", mlp = "swiglu", bias = false, causal = true, rope = true })
  end
  function m:forward(ids_BT, options)
    local x_BTC = self.tokens(ids_BT)
    for _, block in ipairs(self.blocks) do x_BTC = block(x_BTC, options) end
    return self.head(self.norm(x_BTC))
  end
  return nn.module(m)
end

function recipe.optimizer(p, model)
  local lr = optim.cosine { peak = p.lr, floor = p.lr / 10, warmup = p.warmup, steps = p.steps }
  return optim.AdamW(optim.decay_matrices(model, 0.1), { lr = lr, betas = { 0.9, 0.99 }, clip_norm = 1.0 })
end

function recipe.loss(model, batch)
  local logits_BTV = model(batch.x, { documents = batch.documents, positions = batch.positions })
  return pl.cross_entropy(logits_BTV:flatten(0, 1), batch.y:flatten())   -- a target of -100 counts nothing
end

-- Answers greedily. The input always has the full context length, padded at the end, where causal attention does not read.
function recipe.sample(run, question)
  local p, tokenizer = run.params, run.data.tokenizer
  local ids, first = tokenizer:encode((question or "What is 7 + 5?") .. " "), nil
  first = #ids
  while #ids < p.context do
    local window = {}
    for i = 1, p.context do window[i] = ids[i] or 0 end
    local id = pl.step(function()
      return pl.no_grad(function()
        local logits_TV = run.model(pl.tensor({ window }, { dtype = "i64" })):squeeze(0)
        return logits_TV:index_select(0, pl.tensor({ #ids - 1 }, { dtype = "i64" })):squeeze(0):argmax()
      end)
    end):item()
    if tokenizer:decode { id } == "\n" then break end
    ids[#ids + 1] = id
  end
  return tokenizer:decode { table.unpack(ids, first + 1) }
end

function recipe.finish(run)
  if run.params.tokenizer ~= "" or run.params.samples == 0 then return end
  local right, count = 0, math.min(run.params.samples, run.data.held:size())
  for i = 0, count - 1 do
    local question, want = table.unpack((function(m) return { m[1].content, m[2].content } end)(run.data.held:get(i).messages))
    local got = run:generate(question)
    if got == want then right = right + 1 end
    print(("%s %s%s"):format(question, got, got == want and "" or ("   (it is %s)"):format(want)))
  end
  print(("%d of %d held-out answers are right"):format(right, count))
end

return recipe
