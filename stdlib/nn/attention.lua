-- nn/attention.lua: defines multi-head attention with grouped queries, rotary positions and sliding windows.
--
-- Vaswani et al., Attention Is All You Need (2017). Grouped queries: Ainslie et al., GQA (2023). Rotary positions: Su et al.,
-- RoFormer (2021). One Linear projects queries, keys and values in one GEMM; its outputs are [q heads | k heads | v heads].
-- There is no key-value cache.
--
-- Dims: B batch, T query positions, S key positions, C width, H query heads, K key-value heads, D head dim.

local pl = require "perilune"
local check = require "perilune.check"
local nn = require "perilune.nn.module"
local Linear = require("perilune.nn.linear").Linear

---Computes attention with dropout of the attention weights, by elementary ops. The fused op has no dropout.
---@param q_BHTD perilune.Tensor
---@param k_BKSD perilune.Tensor
---@param v_BKSD perilune.Tensor
---@param opts {is_causal: boolean?, window: integer?, mask: perilune.Tensor?, documents: perilune.Tensor?}
---@param p number
---@return perilune.Tensor
local function attention_with_dropout(q_BHTD, k_BKSD, v_BKSD, opts, p)
  local H, K = q_BHTD:size(1), k_BKSD:size(1)
  if H ~= K then
    k_BKSD, v_BKSD = k_BKSD:repeat_interleave(H // K, 1), v_BKSD:repeat_interleave(H // K, 1)
  end
  local T, S = q_BHTD:size(2), k_BKSD:size(2)
  local score_BHTS = q_BHTD:matmul(k_BKSD:transpose(-2, -1)) * (1 / math.sqrt(q_BHTD:size(3)))
  local i, j = pl.arange(T):unsqueeze(1), pl.arange(S)
  if opts.is_causal or opts.window then score_BHTS = score_BHTS:masked_fill(j:gt(i), -math.huge) end
  if opts.window then score_BHTS = score_BHTS:masked_fill((i - j):ge(opts.window), -math.huge) end
  if opts.documents then
    local i, j = opts.documents:unsqueeze(-1), opts.documents:unsqueeze(-2)
    score_BHTS = score_BHTS:masked_fill(i:ne(j):unsqueeze(-3), -math.huge)
  end
  if opts.mask then
    if opts.mask.dtype == "bool" then
      score_BHTS = score_BHTS:masked_fill(opts.mask:logical_not(), -math.huge)
    else
      score_BHTS = score_BHTS + opts.mask
    end
  end
  return pl.dropout(score_BHTS:softmax(-1), p):matmul(v_BKSD)
end

---Projects x to queries (B, H, T, D), and x or `memory` to keys and values (B, K, S, D).
---@param self any
---@param x_BTC perilune.Tensor
---@param memory_BSC perilune.Tensor?
local function project(self, x_BTC, memory_BSC)
  local H, K, D = self.heads, self.kv_heads, self.head_dim
  local B, T = x_BTC:size(0), x_BTC:size(1)
  if not memory_BSC then
    local qkv = self.qkv(x_BTC):view(B, T, H + 2 * K, D):transpose(1, 2)
    return qkv:narrow(1, 0, H), qkv:narrow(1, H, K), qkv:narrow(1, H + K, K)
  end
  local w, b, n = self.qkv.weight, self.qkv.bias, H * D
  if not w then pl.error("nn.MultiHeadAttention", "`memory` needs the weight of `qkv`, which is not a plain Linear here", "merge a LoRA first") end
  local S = memory_BSC:size(1)
  local q = pl.linear(x_BTC, w:narrow(0, 0, n), b and b:narrow(0, 0, n)):view(B, T, H, D):transpose(1, 2)
  local kv = pl.linear(memory_BSC, w:narrow(0, n, 2 * K * D), b and b:narrow(0, n, 2 * K * D)):view(B, S, 2 * K, D):transpose(1, 2)
  return q, kv:narrow(1, 0, K), kv:narrow(1, K, K)
end

---Computes the rotation rates of RoPE in radians per position, for the option `rope = { rates = ... }`.
---`scaling` extends the context as Llama 3.1 does: a pair that turns fewer than `low` times within `original` positions turns
---`factor` times slower, one that turns more than `high` times keeps its rate, and those between are interpolated.
---Grattafiori et al., The Llama 3 Herd of Models (2024); the arithmetic of transformers' "llama3".
---@param head_dim integer
---@param opts {base?: number, scaling?: {factor: number, low: number, high: number, original: integer}}? base: of the rates; scaling: of the context, as Llama 3.1 does
---@return perilune.Tensor (head_dim / 2) f64
local function rope_rates(head_dim, opts)
  local op = "nn.rope_rates"
  check.whole(op, "head_dim", head_dim, 2)
  local o = check.options(op, opts, { base = 10000.0 }, { scaling = "table" })
  local s
  if o.scaling then
    local fields = { "factor", "low", "high", "original" }
    s = check.options(op .. " scaling", o.scaling, {}, { factor = "number", low = "number", high = "number", original = "number" })
    check.required(op .. " scaling", s, fields)
    for _, name in ipairs(fields) do check.between(op .. " scaling", name, s[name], 0, math.huge) end
    if s.low >= s.high then pl.error(op, ("low = %g must be below high = %g"):format(s.low, s.high)) end
  end
  local rates = {}
  for i = 0, head_dim // 2 - 1 do
    local rate = o.base ^ (-2 * i / head_dim)
    if s then
      local turns = s.original * rate / (2 * math.pi)
      local kept = math.max(0, math.min(1, (turns - s.low) / (s.high - s.low)))
      rate = rate * (kept + (1 - kept) / s.factor)
    end
    rates[i + 1] = rate
  end
  -- In f64: at position 100,000 the rounding of an f32 rate turns a pair by up to 0.006 radians.
  return (pl.eval(pl.tensor(rates, { dtype = "f64" })))
end

local per_call = { mask = "tensor", documents = "tensor", positions = "tensor", memory = "tensor" }

---Computes attention: x (B, T, C) -> (B, T, C).
---@param self any
---@param x_BTC perilune.Tensor
---@param given {mask?: perilune.Tensor, documents?: perilune.Tensor, positions?: perilune.Tensor, memory?: perilune.Tensor}?
local function forward(self, x_BTC, given)
  local call = given and check.options("nn.MultiHeadAttention", given, {}, per_call) or {}
  if x_BTC:dim() ~= 3 or x_BTC:size(2) ~= self.width then
    pl.error("nn.MultiHeadAttention", ("x has shape {%s}"):format(table.concat(x_BTC.shape, ", ")), ("it must be (B, T, %d)"):format(self.width))
  end
  if call.documents and call.memory then
    pl.error("nn.MultiHeadAttention", "`documents` apply to the positions of x, not to those of `memory`", "use a mask (T, S)")
  end
  local q, k, v = project(self, x_BTC, call.memory)
  if self.rope then
    local positions = call.positions
    if positions and positions:dim() == 2 then positions = positions:unsqueeze(1) end -- (B, 1, T): the same for all heads
    q, k = pl.rope(q, positions, self.rope), pl.rope(k, positions, self.rope)
  end
  local opts = { is_causal = self.causal, window = self.window, mask = call.mask, documents = call.documents,
                 enable_gqa = self.heads ~= self.kv_heads }
  local y_BHTD
  if self.training and self.dropout > 0 then
    y_BHTD = attention_with_dropout(q, k, v, opts, self.dropout)
  else
    y_BHTD = pl.scaled_dot_product_attention(q, k, v, opts)
  end
  local B, T = x_BTC:size(0), x_BTC:size(1)
  return self.out(y_BHTD:transpose(1, 2):reshape(B, T, self.heads * self.head_dim))
end

---@class perilune.AttentionOptions
---@field kv_heads integer? number of key-value heads, `heads` by default; a divisor of `heads` groups the queries
---@field head_dim integer? width // heads by default
---@field bias boolean? whether biases are added; true by default
---@field causal boolean? each position attends to itself and earlier ones; false by default
---@field window integer? each position attends to the last `window` positions, itself included; implies causal
---@field rope boolean|{base?: number, interleaved?: boolean, rates?: perilune.Tensor}? rotary positions of queries and keys
---@field dropout number? of the attention weights, in training

---Makes multi-head attention, x (B, T, width) -> (B, T, width). Options of a call: attn(x, { mask =, documents =, positions =, memory = })
---  mask: bool (true: attend) or added to the scores, broadcast to (B, H, T, S)
---  documents: segment ids (B, T) or (T), integers; a position attends only to positions of its own segment
---  positions: (T) or (B, T), integers, for RoPE, 0, 1, ... by default
---  memory: (B, S, width), keys and values of cross attention
---@param width integer
---@param heads integer
---@param opts perilune.AttentionOptions?
---@return perilune.Module
local function MultiHeadAttention(width, heads, opts)
  local op = "nn.MultiHeadAttention"
  check.whole(op, "width", width)
  check.whole(op, "heads", heads)
  local o = check.options(op, opts, { bias = true, causal = false, dropout = 0.0 },
    { kv_heads = "number", head_dim = "number", window = "number", rope = "boolean|table" })
  local kv_heads = check.whole(op, "kv_heads", o.kv_heads or heads)
  if not o.head_dim and width % heads ~= 0 then
    pl.error(op, ("heads = %d does not divide width = %d"):format(heads, width), "choose another number, or set head_dim")
  end
  if heads % kv_heads ~= 0 then pl.error(op, ("kv_heads = %d does not divide heads = %d"):format(kv_heads, heads)) end
  local head_dim = check.whole(op, "head_dim", o.head_dim or width // heads)
  local rope = o.rope and check.options(op .. " rope", o.rope ~= true and o.rope or nil, { base = 10000.0, interleaved = false },
    { rates = "tensor" }) or nil
  local info = ("%d, %d heads of %d"):format(width, heads, head_dim)
  if kv_heads ~= heads then info = info .. (", %d for keys and values"):format(kv_heads) end
  for _, name in ipairs { "causal", "rope" } do
    if o[name] then info = info .. ", " .. name end
  end
  if o.window then info = info .. ", window " .. check.whole(op, "window", o.window) end
  return nn.module {
    kind = "MultiHeadAttention", info = info, forward = forward,
    width = width, heads = heads, kv_heads = kv_heads, head_dim = head_dim,
    causal = o.causal, window = o.window, rope = rope, dropout = check.between(op, "dropout", o.dropout, 0, 1),
    qkv = Linear(width, (heads + 2 * kv_heads) * head_dim, { bias = o.bias }),
    out = Linear(heads * head_dim, width, { bias = o.bias }),
    -- The outputs are queries, keys and values, each of which is divided by heads.
    sharding = { qkv = { "column", sections = { heads // kv_heads, 1, 1 } }, out = "row" },
  }
end

return { MultiHeadAttention = MultiHeadAttention, rope_rates = rope_rates }
