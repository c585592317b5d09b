-- recipes/chargpt.lua: trains a character-level GPT on a text file and samples from it
--
--   perilune run recipes/chargpt.lua --set text=FILE --set steps=2000
--
-- The defaults are nanoGPT's laptop configuration (github.com/karpathy/nanoGPT, "I only have a macbook") with twice its learning
-- rate: on tiny Shakespeare (90/10 split) 2,000 steps reach a validation loss of 1.80 over the whole split (1.92 with lr = 1e-3;
-- nanoGPT's README reports 1.88 over 20 random batches), in about a minute on two cores.
--
-- Dims: B batch, T positions, C width, V characters.

local pl = require "perilune"
local nn, optim, data, init = pl.nn, pl.optim, pl.data, pl.init

local recipe = pl.recipe {
  name = "chargpt",
  description = "a character GPT on a text file",
  params = {
    text = "data/alice.txt",           -- any UTF-8 text
    layers = 4, heads = 4, width = 128, context = 64, dropout = 0.0,
    checkpoint = false,                -- recompute activations in the backward pass instead of storing them
    batch = 12, accumulate = 1, steps = 2000, lr = 2e-3, warmup = 100, seed = 1337,
    samples = 2, sample_length = 300, temperature = 0.8,
  },
}

function recipe.data(p)
  local text = data.text(p.text)
  return {
    train = text:split("train", 0.9):windows { length = p.context, batch = p.batch, seed = p.seed },
    valid = text:split("valid", 0.1):windows { length = p.context, batch = 64 },
    vocab = text.vocab,
  }
end

function recipe.model(p, d)
  local V = d.vocab:size()
  local m = {
    tokens = nn.Embedding(V, p.width, { std = 0.02 }),
    positions = nn.Embedding(p.context, p.width, { std = 0.02 }),
    drop = nn.Dropout(p.dropout),
    blocks = {},
    norm = nn.LayerNorm(p.width, { bias = false }),
  }
  for i = 1, p.layers do
    m.blocks[i] = nn.TransformerBlock(p.width, p.heads, { causal = true, bias = false, dropout = p.dropout,
                                                                checkpoint = p.checkpoint })
  end

  function m:forward(ids_BT)
    local x_BTC = self.drop(self.tokens(ids_BT) + self.positions(pl.arange(ids_BT:size(1))))
    for _, block in ipairs(self.blocks) do x_BTC = block(x_BTC) end
    return pl.linear(self.norm(x_BTC), self.tokens.weight)      -- the output layer is tied to the embedding
  end

  -- GPT-2's initialization: std 0.02, scaled by 1 / sqrt(2 * layers) in the 2 * layers projections that add to the residual stream.
  local small = 0.02 / math.sqrt(2 * p.layers)
  local function start(linear, std) linear.weight = pl.state(init.normal(linear.weight.shape, { std = std })) end
  for _, block in ipairs(m.blocks) do
    start(block.attn.qkv, 0.02); start(block.attn.out, small)
    start(block.mlp.up, 0.02); start(block.mlp.down, small)
  end
  return nn.module(m)
end

function recipe.optimizer(p, model)
  local groups = {
    model = model,
    { params = function(_, w) return #w.shape >= 2 end, weight_decay = 0.1 },
    { weight_decay = 0 },                                       -- scales of the norms
  }
  local lr = optim.cosine { peak = p.lr, floor = p.lr / 10, warmup = p.warmup, steps = p.steps }
  return optim.AdamW(groups, { lr = lr, betas = { 0.9, 0.99 }, clip_norm = 1.0 })
end

function recipe.loss(model, batch)
  local logits_BTV = model(batch.x)
  return pl.cross_entropy(logits_BTV:flatten(0, 1), batch.y:flatten())
end

-- Samples characters one by one, as the continuation of a prompt. The input always has the full context length, padded at the end, where
-- causal attention does not read: one shape needs one plan.
function recipe.sample(run, prompt)
  local p, vocab = run.params, run.data.vocab
  local ids, first = { 0 }, 2                                   -- without a prompt character 0 begins, which is left out of the text
  if prompt and prompt ~= "" then ids, first = vocab:encode(prompt):tolist(), 1 end
  for _ = 1, p.sample_length do
    local window, last = {}, math.min(#ids, p.context)
    for i = 1, p.context do window[i] = ids[#ids - last + i] or 0 end
    ids[#ids + 1] = pl.step(function()
      return pl.no_grad(function()
        local logits_TV = run.model(pl.tensor({ window }, { dtype = "i64" })):squeeze(0)
        local logits_V = logits_TV:index_select(0, pl.tensor({ last - 1 }, { dtype = "i64" })):squeeze(0)
        local noise_V = -(-pl.rand(logits_V.shape):clamp(1e-10, 1 - 1e-7):log()):log()  -- Gumbel-max trick: the argmax is a sample of the softmax
        return (logits_V / p.temperature + noise_V):argmax()
      end)
    end):item()
  end
  return vocab:decode({ table.unpack(ids, first) })
end

function recipe.finish(run)
  for i = 1, run.params.samples do
    print(("--- sample %d"):format(i))
    print(run:generate())
  end
end

return recipe
