-- Trains an MLP, a GPT or a Llama in f64, with tied embeddings, clipping and AdamW: what pipeline stages must repeat to rounding.

local pl = require "perilune"
local nn, optim, data = pl.nn, pl.optim, pl.data

local recipe = pl.recipe {
  name = "stages",
  params = { net = "mlp", layers = 4, width = 16, batch = 4, accumulate = 4, steps = 40, ema = false, clip = 0.5, dropout = 0.0, bad = -1, bad_in = "", checkpoint = false, dtype = "f64",
             on_nan = "skip", pipeline = "1f1b" },
}

local vocab, context = 24, 6

function recipe.data(p)
  local n = 200
  if p.net == "mlp" then
    local x = pl.randn({ n, 10 }, { dtype = p.dtype })
    if p.bad >= 0 then x = pl.where(pl.arange(n):eq(p.bad):unsqueeze(1), 0 / 0, x) end   -- a sample that is no number
    local set = data.tensors { x = x, y = pl.randint(0, vocab, { n }) }
    return { train = set:shuffle(3):batch(p.batch), valid = set:batch(p.batch) }
  end
  local ids = { x = pl.randint(0, vocab, { n, context }), y = pl.randint(0, vocab, { n, context }) }
  if p.bad_in ~= "" then ids[p.bad_in] = pl.where(pl.arange(n):eq(p.bad):unsqueeze(1), vocab + 3, ids[p.bad_in]) end   -- a sample whose ids are out of range
  local set = data.tensors(ids)
  local of = { context = context }
  return { train = set:shuffle(3):batch(p.batch, of), valid = set:batch(p.batch, of) }
end

-- Replaces the States of a model by States of another dtype.
local function convert(model, dtype)
  local seen = {}
  local function visit(t)
    if seen[t] then return end
    seen[t] = true
    for key, value in pairs(t) do
      if pl.is_state(value) then
        if not seen[value] then
          seen[value] = pl.state(value:to(dtype))
          seen[seen[value]] = seen[value]
        end
        t[key] = seen[value]
      elseif type(value) == "table" then
        visit(value)
      end
    end
  end
  visit(model)
  return model
end

local function mlp(p)
  local m = { layers = {}, head = nn.Linear(p.width, vocab), drop = nn.Dropout(p.dropout) }
  for i = 1, p.layers do m.layers[i] = nn.Linear(i == 1 and 10 or p.width, p.width) end
  function m:forward(x)
    for _, layer in ipairs(self.layers) do x = self.drop(layer(x):tanh()) end
    return self.head(x)
  end
  return m
end

local function transformer(p)
  local llama = p.net == "llama"
  local m = { embed = nn.Embedding(vocab, p.width), blocks = {}, norm = llama and nn.RMSNorm(p.width) or nn.LayerNorm(p.width) }
  if not llama then m.positions = nn.Embedding(context, p.width) end
  local options = llama and { causal = true, norm = "rms", mlp = "swiglu", kv_heads = 2, bias = false, rope = true, checkpoint = p.checkpoint } or { causal = true, checkpoint = p.checkpoint }
  for i = 1, p.layers do m.blocks[i] = nn.TransformerBlock(p.width, 4, options) end
  function m:forward(ids)
    local x = self.embed(ids) ---@type any
    if self.positions then x = x + self.positions(pl.arange(ids:size(1))) end
    for _, block in ipairs(self.blocks) do x = block(x) end
    return pl.linear(self.norm(x), self.embed.weight):flatten(0, 1)
  end
  return m
end

function recipe.model(p)
  local m = p.net == "mlp" and mlp(p) or transformer(p)
  return convert(nn.module(m), p.dtype)
end

function recipe.optimizer(p, model)
  return optim.AdamW(optim.decay_matrices(model, 0.1), { lr = optim.cosine { peak = 1e-2, warmup = 3, steps = p.steps }, clip_norm = p.clip })
end

function recipe.ema(p, model) return p.ema and optim.EMA(model, 0.9) or nil end

function recipe.loss(model, batch)
  local logits = model(batch.x)
  local loss = pl.cross_entropy(logits, batch.y:flatten())
  return loss, { accuracy = logits:argmax(-1):eq(batch.y:flatten()):to("f64"):mean() }
end

return recipe
