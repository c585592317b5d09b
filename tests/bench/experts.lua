-- tests/bench/experts.lua: trains a language model of mixtures of experts whose routers prefer some experts. `experts.py` runs it.
--
-- The router of each block has a bias of -skew ln(1 + e) for expert e, so the probability of an expert before the choice is about
-- Zipf's with exponent `skew`: the first device along ep has the most tokens, unless experts move. Tokens are random.
--
-- Dims: B batch, T positions, V vocabulary.

local pl = require "perilune"
local nn, optim, data = pl.nn, pl.optim, pl.data

local recipe = pl.recipe {
  name = "experts", description = "mixtures of experts with skewed routers, on random tokens",
  params = {
    layers = 8, width = 2048, heads = 16, hidden = 2048, vocab = 32768,
    experts = 32, top = 4, skew = 1.0, rebalance = 0, replicas = 0,
    context = 1024, batch = 32, steps = 60, seed = 1,
    lr = 1e-5,   -- as in the warm-up of a run: routers change little from step to step
  },
}

function recipe.data(p)
  return data.language { tokens = "", vocab = p.vocab, context = p.context, batch = p.batch, seed = p.seed }
end

function recipe.model(p)
  local m = { embed = nn.Embedding(p.vocab, p.width, { std = 0.02 }), blocks = {}, norm = nn.RMSNorm(p.width) }
  for i = 1, p.layers do
    local block = nn.TransformerBlock(p.width, p.heads, {
      causal = true, norm = "rms", mlp = "swiglu", hidden = p.hidden, bias = false, experts = p.experts, top = p.top,
      rebalance = p.rebalance > 0 and { every = p.rebalance, replicas = p.replicas } or nil,
    })
    local router = nn.Linear(p.width, p.experts, { fp8 = false })
    router.bias = pl.state((pl.arange(p.experts):to("f32") + 1):log() * -p.skew)
    block.mlp.router = router
    m.blocks[i] = block
  end

  function m:forward(ids_BT)
    local x_BTC = self.embed(ids_BT)
    for _, block in ipairs(self.blocks) do x_BTC = block(x_BTC) end
    return pl.linear(self.norm(x_BTC), self.embed.weight)
  end

  m.sharding = { embed = "column" }
  return nn.module(m)
end

function recipe.optimizer(p, model)
  return optim.AdamW(optim.decay_matrices(model, 0.1), { lr = p.lr, clip_norm = 1.0 })
end

function recipe.loss(model, batch)
  local logits_BTV = model(batch.x)
  return pl.cross_entropy(logits_BTV:flatten(0, 1), batch.y:flatten())
end

return recipe
