-- nn/expert_placement.lua: stores where the experts of a mixture are, and measures the load of each.
--
-- The weights of a mixture have a row for each expert. Which expert is in which row is a State, so that rows may change places between
-- two steps without a new plan: the router names experts, and a lookup turns them into rows. Replicas are copies of rows that a step
-- makes, so that several devices share the tokens of one expert; the gradient of a copy is added to that of its row by the backward
-- pass of the copy. Device d of D along `ep` has block d of the rows, and block d of the replicas behind it; together they are its
-- slots. Nothing that is stored depends on D (docs/adr/161-replicas-are-copies-of-rows.md). deepseek-ai/EPLB; shadow experts: He et al., FasterMoE (PPoPP 2022).
--
-- Dims: L layers, E experts, R replicas, S slots, D devices, N tokens, K experts per token.

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local check = require "perilune.check"

local placement = {}

---@class perilune.ExpertPlacement
---@field load perilune.State (E) i64: tokens of each expert since the last rebalancing
---@field rows perilune.State (E) i64: the row of each expert
---@field sources perilune.State? (R) i64: the row that each replica copies
---@field experts integer
---@field replicas integer
---@field every integer steps between two rebalancings; 0: never

---@class perilune.RebalanceOptions
---@field every integer? steps between two rebalancings in a training run, 100 by default; 0: never
---@field replicas integer? further copies of experts, 0 by default

---Makes the States of a mixture that can be rebalanced: expert e is in row e.
---@param op string
---@param experts integer
---@param given perilune.RebalanceOptions
---@return perilune.ExpertPlacement
function placement.new(op, experts, given)
  local o = check.options(op .. " rebalance", given, { every = 100, replicas = 0 })
  check.whole(op, "rebalance.every", o.every, 0)
  check.whole(op, "rebalance.replicas", o.replicas, 0)
  local function state(x) return pl.state(x, { trainable = false }) end
  return {
    experts = experts, replicas = o.replicas, every = o.every,
    load = state(pl.zeros({ experts }, { dtype = "i64" })),
    rows = state(pl.arange(experts)),
    sources = o.replicas > 0 and state(experts - 1 - pl.arange(o.replicas) % experts) or nil,
  }
end

---The number of devices among which the slots of a mixture are divided.
---@param p perilune.ExpertPlacement
---@return integer
function placement.devices(p)
  local n = pl.mesh().ep
  return p.experts % n == 0 and p.replicas % n == 0 and n or 1
end

---Adds the tokens of each expert in this step to its load.
---@param p perilune.ExpertPlacement
---@param count_E perilune.Tensor
function placement.measure(p, count_E)
  p.load:assign(p.load + count_E:detach())
end

---Returns the slots of the copies of each expert, the row first, and the number of copies. Slots beyond it are of other experts.
---@param row_E perilune.Tensor (..., E)
---@param source_R perilune.Tensor (..., R)
---@param devices integer
---@return perilune.Tensor slot (..., E, 1 + R)
---@return perilune.Tensor copies (..., E)
local function slots(row_E, source_R, devices)
  local rows, replicas = row_E:size(-1) // devices, source_R:size(-1) // devices
  local row_E1 = row_E:unsqueeze(-1)
  local slot_E1 = row_E1 + row_E1 // rows * replicas
  local hit_ER = row_E1:eq(source_R:unsqueeze(-2)):to("i64")
  -- The sort is stable: the replicas of an expert come first, in order.
  local replica_ER = hit_ER:argsort(-1, { descending = true })
  local slot_ER = replica_ER // replicas * (rows + replicas) + rows + replica_ER % replicas
  return pl.cat({ slot_E1, slot_ER }, -1), hit_ER:sum(-1) + 1
end

---Returns the slots of the experts of tokens. The copies of an expert take turns.
---@param p perilune.ExpertPlacement
---@param expert_NK perilune.Tensor
---@return perilune.Tensor slot (N, K)
function placement.slots_of(p, expert_NK)
  local shape, expert_R = expert_NK.shape, expert_NK:flatten()
  if not p.sources then return p.rows:index_select(0, expert_R):view(shape) end
  local slot_EM, copies_E = slots(p.rows, p.sources, placement.devices(p))
  local turn_NK = pl.arange(expert_NK:size(0)):unsqueeze(1) % copies_E:index_select(0, expert_R):view(shape)
  local at_NK = expert_NK * (1 + p.replicas) + turn_NK
  return slot_EM:flatten():index_select(0, at_NK:flatten()):view(shape)
end

