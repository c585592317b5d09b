-- Trains a transformer with a mixture of experts in f64, with clipping and AdamW: what a mesh must repeat to rounding.

local pl = require "perilune"
local nn, optim, data = pl.nn, pl.optim, pl.data

local recipe = pl.recipe {
  name = "experts",
  params = {
    layers = 2, width = 16, hidden = 24, experts = 8, top = 2, mlp = "swiglu", batch = 8, accumulate = 1, steps = 40,
    context = 6, checkpoint = false, skewed = false, ema = false, dtype = "f64",
    rebalance = 0, replicas = 0, frozen_router = false, clip = 0.5, optimizer = "adamw",
  },
}

local vocab = 24

function recipe.data(p)
  local n, context = 200, p.context
  local set = data.tensors { x = pl.randint(0, vocab, { n, context }), y = pl.randint(0, vocab, { n, context }) }
  return { train = set:shuffle(3):batch(p.batch, { context = context }), valid = set:batch(p.batch, { context = context }) }
end

-- Replaces the States of a model by States of another dtype.
local function convert(model, dtype)
  local seen = {}
  local function visit(t)
    if seen[t] then return end
    seen[t] = true
    for key, value in pairs(t) do
      if pl.is_state(value) then
        if value.dtype ~= "i64" then t[key] = pl.state(value:to(dtype)) end
      elseif type(value) == "table" then
        visit(value)
      end
    end
  end
  visit(model)
  return model
end

function recipe.model(p)
  local m = { embed = nn.Embedding(vocab, p.width), blocks = {}, norm = nn.RMSNorm(p.width), head = nn.Linear(p.width, vocab) }
  for i = 1, p.layers do
    m.blocks[i] = nn.TransformerBlock(p.width, 4, {
      causal = true, norm = "rms", mlp = p.mlp, hidden = p.hidden, kv_heads = 2, bias = false, rope = true, checkpoint = p.checkpoint,
      experts = p.experts, top = p.experts > 0 and p.top or nil,
      rebalance = p.rebalance > 0 and { every = p.rebalance, replicas = p.replicas } or nil,
    })
    -- With equal shares, every token chooses the first experts.
    if p.skewed then m.blocks[i].mlp.router.weight = pl.state(pl.zeros { p.experts, p.width }) end
  end
  function m:forward(ids)
    local x, uneven = self.embed(ids), 0 ---@type any, any
    for _, block in ipairs(self.blocks) do
      local y, own = block(x)
      x, uneven = y, uneven + (own or 0)
    end
    return self.head(self.norm(x)):flatten(0, 1), uneven
  end
  convert(nn.module(m), p.dtype)
  for i = 1, p.frozen_router and p.layers or 0 do
    local router = m.blocks[i].mlp.router
    router.weight = pl.state(router.weight:detach(), { trainable = false })
  end
  return m
end

function recipe.optimizer(p, model)
  if p.optimizer == "adafactor" then return optim.Adafactor(model, { lr = 1e-2 }) end
  return optim.AdamW(optim.decay_matrices(model, 0.1), { lr = optim.cosine { peak = 1e-2, warmup = 3, steps = p.steps }, clip_norm = p.clip > 0 and p.clip or nil })
end

function recipe.ema(p, model) return p.ema and optim.EMA(model, 0.9) or nil end

function recipe.loss(model, batch)
  local logits, uneven = model(batch.x)
  local loss = pl.cross_entropy(logits, batch.y:flatten())
  return loss + uneven * 0.05, { accuracy = logits:argmax(-1):eq(batch.y:flatten()):to("f64"):mean(), uneven = uneven }
end

return recipe
