-- nn/lora.lua: fine-tunes frozen Linear layers by low-rank adapters. Hu et al., LoRA (2021).
--
-- y = base(x) + (alpha / rank) x A^T B^T. The base is frozen. B starts at zero, so the adapted layer initially equals its base.

local pl = require "perilune"
local check = require "perilune.check"
local init = require "perilune.initializers"
local tree = require "perilune.tree"
local nn = require "perilune.nn.module"

local function forward(self, x)
  local low = self.training and self.dropout > 0 and pl.dropout(x, self.dropout) or x
  return self.base(x) + pl.linear(pl.linear(low, self.a), self.b) * self.scale
end

---Adds the adapter to the weight of the base and resets the adapter, at the end of the step. Returns the base, trainable again.
local function merge(self)
  local base = self.base
  base.weight:assign(base.weight + self.b:matmul(self.a) * self.scale)
  self.b:assign(pl.zeros(self.b.shape))
  for _, entry in ipairs(tree.states(base)) do entry.state.trainable = true end
  return base
end

---Wraps a Linear: freezes it and trains a (rank, in) and b (out, rank) instead.
---@param linear perilune.Module
---@param opts {rank?: integer, alpha?: number, dropout?: number}? rank: of the product A B; alpha: the adapter is scaled by alpha / rank; dropout: of the adapter's input, in training
---@return perilune.Module
local function LoRA(linear, opts)
  if not nn.is_module(linear) or linear.kind ~= "Linear" then
    pl.error("nn.LoRA", "the layer is " .. (nn.is_module(linear) and "a " .. (linear.kind or "module") or check.show(linear)), "it wraps an nn.Linear")
  end
  local o = check.options("nn.LoRA", opts, { rank = 8, alpha = 16, dropout = 0.0 })
  check.whole("nn.LoRA", "rank", o.rank)
  for _, entry in ipairs(tree.states(linear)) do entry.state.trainable = false end
  return nn.module {
    kind = "LoRA", info = ("rank %d, alpha %g"):format(o.rank, o.alpha), forward = forward, merge = merge,
    base = linear, scale = o.alpha / o.rank, dropout = check.between("nn.LoRA", "dropout", o.dropout, 0, 1),
    a = pl.state(init.kaiming_uniform({ o.rank, linear.in_dim }, { a = math.sqrt(5) })),
    b = pl.state(pl.zeros { linear.out_dim, o.rank }),
  }
end

---Freezes a model and wraps every Linear whose path `match` accepts in a LoRA, in place. Returns the number of wrapped layers.
---@param model perilune.Module
---@param match string|fun(path: string): boolean a Lua pattern or a function of the path
---@param opts {rank?: integer, alpha?: number, dropout?: number}? rank: of the product A B; alpha: the adapter is scaled by alpha / rank; dropout: of the adapter's input, in training
---@return integer
local function add_lora(model, match, opts)
  if not check.is(match, "string|function") then
    pl.error("nn.add_lora", "match is " .. check.show(match), "give a Lua pattern for paths, such as 'attn', or a function")
  end
  local found, wrapped = {}, {}
  tree.walk(model, function(path, value)
    if pl.is_state(value) then
      value.trainable = false
      return
    end
    for _, k in ipairs(tree.keys(value)) do
      local below = tree.join(path, k)
      if nn.is_module(value[k]) and value[k].kind == "Linear" then
        local hit = type(match) == "string" and below:find(match) or type(match) ~= "string" and match(below)
        if hit then found[#found + 1] = { parent = value, key = k } end
      end
    end
  end)
  if #found == 0 then pl.error("nn.add_lora", "no Linear matches " .. check.show(match), "print(model) shows the paths") end
  for _, f in ipairs(found) do
    local linear = f.parent[f.key]
    wrapped[linear] = wrapped[linear] or LoRA(linear, opts) -- tied layers share one adapter
    f.parent[f.key] = wrapped[linear]
  end
  return #found
end

return { LoRA = LoRA, add_lora = add_lora }
