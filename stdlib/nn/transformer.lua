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
local MoE = require("perilune.nn.moe").MoE
local placement = require "perilune.nn.expert_placement"
local MultiHeadAttention = require("perilune.nn.attention").MultiHeadAttention

local function gelu_mlp(self, x) return self.down(self.up(x):gelu(self.gelu)) end
local function swiglu_mlp(self, x) return self.down(self.gate(x):silu() * self.up(x)) end

---Makes a feed-forward layer: x (..., width) -> (..., width). `kind` is "gelu" or "swiglu".
---The hidden width is 4 * width, for swiglu two thirds of that, rounded up to a multiple of 64: about as many weights.
---@param width integer
---@param opts {kind?: string, hidden?: integer, bias?: boolean, approximate?: string}? kind: "gelu" or "swiglu"; hidden: width between the two products; bias: whether biases are added; approximate: of GELU, "none" or "tanh"
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

local function block_of_experts(self, x_BTC, call)
  local copies = placement.copies(self.mlp)
  x_BTC = x_BTC + self.drop(self.attn(self.norm1(x_BTC), call))
  local y_BTC, balance = self.mlp(self.norm2(x_BTC), copies)
  return x_BTC + self.drop(y_BTC), balance
end

---Lets devices along tp have the residual stream of different positions: norms and dropout are computed once, and row products are
---scattered instead of added everywhere (Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198).
local function by_positions(x_BTC)
  local mesh = pl.mesh()
  local length = #x_BTC.shape == 3 and x_BTC.shape[2] or 0
  -- cp has divided the positions already, by documents or in zig-zag order.
  if mesh.tp == 1 or mesh.cp > 1 or length == 0 or length % mesh.tp ~= 0 then return x_BTC end
  return x_BTC:shard { tp = 1 }
end

local function forward(self, x_BTC, call)
  x_BTC = by_positions(x_BTC)
  local run = self.experts > 0 and block_of_experts or block
  if self.checkpoint then return pl.checkpoint(run, self, x_BTC, call) end
  return run(self, x_BTC, call)
end

---@class perilune.BlockOptions: perilune.AttentionOptions
---@field norm "layer"|"rms"? of both branches, LayerNorm or RMSNorm
---@field eps number? of the norms, that of the layer by default
---@field mlp "gelu"|"swiglu"? kind of the feed-forward layer
---@field hidden integer? hidden width of the MLP
---@field approximate "none"|"tanh"? of GELU
---@field experts integer? replaces the MLP by a mixture of so many experts (nn.MoE), which have no biases; 0 by default: an MLP
---@field top integer? experts of a token, 2 by default
---@field rebalance perilune.RebalanceOptions? of nn.MoE
---@field checkpoint boolean? whether the backward pass recomputes the activations of the block instead of storing them

---Makes a transformer block: x (B, T, width) -> (B, T, width). block(x, { mask =, documents =, positions = }) passes its
---options to the attention. `dropout` applies to the attention weights and to both branches; `bias = false` removes all biases.
---With `experts` a call returns the load-balancing loss of nn.MoE too.
---@param width integer
---@param heads integer
---@param opts perilune.BlockOptions?
---@return perilune.Module
local function TransformerBlock(width, heads, opts)
  local op = "nn.TransformerBlock"
  local o = check.options(op, opts, { norm = "layer", mlp = "gelu", approximate = "none", bias = true, causal = false, dropout = 0.0,
    checkpoint = false, experts = 0 },
    { top = "number", eps = "number", hidden = "number", kv_heads = "number", head_dim = "number", window = "number", rope = "boolean|table", rebalance = "table" })
  check.word(op, "norm", o.norm, { "layer", "rms" })
  check.word(op, "mlp", o.mlp, { "gelu", "swiglu" })
  check.whole(op, "experts", o.experts, 0)
  if o.top and o.experts == 0 then pl.error(op, "`top` is the number of experts of a token, and there are none", "give `experts` too") end
  if o.rebalance and o.experts == 0 then pl.error(op, "`rebalance` moves experts among devices, and there are none", "give `experts` too") end
  local function new_mlp()
    if o.experts == 0 then return FeedForward(width, { kind = o.mlp, hidden = o.hidden, bias = o.bias, approximate = o.approximate }) end
    return MoE(width, o.experts, { top = o.top, kind = o.mlp, hidden = o.hidden, approximate = o.approximate, rebalance = o.rebalance })
  end
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
    mlp = new_mlp(),
    drop = Dropout(o.dropout),
    checkpoint = o.checkpoint, experts = o.experts,
  }
end

return { FeedForward = FeedForward, TransformerBlock = TransformerBlock }
