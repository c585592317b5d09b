-- recipes/gpt2.lua: trains or fine-tunes GPT-2 on files of tokens
--
--   perilune run recipes/gpt2.lua --device cuda --precision bf16 --set tokens=FILE --set size=124M
--
-- The model is OpenAI's (Radford et al., Language Models are Unsupervised Multitask Learners, 2019): pre-norm blocks, tanh GELU,
-- learned positions, tied embeddings. The vocabulary is padded to a multiple of 128 for efficient matrix products; the extra
-- tokens never occur. The optimizer settings are nanoGPT's.
--
-- `tokens` names a file of token ids: .npy, .safetensors, or .bin as llm.c and nanoGPT write them. Without one the recipe trains
-- on random tokens, for measurements of speed.
--
-- Documents are concatenated in such a file. `ends` is the token that ends each (50256 in GPT-2's vocabulary): with it a position
-- attends to its own document only, which is also less work.
--
-- `weights` names a model.safetensors of transformers' GPT2LMHeadModel to start from, such as OpenAI's; `export` names one to
-- write at the end. To load it, transformers needs a config.json of the same sizes in the same folder.
--
-- Dims: B batch, T positions, C width, V vocabulary.

local pl = require "perilune"
local nn, optim, data, init = pl.nn, pl.optim, pl.data, pl.init

local sizes = { -- layers, heads, width
  ["tiny"] = { 2, 2, 64 },
  ["124M"] = { 12, 12, 768 },
  ["350M"] = { 24, 16, 1024 },
  ["774M"] = { 36, 20, 1280 },
  ["1558M"] = { 48, 25, 1600 },
}

local recipe = pl.recipe {
  name = "gpt2",
  description = "GPT-2 on token files",
  params = {
    size = "124M",                     -- tiny, 124M, 350M, 774M or 1558M
    tokens = "",                       -- a file of token ids; random tokens without one
    ends = -1,                         -- the token that ends a document; -1: attend to all previous positions
    weights = "", export = "",         -- model.safetensors to start from, and to write at the end
    vocab = 50304,                     -- 50257 tokens, padded
    context = 1024, batch = 32, accumulate = 1,
    checkpoint = false,                -- recompute activations in the backward pass: less memory, a third more work
    residual = "f32",                  -- dtype of the residual stream; "bf16", as in llm.c, is faster, smaller and less accurate
    steps = 1000, lr = 6e-4, warmup = 100, seed = 1337,
  },
}

-- Number of embedding rows that are tokens; the others are padding.
local function num_tokens(p) return math.min(50257, p.vocab) end

-- Maps paths of the model to the names of transformers, whose matrices are (in, out).
local function names(p)
  return {
    { "wte", "transformer.wte", rows = num_tokens(p) },
    { "wpe", "transformer.wpe" },
    { "blocks.#.norm1", "transformer.h.#.ln_1" },
    { "blocks.#.attn.qkv", "transformer.h.#.attn.c_attn", transpose = true },
    { "blocks.#.attn.out", "transformer.h.#.attn.c_proj", transpose = true },
    { "blocks.#.norm2", "transformer.h.#.ln_2" },
    { "blocks.#.mlp.up", "transformer.h.#.mlp.c_fc", transpose = true },
    { "blocks.#.mlp.down", "transformer.h.#.mlp.c_proj", transpose = true },
    { "norm", "transformer.ln_f" },
  }
end

function recipe.data(p)
  return data.language { tokens = p.tokens, vocab = num_tokens(p), context = p.context, batch = p.batch, seed = p.seed }
end

function recipe.model(p)
  local shape = sizes[p.size]
  if not shape then pl.error("gpt2", ("there is no size '%s'"):format(p.size), "one of tiny, 124M, 350M, 774M, 1558M") end
  local layers, heads, width = table.unpack(shape)
  if p.residual ~= "f32" and p.residual ~= "bf16" then pl.error("gpt2", ("residual cannot be '%s'"):format(p.residual), "it is f32 or bf16") end
  local m = {
    wte = nn.Embedding(p.vocab, width, { std = 0.02 }),
    wpe = nn.Embedding(p.context, width, { std = 0.02 }),
    blocks = {},
    norm = nn.LayerNorm(width),
    sharding = { wte = "column" },   -- along tp, by rows of the vocabulary
  }
  for i = 1, layers do
    m.blocks[i] = nn.TransformerBlock(width, heads, { causal = true, approximate = "tanh", checkpoint = p.checkpoint })
  end

  function m:forward(ids_BT)
    local x_BTC = pl.add(self.wte(ids_BT), self.wpe(pl.arange(ids_BT:size(1)))):to(p.residual)
    local call
    if p.ends >= 0 then
      local ends_BT = ids_BT:eq(p.ends):to("i64")
      call = { documents = ends_BT:cumsum(1) - ends_BT }   -- the end token belongs to the document that it ends
    end
    -- In f32 and fp16 a block promotes a bf16 residual to f32: cast it back. Otherwise the cast does nothing.
    for _, block in ipairs(self.blocks) do x_BTC = block(x_BTC, call):to(p.residual) end
    return pl.linear(self.norm(x_BTC), self.wte.weight)
  end

  -- std 0.02, scaled by 1 / sqrt(2 * layers) in the 2 * layers projections that add to the residual stream; biases 0.
  local small = 0.02 / math.sqrt(2 * layers)
  local function start(linear, std)
    linear.weight = pl.state(init.normal(linear.weight.shape, { std = std }))
    linear.bias = pl.state(pl.zeros(linear.bias.shape))
  end
  for _, block in ipairs(m.blocks) do
    start(block.attn.qkv, 0.02); start(block.attn.out, small)
    start(block.mlp.up, 0.02); start(block.mlp.down, small)
  end
  local model = nn.module(m)
  if p.export ~= "" then nn.check_export(p.export) end   -- fail now, not after training
  if p.weights ~= "" then   -- OpenAI's file omits the prefix "transformer." and contains the causal masks
    nn.load_weights(model, p.weights, names(p), { prefix = "transformer.", ignore = { "attn%.bias$", "attn%.masked_bias$", "^lm_head%.weight$" } })
  end
  return model
end

function recipe.optimizer(p, model)
  local lr = optim.cosine { peak = p.lr, floor = p.lr / 10, warmup = p.warmup, steps = p.steps }
  return optim.AdamW(optim.decay_matrices(model, 0.1), { lr = lr, betas = { 0.9, 0.95 }, clip_norm = 1.0 })
end

function recipe.loss(model, batch)
  local logits_BTV = model(batch.x)
  return pl.cross_entropy(logits_BTV:flatten(0, 1), batch.y:flatten())
end

function recipe.finish(run)
  local p = run.params
  if p.export ~= "" then nn.save_weights(run.model, p.export, names(p)) end
end

return recipe
