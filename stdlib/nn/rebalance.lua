-- nn/rebalance.lua: moves the experts of mixtures among the devices along `ep`, so that all have about the same load.
--
-- The measured loads of a layer give a placement (runtime/dist/src/expert_placement.rs). Its weights, their moments and averages then
-- change rows, in one step for each layer: if it fails, the layer is as before. Rows that change places are the same function, so
-- results do not depend on when this is done, nor on the number of devices (docs/adr/157-experts-move-between-steps.md).

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local check = require "perilune.check"
local tree = require "perilune.tree"
local module = require "perilune.nn.module"
local placement = require "perilune.nn.expert_placement"

local rebalance = {}

local weights = { "up", "gate", "down" }

---@class perilune.Mixture a layer whose experts may move
---@field path string
---@field layer perilune.Module
---@field placement perilune.ExpertPlacement
---@field states perilune.State[] whose rows are experts
---@field tables table<string, perilune.State[]> `rows` and `sources`, and their averages

---Finds what belongs to a weight of experts: moments, which have a row for each expert or are of no expert, and averages.
local function companions(op, path, w, optimizers, ema)
  local out = { w }
  for _, opt in ipairs(optimizers) do
    for _, group in ipairs(opt.groups) do
      for _, p in ipairs(group.params) do
        for _, name in ipairs(p.state == w and tree.keys(p.slots) or {}) do
          local slot = p.slots[name]
          if #slot.shape == #w.shape and slot.shape[1] == w.shape[1] then
            out[#out + 1] = slot
          elseif slot:numel() > 1 then
            pl.error(op, ("the State '%s' of the optimizer has the shape {%s}, and that of %s is {%s}: which elements belong to an expert is not known")
              :format(name, table.concat(slot.shape, ", "), path, table.concat(w.shape, ", ")),
              "give it as many dims, with the experts first, or leave out `rebalance`")
          end
        end
      end
    end
  end
  for _, p in ipairs(ema and ema.averages or {}) do
    if p.state == w then out[#out + 1] = p.average end
  end
  return out
end

---Finds the mixtures of a model that can be rebalanced, and what moves with their experts.
---@param op string
---@param model perilune.Module
---@param optimizers perilune.Optimizer[]
---@param ema perilune.EMA?
---@return perilune.Mixture[]
function rebalance.find(op, model, optimizers, ema)
  local out, owner = {}, {}
  local function visit(path, layer)
    if not (module.is_module(layer) and layer.kind == "MoE") then return end
    local p = layer.placement ---@type perilune.ExpertPlacement?
    local states, tables = {}, { rows = { p and p.rows }, sources = { p and p.sources } }
    for _, name in ipairs(weights) do
      local w = layer[name]
      if pl.is_state(w) then
        if owner[w] and (p or owner[w].placement) and owner[w].placement ~= p then
          pl.error(op, ("%s and %s share the State '%s' and have different placements of experts"):format(owner[w].path, path, name),
            "share the whole layer, or leave out `rebalance`")
        end
        owner[w] = { path = path, placement = p }
        if p then table.move(companions(op, tree.join(path, name), w, optimizers, ema), 1, 99, #states + 1, states) end
      end
    end
    if not p then return end
    for _, average in ipairs(ema and ema.averages or {}) do
      for name, list in pairs(tables) do
        if average.state == p[name] then list[#list + 1] = average.average end
      end
    end
    out[#out + 1] = { path = path, layer = layer, placement = p, states = states, tables = tables }
  end
  tree.walk(model, visit)
  return out
end

---@class perilune.Rebalanced
---@field path string of the layer
---@field before number load of the busiest device, relative to the mean
---@field after number the same with the new placement
---@field moved integer experts that have another row

---Returns 0, which is known when `x` is. An exchange needs memory for all rows of a State on every device; those that read this one
---after the other need it once.
local function zero_after(x)
  return x:isnan():to("i64"):sum() // (x:numel() + 1)
end

---Reads loads and rows of a mixture, finds a placement, and moves what has other rows there.
local function move(m, devices)
  local p = m.placement
  local primaries, replicas = placement.read(p)
  local found = native.place_experts(p.load:tolist(), primaries, replicas, devices)
  local rows = placement.write(primaries, replicas)
  local moved, from = 0, {}
  for row, expert in ipairs(found.primaries) do
    from[row] = rows[expert + 1]
    if from[row] ~= row - 1 then moved = moved + 1 end
  end
  local new = {}
  new.rows, new.sources = placement.write(found.primaries, found.replicas)
  pl.step(function()
    p.load:assign(pl.zeros_like(p.load))
    if not found.changed then return end
    for _, name in ipairs { "rows", "sources" } do
      for _, state in ipairs(m.tables[name]) do state:assign(pl.tensor(new[name])) end
    end
    if moved == 0 then return end
    local from_E = pl.tensor(from)
    for _, state in ipairs(m.states) do
      local new = state:detach():index_select(0, from_E)
      state:assign(new)
      from_E = from_E + zero_after(new)
    end
  end)
  return { path = m.path, before = found.before, after = found.after, moved = moved }
end

---Moves the experts of one mixture, if the busiest device has less load then.
---@param m perilune.Mixture
---@param devices integer
---@return perilune.Rebalanced
function rebalance.apply(m, devices)
  local out ---@type perilune.Rebalanced
  -- Whether anything moves depends on the mesh, on which random numbers may not. A step that moves rows has a plan of its own.
  native.aside(function()
    pl.switches({ report_misses = false }, function() out = move(m, devices) end)
  end)
  return out
end

---@class perilune.RebalanceCall
---@field optimizers perilune.Optimizer[]? those of the model, whose moments move with the weights
---@field ema perilune.EMA? the moving average of the model
---@field devices integer? those along `ep` of the mesh, by default

---Moves the experts of a model's mixtures (nn.MoE with `rebalance`) to even out the load of devices along `ep`, as measured since the last
---call, and starts to measure again. A training run does it every so many steps; a loop of your own calls it between two steps.
---Returns the load of the busiest device before and after, relative to the mean, for each layer.
---@param model perilune.Module
---@param opts perilune.RebalanceCall?
---@return perilune.Rebalanced[]
local function rebalance_experts(model, opts)
  local op = "nn.rebalance_experts"
  if not module.is_module(model) then pl.error(op, "the model is " .. check.show(model), "pass a module: nn.module(t)") end
  local o = check.options(op, opts, {}, { optimizers = "table", ema = "table", devices = "number" })
  local devices = check.whole(op, "devices", o.devices or pl.mesh().ep)
  if pl.in_step() then pl.error(op, "a step is open", "call it between two steps") end
  for i, opt in ipairs(o.optimizers or {}) do
    if type(opt) ~= "table" or type(opt.groups) ~= "table" then pl.error(op, ("optimizers[%d] is %s"):format(i, check.show(opt)), "give a list: { optimizers = { opt } }") end
  end
  if o.optimizers and o.optimizers.groups then pl.error(op, "`optimizers` is one optimizer", "give a list: { optimizers = { opt } }") end
  local found, out = rebalance.find(op, model, o.optimizers or {}, o.ema), {}
  if #found == 0 then pl.error(op, "the model has no mixture whose experts may move", "make it with nn.MoE(width, experts, { rebalance = { every = 0 } })") end
  for i, m in ipairs(found) do out[i] = rebalance.apply(m, devices) end
  return out
end

rebalance.functions = { rebalance_experts = rebalance_experts }

return rebalance
