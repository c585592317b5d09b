-- recipes/llama.lua: trains or fine-tunes Llama 3.2 on files of tokens
--
--   perilune run recipes/llama.lua --device cuda --precision bf16 --set tokens=FILE --set batch=4 --set accumulate=8
--
-- The model is Meta's (Grattafiori et al., The Llama 3 Herd of Models, 2024): pre-norm blocks with RMSNorm, SwiGLU, grouped
-- queries, rotary positions scaled to contexts of 128 thousand tokens, no biases, tied embeddings (models from 8B on have a head of
-- their own). The optimizer settings are those of the first Llama (Touvron et al., 2023).
--
-- `tokens` names a file of token ids: .npy, .safetensors, or .bin as llm.c writes them for Llama 3. Without one the recipe trains
-- on random tokens, for measurements of speed. `size=tiny` with a small `vocab` runs on any machine.
--
-- `experts` replaces the MLP of each block by a mixture of so many experts of the same width, of which each token takes `top` (Jiang et
-- al., Mixtral of Experts, 2024); on a mesh they are divided along `ep`. Every `rebalance` steps they move so that devices have about the
-- same load, and the busiest get `replicas`.
--
-- `weights` names a model.safetensors of transformers' LlamaForCausalLM to start from, such as Meta's; `export` names one to
-- write at the end. To load it, transformers needs a config.json of the same sizes in the same folder.
--
-- Dims: B batch, T positions, C width, V vocabulary.

local pl = require "perilune"
local nn, optim, data, init = pl.nn, pl.optim, pl.data, pl.init

local sizes = { -- layers, width, heads, key-value heads, hidden width of the MLP
  ["tiny"] = { layers = 2, width = 64, heads = 4, kv_heads = 2, hidden = 192 },
  ["1B"] = { layers = 16, width = 2048, heads = 32, kv_heads = 8, hidden = 8192 },
  -- Llama 3.1: a head of its own, and positions scaled by 8.
  ["8B"] = { layers = 32, width = 4096, heads = 32, kv_heads = 8, hidden = 14336, head = true, scale = 8 },
  ["70B"] = { layers = 80, width = 8192, heads = 64, kv_heads = 8, hidden = 28672, head = true, scale = 8 },
  ["405B"] = { layers = 126, width = 16384, heads = 128, kv_heads = 8, hidden = 53248, head = true, scale = 8 },
}

local recipe = pl.recipe {
  name = "llama",
  description = "Llama 3.2 on token files",
  params = {
    size = "1B",                       -- tiny, 1B, 8B, 70B or 405B
    tokens = "",                       -- a file of token ids; random tokens without one
    weights = "", export = "",         -- model.safetensors to start from, and to write at the end
    vocab = 128256,
    context = 4096, batch = 4, accumulate = 1,
    experts = 0, top = 2,              -- experts of a block, and of a token; 0: an MLP
    rebalance = 0, replicas = 0,       -- steps between two rebalancings of experts, 0: never; replicas of a block
    balance = 0.01,                    -- weight of the load-balancing loss of experts
    steps = 1000, lr = 3e-4, warmup = 100, seed = 1,
  },
}

local function shape_of(p)
  local s = sizes[p.size]
  if not s then pl.error("llama", ("there is no size '%s'"):format(p.size), "one of tiny, 1B, 8B, 70B, 405B") end
  return s
end

