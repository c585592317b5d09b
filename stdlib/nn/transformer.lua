-- nn/transformer.lua: defines the pre-norm transformer block and its feed-forward layer.
--
--   x = x + attention(norm(x));  x = x + mlp(norm(x))
--
-- The defaults are GPT-2's block (layer norm, GELU MLP); { norm = "rms", mlp = "swiglu", rope = true, bias = false } is Llama's.
-- Pre-norm: Xiong et al., On Layer Normalization in the Transformer Architecture (2020). SwiGLU: Shazeer, GLU Variants Improve
-- Transformer (2020).

local pl = require "perilune"
local check = require "perilune.check"
local nn = require "perilune.nn.module"
local norm = require "perilune.nn.norm"
local Linear = require("perilune.nn.linear").Linear
local Dropout = require("perilune.nn.dropout").Dropout
local MultiHeadAttention = require("perilune.nn.attention").MultiHeadAttention

local function gelu_mlp(self, x) return self.down(self.up(x):gelu(self.gelu)) end
local function swiglu_mlp(self, x) return self.down(self.gate(x):silu() * self.up(x)) end

---Makes a feed-forward layer: x (..., width) -> (..., width). `kind` is "gelu" or "swiglu".
---The hidden width is 4 * width, for swiglu two thirds of that, rounded up to a multiple of 64: about as many weights.
---@param width integer
---@param opts {kind?: string, hidden?: integer, bias?: boolean, approximate?: string}?
---@return perilune.Module
local function FeedForward(width, opts)
  local op = "nn.FeedForward"
  check.whole(op, "width", width)
  local o = check.options(op, opts, { kind = "gelu", bias = true, approximate = "none" }, { hidden = "number" })
  check.word(op, "kind", o.kind, { "gelu", "swiglu" })
  local swiglu = o.kind == "swiglu"
  local default = swiglu and ((8 * width + 2) // 3 + 63) // 64 * 64 or 4 * width
  local hidden = check.whole(op, "hidden", o.hidden or default)
  return nn.module {
    kind = "FeedForward", info = ("%s, %d"):format(o.kind, hidden), forward = swiglu and swiglu_mlp or gelu_mlp,
    gelu = { approximate = o.approximate },
    gate = swiglu and Linear(width, hidden, { bias = o.bias }) or nil,
    up = Linear(width, hidden, { bias = o.bias }),
    down = Linear(hidden, width, { bias = o.bias }),
    sharding = { gate = "column", up = "column", down = "row" },
  }
end

local function block(self, x_BTC, call)
  x_BTC = x_BTC + self.drop(self.attn(self.norm1(x_BTC), call))
  return x_BTC + self.drop(self.mlp(self.norm2(x_BTC)))
end

local function forward(self, x_BTC, call)
  if self.checkpoint then return pl.checkpoint(block, self, x_BTC, call) end
  return block(self, x_BTC, call)
end

---@class perilune.BlockOptions: perilune.AttentionOptions
---@field norm "layer"|"rms"?
---@field eps number?
---@field mlp "gelu"|"swiglu"?
---@field hidden integer? hidden width of the MLP
---@field approximate "none"|"tanh"? of GELU
---@field checkpoint boolean? whether the backward pass recomputes the activations of the block instead of storing them

---Makes a transformer block: x (B, T, width) -> (B, T, width). block(x, { mask =, documents =, positions = }) passes its
---options to the attention. `dropout` applies to the attention weights and to both branches; `bias = false` removes all biases.
---@param width integer
---@param heads integer
---@param opts perilune.BlockOptions?
---@return perilune.Module
local function TransformerBlock(width, heads, opts)
  local op = "nn.TransformerBlock"
  local o = check.options(op, opts, { norm = "layer", mlp = "gelu", approximate = "none", bias = true, causal = false, dropout = 0.0,
    checkpoint = false },
    { eps = "number", hidden = "number", kv_heads = "number", head_dim = "number", window = "number", rope = "boolean|table" })
  check.word(op, "norm", o.norm, { "layer", "rms" })
  check.word(op, "mlp", o.mlp, { "gelu", "swiglu" })
  local function new_norm()
    if o.norm == "rms" then return norm.RMSNorm(width, { eps = o.eps }) end
    return norm.LayerNorm(width, { eps = o.eps, bias = o.bias })
  end
  return nn.module {
    kind = "TransformerBlock", forward = forward,
    norm1 = new_norm(),
    attn = MultiHeadAttention(width, heads, { kv_heads = o.kv_heads, head_dim = o.head_dim, bias = o.bias, causal = o.causal,
                                              window = o.window, rope = o.rope, dropout = o.dropout }),
    norm2 = new_norm(),
    mlp = FeedForward(width, { kind = o.mlp, hidden = o.hidden, bias = o.bias, approximate = o.approximate }),
    drop = Dropout(o.dropout),
    checkpoint = o.checkpoint,
  }
end

return { FeedForward = FeedForward, TransformerBlock = TransformerBlock }
