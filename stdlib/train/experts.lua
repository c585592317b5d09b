-- train/experts.lua: rebalances the experts of a run's mixtures every so many steps, and reports the load of devices.
--
-- A rebalancing belongs to the start of the step that follows, after any checkpoint: when it happens is a function of the number of the
-- step, and what it does of the States, so a resumed run repeats it.

local pl = require "perilune"
local rebalance = require "perilune.nn.rebalance"
local placement = require "perilune.nn.expert_placement"
local scope = require "perilune.train.scope"

local experts = {}

---The mixtures of a run whose experts may move.
---@param run perilune.Run
---@return perilune.Mixture[]
local function mixtures(run)
  local optimizers = {}
  for i, o in ipairs(run.optimizers) do optimizers[i] = o.opt end
  return rebalance.find("train", run.model, optimizers, run.ema)
end

---Finds the mixtures of a new run whose experts may move. Raises if the mesh cannot move them.
---@param run perilune.Run
function experts.start(run)
  local axes = pl.mesh()
  run.placements = {}
  for i, m in ipairs(mixtures(run)) do
    run.placements[i] = m.placement
    if m.placement.replicas % axes.ep ~= 0 then
      pl.error("mesh", ("ep=%d does not divide the %d replicas of experts of %s"):format(axes.ep, m.placement.replicas, m.path),
        "choose an ep that divides them, or another number: rebalance = { replicas = ... }")
    end
  end
end

---Rebalances the mixtures for which it is due at the run's position.
---@param run perilune.Run
function experts.rebalance(run)
  if #run.placements == 0 or run.count == 0 then return end
  local _placed <close> = scope.at_place(run)
  for _, m in ipairs(mixtures(run)) do
    local every = m.placement.every
    if every > 0 and run.count % every == 0 then rebalance.apply(m, pl.mesh().ep) end
  end
end

---Returns the load of the busiest device since the last rebalancing, relative to the mean, of the mixture where it is highest; nil if
---no experts are divided.
---@param run perilune.Run
---@return perilune.Tensor?
function experts.busiest(run)
  if pl.mesh().ep == 1 then return nil end
  local groups, names, most = {}, {}, nil ---@type table<string, perilune.ExpertPlacement[]>, string[], perilune.Tensor?
  for _, p in ipairs(run.placements) do
    local name = p.experts .. " " .. p.replicas
    if not groups[name] then groups[name], names[#names + 1] = {}, name end
    table.insert(groups[name], p)
  end
  for _, name in ipairs(names) do
    local own = placement.busiest(groups[name])
    most = most and most:maximum(own) or own
  end
  return most
end

return experts