-- Maps paths of the model to the names of transformers.
local function names(p)
  local s = shape_of(p)
  local kv = s.width // s.heads * s.kv_heads
  local all = {
    { "embed", "model.embed_tokens" },
    { "blocks.#.norm1", "model.layers.#.input_layernorm" },
    { "blocks.#.attn.qkv", { "model.layers.#.self_attn.q_proj", "model.layers.#.self_attn.k_proj", "model.layers.#.self_attn.v_proj" },
      sizes = { s.width, kv, kv } },
    { "blocks.#.attn.out", "model.layers.#.self_attn.o_proj" },
    { "blocks.#.norm2", "model.layers.#.post_attention_layernorm" },
    { "blocks.#.mlp.gate", "model.layers.#.mlp.gate_proj" },
    { "blocks.#.mlp.up", "model.layers.#.mlp.up_proj" },
    { "blocks.#.mlp.down", "model.layers.#.mlp.down_proj" },
    { "norm", "model.norm" },
  }
  if s.head then all[#all + 1] = { "head", "lm_head" } end
  return all
end

function recipe.data(p)
  return data.language { tokens = p.tokens, vocab = p.vocab, context = p.context, batch = p.batch, seed = p.seed }
end

function recipe.model(p)
  local s = shape_of(p)
  local rates = nn.rope_rates(s.width // s.heads, { base = 500000.0, scaling = { factor = s.scale or 32, low = 1, high = 4, original = 8192 } })
  local m = { embed = nn.Embedding(p.vocab, s.width, { std = 0.02 }), blocks = {}, norm = nn.RMSNorm(s.width, { eps = 1e-5 }) }
  if p.experts > 0 then m.balance = p.balance end
  if s.head then m.head = nn.Linear(s.width, p.vocab, { bias = false }) end
  for i = 1, s.layers do
    m.blocks[i] = nn.TransformerBlock(s.width, s.heads, {
      causal = true, norm = "rms", eps = 1e-5, mlp = "swiglu", hidden = s.hidden, kv_heads = s.kv_heads, bias = false, rope = { rates = rates },
      experts = p.experts, top = p.experts > 0 and p.top or nil,
      rebalance = p.experts > 0 and p.rebalance > 0 and { every = p.rebalance, replicas = p.replicas } or nil,
    })
  end

  function m:forward(ids_BT)
    local x_BTC = self.embed(ids_BT)
    local uneven ---@type perilune.Tensor? the load-balancing losses of all blocks
    for _, block in ipairs(self.blocks) do
      local y_BTC, own = block(x_BTC)
      x_BTC, uneven = y_BTC, uneven and uneven + own or own
    end
    local logits_BTV = pl.linear(self.norm(x_BTC), (self.head or self.embed).weight)
    if not uneven then return logits_BTV end
    return logits_BTV, uneven / #self.blocks
  end

  for _, block in ipairs(m.blocks) do
    local function start(layer, name) layer[name] = pl.state(init.normal(layer[name].shape, { std = 0.02 })) end
    for _, linear in ipairs { block.attn.qkv, block.attn.out } do start(linear, "weight") end
    for _, name in ipairs { "gate", "up", "down" } do
      if p.experts > 0 then start(block.mlp, name) else start(block.mlp[name], "weight") end
    end
  end
  if m.head then m.head.weight = pl.state(init.normal(m.head.weight.shape, { std = 0.02 })) end
  m.sharding = { embed = "column", head = m.head and "column" }   -- along tp, by rows of the vocabulary
  local model = nn.module(m)
  if p.experts > 0 and (p.weights ~= "" or p.export ~= "") then
    pl.error("llama", "`weights` and `export` are files of LlamaForCausalLM, which has no experts", "leave them out, or experts = 0")
  end
  if p.export ~= "" then nn.check_export(p.export) end   -- fail now, not after training
  if p.weights ~= "" then nn.load_weights(model, p.weights, names(p), { ignore = { shape_of(p).head and "^$" or "^lm_head%.weight$", "rotary_emb%.inv_freq$" } }) end
  return model
end

function recipe.optimizer(p, model)
  local lr = optim.cosine { peak = p.lr, floor = p.lr / 10, warmup = p.warmup, steps = p.steps }
  return optim.AdamW(optim.decay_matrices(model, 0.1), { lr = lr, betas = { 0.9, 0.95 }, eps = 1e-5, clip_norm = 1.0 })
end

function recipe.loss(model, batch)
  local logits_BTV, uneven = model(batch.x)
  local loss = pl.cross_entropy(logits_BTV:flatten(0, 1), batch.y:flatten())
  if not uneven then return loss end
  return model.training and loss + uneven * model.balance or loss, { uneven = uneven:detach() }
end

function recipe.finish(run)
  local p = run.params
  if p.export ~= "" then nn.save_weights(run.model, p.export, names(p)) end
end

return recipe
