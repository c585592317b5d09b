-- train/mesh.lua: decides what each device of a mesh stores of the States of a run.
--
-- A placement changes where a State is, never its value. With `zero` (Rajbhandari et al., arXiv:1910.02054) the devices that have
-- different samples share States: stage 1 divides those of the optimizer and moving averages, stage 3 the weights too. Gradients
-- are intermediate values of a step, which the planner divides where their readers are divided, so stages 1 and 2 are the same.
-- A State that has no dim the devices divide stays whole on each.

---@type string, table the name of this module, and what only the library may call
local _, native = ...

local mesh = {}

---@class perilune.Mesh sizes of the axes, 1 where an axis is not used
---@field pp integer
---@field dp integer
---@field shard integer
---@field cp integer
---@field ep integer
---@field tp integer
---@field zero integer? the stage, if it was given

---The first dim that `parts` devices divide evenly.
---@param shape integer[]
---@param parts integer
---@return integer? dim counted from 0
local function dividing_dim(shape, parts)
  for i, n in ipairs(shape) do
    if n >= parts and n % parts == 0 then return i - 1 end
  end
end

---Whether the States with this path are divided at a stage.
local function is_divided(path, stage)
  local part = path:match "^[^.]*"
  if part == "model" then return stage >= 3 end
  return stage >= 1 and (part == "optim" or part == "ema")
end

---Places the States of a run on the mesh of its device.
---@param run perilune.Run
function mesh.place(run)
  local axes = native.mesh() ---@type perilune.Mesh?
  if not axes then return end
  -- Devices along `shard` divide States; without that axis those along `dp` do.
  local axis = axes.shard > 1 and "shard" or "dp"
  local stage = axes.zero or (axes.shard > 1 and 3 or 0)
  for _, entry in ipairs(run:states()) do
    local dim = is_divided(entry.path, stage) and dividing_dim(entry.state.shape, axes[axis])
    native.place_state(entry.state, dim and { [axis] = dim } or {})
  end
end

return mesh
