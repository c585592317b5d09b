-- nn/moe.lua: defines a mixture-of-experts feed-forward layer with top-k routing.
--
-- Tokens are sorted by expert, the rows of each expert are multiplied by its weights in one launch, as by pl.grouped_matmul, and the
-- results are brought back into the order of the tokens. No token is dropped. Group sizes stay on the device, so every routing has
-- the same plan. On a mesh with an axis `ep` each device has a part of the experts, and rows go to the devices of theirs; with
-- `rebalance` experts may change devices, and have replicas (expert_placement.lua). Shazeer et al., Outrageously Large Neural Networks
-- (2017); top-k of a softmax, renormalized: Jiang et al., Mixtral of Experts (2024).
--
-- Dims: N tokens, C width, E experts, K experts per token.

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local check = require "perilune.check"
local init = require "perilune.initializers"
local nn = require "perilune.nn.module"
local placement = require "perilune.nn.expert_placement"
local Linear = require("perilune.nn.linear").Linear

local function forward(self, x, copies)
  local E, K, C = self.experts, self.top, x:size(-1)
  local x_NC = x:reshape(-1, C)
  local N = x_NC:size(0)
  local share_NE = self.router(x_NC):softmax(-1)
  local weight_NK, expert_NK = share_NE:topk(K)
  -- With K = 1 the probability itself is the weight: normalized to 1 it would give the router no gradient.
  if K > 1 then weight_NK = weight_NK / weight_NK:sum(-1, { keepdim = true }) end

  local p = self.placement
  local slot_NK = p and placement.slots_of(p, expert_NK) or expert_NK
  local w = { self.up, self.down, self.gate }
  copies = copies or placement.copies(self)
  for k in ipairs(copies or {}) do w[k] = placement.join(p, w[k], copies[k]) end
  local y_NKC = native.expert_mlp(x_NC, slot_NK, w[1], w[2], w[3], self.gelu.approximate == "tanh") --[[@as perilune.Tensor]]
  local y = (y_NKC * weight_NK:unsqueeze(-1)):sum(1):to(x.dtype):view(x.shape)

  -- Load-balancing loss, 1 if all experts get the same load (Fedus et al., Switch Transformers, 2021, equation 4).
  local count_E = pl.one_hot(expert_NK:flatten(), E):sum(0)
  if p and self.training then placement.measure(p, count_E) end
  local wide = share_NE.dtype == "f64" and "f64" or "f32"
  local balance = (count_E:to(wide) * share_NE:to(wide):mean(0)):sum() * (E / (N * K))
  return y, balance
end

---@class perilune.MoEOptions
---@field top integer? experts per token, 2 by default
---@field kind "swiglu"|"gelu"? of an expert
---@field hidden integer? hidden width of an expert, 4 * width by default
---@field approximate "none"|"tanh"? of GELU
---@field rebalance perilune.RebalanceOptions? lets experts move among the devices along `ep`, and have replicas

---Makes a mixture of experts: x (..., width) -> y (..., width), and the load-balancing loss, a scalar that is 1 for even routing.
---Add about 0.01 times that to the loss. Each token is processed by the `top` experts of largest router probability and their
---outputs are averaged by it. Weights `up` and `gate` (experts, width, hidden), `down` (experts, hidden, width), no biases.
---With `rebalance` a training run moves the rows of experts among devices; `placement.rows` has the row of each expert.
---@param width integer
---@param experts integer
---@param opts perilune.MoEOptions?
---@return perilune.Module
local function MoE(width, experts, opts)
  local op = "nn.MoE"
  check.whole(op, "width", width)
  check.whole(op, "experts", experts)
  local o = check.options(op, opts, { top = 2, kind = "swiglu", approximate = "none" }, { hidden = "number", rebalance = "table" })
  check.word(op, "kind", o.kind, { "gelu", "swiglu" })
  check.whole(op, "top", o.top)
  if o.top > experts then pl.error(op, ("top is %d of %d experts"):format(o.top, experts), "a token uses each expert at most once") end
  local hidden = check.whole(op, "hidden", o.hidden or 4 * width)
  local function weights(rows, columns)
    local bound = 1 / math.sqrt(rows)
    return pl.state(init.uniform({ experts, rows, columns }, { a = -bound, b = bound }))
  end
  return nn.module {
    kind = "MoE", info = ("%d of %d, %s, %d"):format(o.top, experts, o.kind, hidden), forward = forward,
    experts = experts, top = o.top, gelu = { approximate = o.approximate },
    router = Linear(width, experts, { bias = false, fp8 = false }),
    up = weights(width, hidden),
    gate = o.kind == "swiglu" and weights(width, hidden) or nil,
    down = weights(hidden, width),
    placement = o.rebalance and placement.new(op, experts, o.rebalance) or nil,
    sharding = { up = { "column", experts = true }, gate = { "column", experts = true }, down = { "row", experts = true } },
  }
end

return { MoE = MoE }
