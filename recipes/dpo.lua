-- recipes/dpo.lua: teaches a small transformer to prefer one of two answers, by direct preference optimization
--
-- The first `supervised` steps train on both answers of each pair alike. Then the log-probabilities of all answers under this model, the
-- reference, are stored in a State, and the remaining steps optimize the preference (Rafailov et al., arXiv:2305.18290). The default pairs are
-- made by a function: sums whose preferred answer is a sentence, the other the number alone. After 300 supervised steps the sentence is the likelier
-- answer to 47 % of the held-out sums, after 200 more to all of them, with a mean reward margin of 2.3.
--
--   perilune run recipes/dpo.lua
--   perilune run recipes/dpo.lua --set pairs=pairs.jsonl --set tokenizer=FOLDER --set context=512
--
-- Dims: B pairs, T positions, V vocabulary.

local pl = require "perilune"
local nn, optim, data, train = pl.nn, pl.optim, pl.data, pl.train

local recipe = pl.recipe {
  name = "dpo",
  description = "direct preference optimization of answers",
  params = {
    pairs = "",                    -- JSONL of { prompt, chosen, rejected }: texts or lists of messages; "": sums
    tokenizer = "",                -- a folder with tokenizer.json and, for messages, a chat template; "" is bytes
    layers = 2, heads = 4, width = 96, context = 48, count = 1000,
    supervised = 300, steps = 500, batch = 16, lr = 1e-3, preference_lr = 1e-4, beta = 0.1, warmup = 20, seed = 1,
  },
  on_spike = "off",                -- the loss is another one after the supervised steps
}

-- A sum of two numbers below 50, another for each number of a pair up to 2,500.
local function sum(number)
  local k = number * 1657 % 2500
  local a, b = k // 50, k % 50
  return { id = number, prompt = ("What is %d + %d? "):format(a, b), chosen = ("The sum is %d.\n"):format(a + b), rejected = ("%d\n"):format(a + b) }
end

function recipe.data(p)
  if p.supervised < 1 then error(("supervised is %s; give 1 or more: the reference is the model after these steps"):format(p.supervised)) end
  local tokenizer = p.tokenizer == "" and data.bytes() or data.tokenizer(p.tokenizer)
  local all = p.pairs == "" and data.generate(p.count, sum) or data.jsonl(p.pairs)
  -- The number of a pair, under which its reference is stored.
  if p.pairs ~= "" then all = all:zip(data.generate(all:size(), function(i) return { id = i } end)) end
  local valid, others = all:holdout(0.1, p.seed)
  local options = { length = p.context, keep = { "id" }, too_long = "truncate" }
  -- For each pair the log-probabilities of the preferred and the other answer under the reference; zeros before it is known.
  recipe.states = { reference = pl.state(pl.zeros { all:size(), 2 }, { trainable = false }) }
  return {
    train = others:preference(tokenizer, options):shuffle(p.seed):batch(p.batch),
    valid = valid:preference(tokenizer, options):batch(2 * p.batch),
    vocabulary = tokenizer:size(), pairs = { all:preference(tokenizer, options):batch(2 * p.batch) },
  }
end

function recipe.model(p, d)
  local m = { tokens = nn.Embedding(d.vocabulary, p.width, { std = 0.02 }), blocks = {}, norm = nn.RMSNorm(p.width),
              head = nn.Linear(p.width, d.vocabulary, { bias = false }) }
  for i = 1, p.layers do
    m.blocks[i] = nn.TransformerBlock(p.width, p.heads, { norm = "rms", mlp = "swiglu", bias = false, causal = true, rope = true })
  end
  function m:forward(ids_RT)
    local x_RTC = self.tokens(ids_RT)
    for _, block in ipairs(self.blocks) do x_RTC = block(x_RTC) end
    return self.head(self.norm(x_RTC))
  end
  return nn.module(m)
end

function recipe.optimizer(p, model)
  local first = optim.cosine { peak = p.lr, floor = p.preference_lr, warmup = p.warmup, steps = math.max(p.supervised, 1) }
  local function lr(step) return step < p.supervised and first(step) or p.preference_lr end
  return optim.AdamW(optim.decay_matrices(model, 0.1), { lr = lr, betas = { 0.9, 0.99 }, clip_norm = 1.0 })
end

-- (B, 2): the log-probabilities of the preferred and the other answer.
local function log_probs(model, batch)
  return train.answer_log_probs(model(batch.x:flatten(0, 1)), batch.y:flatten(0, 1)):view(-1, 2)
end

local function preference(policy, batch)
  return train.dpo_loss(policy, recipe.states.reference:index_select(0, batch.id), { beta = recipe.params.beta })
end

-- `share` is a number of the step, so both parts of the run have one plan.
function recipe.step(run, batch)
  local policy, share = log_probs(run.model, batch), run.count < run.params.supervised and 1.0 or 0.0
  local supervised = policy:sum():neg() / batch.y:ne(-100):to("f32"):sum()
  local preferred, metrics = preference(policy, batch)
  local loss = supervised * share + preferred * (1 - share) --[[@as perilune.Tensor]]
  loss:backward()
  run.opt:step()
  return loss, metrics
end

-- `likelier`: the share of held-out pairs whose preferred answer has the higher probability.
function recipe.evaluate(model, batch)
  local policy = log_probs(model, batch)
  local loss, metrics = preference(policy, batch)
  metrics.likelier = policy:select(1, 0):gt(policy:select(1, 1)):to("f32"):mean()
  return loss, metrics
end

-- Stores the reference when the supervised steps are done.
function recipe.after_step(run)
  if run.count ~= run.params.supervised then return end
  local loader, values = run.data.pairs[1], {}
  run.model:eval()
  for k = 0, loader:batches() - 1 do
    local ids, found = pl.step(function()
      local batch = loader:batch_at(k)
      return batch.id, pl.no_grad(function() return log_probs(run.model, batch) end)
    end)
    local rows = found:tolist()
    for i, id in ipairs(ids:tolist()) do values[id + 1] = rows[i] end
  end
  run.model:train()
  recipe.states.reference:assign(pl.tensor(values))
end

return recipe