---Copies rows for replicas. The planner would add the gradients of copies to all rows on each device, and scatter the sums; fewer bytes
---are sent if the gradients come to the devices of the rows. They are sent in the dtype of the copies, and added in that of the weights.
local copied = pl.custom {
  name = "nn.MoE replicas",
  forward = function(w, source_R, dtype) return w:to(dtype):index_select(0, source_R) end,
  backward = function(grad_R, w, source_R)
    return pl.zeros_like(w):index_add(0, source_R, grad_R:all_gather("ep"):to(w.dtype))
  end,
}

---The dtype in which replicas are copied.
local function dtype_of(w)
  local low = native.mode().autocast
  return (low == "bf16" or low == "f16") and w.dtype == "f32" and low or w.dtype
end

---Copies the rows of replicas of a mixture, which is all that devices exchange of weights. A block records this before its attention, which
---hides the exchange, and passes the result to the layer.
---@param layer perilune.Module
---@return perilune.Tensor[]? copies of up, down and gate; nil without replicas
function placement.copies(layer)
  local p = layer.placement ---@type perilune.ExpertPlacement?
  if not (p and p.sources) then return nil end
  local out = {}
  for i, w in ipairs { layer.up, layer.down, layer.gate } do out[i] = copied(w, p.sources, dtype_of(w)) end
  return out
end

---Joins rows and their copies.
---@param p perilune.ExpertPlacement with replicas
---@param w perilune.Tensor (E, rows, columns)
---@param copies perilune.Tensor
---@return perilune.Tensor weights of all slots (S, rows, columns)
function placement.join(p, w, copies)
  local D, rows, columns = placement.devices(p), w:size(1), w:size(2)
  local function by_device(x, n) return x:reshape(D, n // D, rows, columns) end
  local all = pl.cat({ by_device(w:to(dtype_of(w)), p.experts), by_device(copies, p.replicas) }, 1)
  return all:reshape(p.experts + p.replicas, rows, columns)
end

---Returns the load of the busiest device since the last rebalancing, relative to the mean, of the mixture where it is highest: a scalar.
---@param list perilune.ExpertPlacement[] of as many experts and replicas each
---@return perilune.Tensor
function placement.busiest(list)
  local p = list[1] --[[@as perilune.ExpertPlacement]]
  local D = placement.devices(p)
  local function all(name)
    local states = {}
    for i, own in ipairs(list) do states[i] = own[name] end
    return pl.stack(states)
  end
  local share, slot = all("load"):to("f64"), all("rows") -- (L, E) without replicas, else (L, E, 1 + R)
  if p.sources then
    local copies
    slot, copies = slots(slot, all("sources"), D)
    share = pl.where(pl.arange(1 + p.replicas):lt(copies:unsqueeze(-1)), (share / copies):unsqueeze(-1), 0)
  end
  local device = slot:flatten(1) // ((p.experts + p.replicas) // D)
  local load_LD = (pl.one_hot(device, D) * share:flatten(1):unsqueeze(-1)):sum(1)
  return (load_LD:amax(-1) / load_LD:mean(-1):clamp(1e-9)):amax()
end

---Reads which expert is in each row, and of which expert each replica is. Experts count from 0.
---@param p perilune.ExpertPlacement
---@return integer[] primaries
---@return integer[] replicas
function placement.read(p)
  local primaries, replicas = {}, {}
  for expert, row in ipairs(p.rows:tolist()) do primaries[row + 1] = expert - 1 end
  for row = 1, p.experts do
    if not primaries[row] then
      pl.error("nn.rebalance_experts", ("`placement.rows` is not a permutation of 0 to %d: no expert is in row %d"):format(p.experts - 1, row - 1),
        "only rebalancing may change it; take an older checkpoint")
    end
  end
  for q, row in ipairs(p.sources and p.sources:tolist() or {}) do
    replicas[q] = primaries[row + 1]
    if not replicas[q] then
      pl.error("nn.rebalance_experts", ("`placement.sources` has %d, and rows are 0 to %d"):format(row, p.experts - 1),
        "only rebalancing may change it; take an older checkpoint")
    end
  end
  return primaries, replicas
end

---Returns the values of `rows` and `sources` for what `read` returns.
---@param primaries integer[]
---@param replicas integer[]
---@return integer[] rows
---@return integer[] sources
function placement.write(primaries, replicas)
  local rows, sources = {}, {}
  for row, expert in ipairs(primaries) do rows[expert + 1] = row - 1 end
  for q, expert in ipairs(replicas) do sources[q] = rows[expert + 1] end
  return rows, sources
end

return placement
