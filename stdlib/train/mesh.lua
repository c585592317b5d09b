-- train/mesh.lua: opens the mesh of a recipe, and decides what each of its devices stores of the States of a run.
--
-- A placement changes where a State is, never its value. Two things divide States. `zero` (Rajbhandari et al., ZeRO,
-- arXiv:1910.02054) shares them among the devices that have different samples: weights, moving averages, and the optimizer's. A
-- step gathers whole weights a layer ahead; stages 1 and 2 keep them to its end, stage 3 drops them and gathers them again for
-- the backward pass. A step begins by looking up rows of an embedding, so stages 1 and 2 leave it whole, and gather its new
-- values while other weights are updated. Gradients are intermediate values, which the planner divides where their readers are
-- divided, so stages 1 and 2 are the same. `sharding` (Shoeybi et al., Megatron-LM, arXiv:1909.08053) divides the matrices of
-- layers along `tp`: a layer that is followed by another has its outputs divided ("column"), the second one its inputs ("row").
-- Experts (nn.MoE) are divided along `ep`, by the first dim of their weights; for all other layers `ep` has samples, as `dp` does.
-- Layers of the library state their own rules in a field `sharding`, the recipe adds to them. A State with fewer
-- elements in each dim than devices stays whole on each, and so does one that is small beside the largest weight: all of them
-- together take little memory, and a message each.

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local check = require "perilune.check"
local stages = require "perilune.train.stages"
local tree = require "perilune.tree"
local loader = require "perilune.data.loader"

local mesh = {}

--- `zero` does not divide a State with fewer elements than the largest weight over this.
local SMALL = 1024

---@class perilune.Mesh sizes of the axes, 1 where an axis is not used
---@field pp integer
---@field dp integer
---@field shard integer
---@field cp integer
---@field ep integer
---@field tp integer
---@field zero integer the stage

---@class perilune.train.Cut what devices divide of a State
---@field dim integer
---@field sections integer[]? relative sizes of the sections of the dim, each of which is divided

---Opens the mesh that a recipe asks for.
---@param recipe perilune.Recipe
---@param params table
local function open_axes(recipe, params)
  local wanted = params.mesh ---@type any
  if wanted == nil then wanted = recipe.mesh end
  if wanted == nil then return end
  if type(wanted) == "table" then
    local axes = {}
    for i, name in ipairs(tree.names(wanted)) do
      if (name == "keys" or name == "bucket") and type(wanted[name]) == "string" then
        axes[i] = ("%s=%s"):format(name, wanted[name])
      elseif check.is(wanted[name], "number") then
        axes[i] = ("%s=%d"):format(name, check.whole("recipe.mesh", tostring(name), wanted[name], 0))
      else
        pl.error("recipe.mesh", ("%s is %s"):format(tostring(name), check.show(wanted[name])), "write how many devices are along each axis: { dp = 2, tp = 4 }")
      end
    end
    wanted = table.concat(axes, ",")
  elseif type(wanted) ~= "string" then
    pl.error("recipe.mesh", "it is " .. check.show(wanted), "write { dp = 2, zero = 1 } or \"dp=2,zero=1\"")
  end
  native.open_mesh(wanted)
end

---Opens the mesh that a recipe asks for, as params.mesh or recipe.mesh, and cuts batches into its strict shards. The options of the command
---line, --mesh and --strict-shards, go first.
---@param recipe perilune.Recipe
---@param params table
function mesh.open(recipe, params)
  local shards = params.strict_shards ---@type any
  if shards == nil then shards = recipe.strict_shards end
  if shards ~= nil then shards = check.whole("recipe", "strict_shards", shards, 1) end
  open_axes(recipe, params)
  native.strict_shards(shards)
end

---Turns a pattern of paths into one of Lua: `*` is one name or number.
local function matcher(pattern)
  local text = pattern:gsub("[%^%$%(%)%%%.%[%]%+%-%?]", "%%%0"):gsub("%*", "[^.]*")
  return "^" .. text .. "$", "^" .. text .. "%.[^.]*$"
end

local kinds = { "column", "row", "whole" }

---What a rule divides along tp of a matrix (out, in), of a vector (out), or of matrices of experts (experts, in, out).
---@param experts boolean?
---@return perilune.train.Cut|false
local function cut_of(rule, rank, experts)
  if experts then return rule.kind ~= "whole" and { dim = rule.kind == "column" and 2 or 1 } end
  if rule.kind == "column" then return { dim = 0, sections = rule.sections } end
  return rule.kind == "row" and rank >= 2 and { dim = 1 }
end

---Calls `fn` with each table of a model, of which modules are some, and its path.
---@param model table
---@param fn fun(t: table, path: string)
local function each(model, fn)
  local seen = {}
  local function visit(t, path)
    if seen[t] then return end
    seen[t] = true
    fn(t, path)
    for _, key in ipairs(tree.keys(t)) do
      local child = rawget(t, key)
      if type(child) == "table" and child ~= rawget(t, "sharding") then visit(child, tree.join(path, key)) end
    end
  end
  visit(model, "")
end

---Collects the rules that modules state in a field `sharding`. A rule is "column" or "row", or { "column", sections = { 4, 1, 1 } } for
---outputs that are three of these relative sizes, each of which is divided, or { "column", experts = true } for the matrices of experts.
local function rules_of_modules(model)
  local out = {}
  each(model, function(t, path)
    local own = rawget(t, "sharding")
    if type(own) ~= "table" then return end
    for _, name in ipairs(tree.names(own)) do
      local rule = own[name]
      local kind = type(rule) == "table" and rule[1] or rule
      local more = type(rule) == "table" and rule or {}
      out[#out + 1] = { path = tree.join(path, name), kind = kind, sections = more.sections, experts = more.experts }
    end
  end)
  return out
end

---Returns what tp divides of each weight, and which weights are those of experts, by path.
---@param run perilune.Run
---@param weights perilune.Entry[]
---@return table<string, perilune.train.Cut|false>, table<string, boolean>
local function cuts_of_weights(run, weights)
  local rules = rules_of_modules(run.model)
  local own = run.recipe.sharding
  if own ~= nil and type(own) ~= "table" then
    pl.error("recipe.sharding", "it is " .. check.show(own), "write { [\"blocks.*.mlp.up\"] = \"column\" }")
  end
  local given = own or {}
  for _, pattern in ipairs(tree.names(given)) do
    check.word("recipe.sharding", tostring(pattern), given[pattern], kinds)
    rules[#rules + 1] = { path = pattern, kind = given[pattern], given = true }
  end
  local cuts, experts = {}, {}
  for _, rule in ipairs(rules) do
    local exact, within = matcher(rule.path)
    local found = false
    for _, entry in ipairs(weights) do
      if entry.path:match(exact) or entry.path:match(within) then
        experts[entry.path] = experts[entry.path] or rule.experts
        found, cuts[entry.path] = true, cut_of(rule, #entry.state.shape, experts[entry.path])
      end
    end
    if rule.given and not found then
      pl.error("recipe.sharding", ("no State has the path '%s'"):format(rule.path), "paths are those of print(model), with * for one name: blocks.*.attn.out")
    end
  end
  return cuts, experts
end

---The dim that devices share: the first that they divide evenly, rather one that is not divided already, else the largest, whose
---last blocks are padded.
local function shared_dim(shape, parts, taken)
  local inner, largest, most = nil, nil, parts - 1
  for i, n in ipairs(shape) do
    local rest = n // (taken[i - 1] or 1)
    local even = rest >= parts and rest % parts == 0
    if even and not taken[i - 1] then return i - 1 end
    if even then inner = inner or i - 1 end
    if rest > most and not taken[i - 1] then largest, most = i - 1, rest end
  end
  return inner or largest
end

---@param shape integer[]
---@return integer
local function numel(shape)
  local n = 1
  for _, size in ipairs(shape) do n = n * size end
  return n
end

---Whether a stage of ZeRO divides the States with this path.
local function is_shared(path, stage, is_table)
  local part = path:match "^[^.]*"
  if part == "model" then return stage >= 3 or stage >= 1 and not is_table end
  return stage >= 1 and (part == "optim" or part == "ema")
end

---The weights whose rows a step looks up.
local function tables_of(model)
  local out = {}
  each(model, function(t)
    if rawget(t, "kind") == "Embedding" and rawget(t, "weight") then out[rawget(t, "weight")] = true end
  end)
  return out
end

---Finds the weight that a State of an optimizer or a moving average belongs to: paths by State.
local function owners(run)
  local out = {}
  for _, o in ipairs(run.optimizers) do
    for _, group in ipairs(o.opt.groups or {}) do
      for _, p in ipairs(group.params) do
        for _, slot in pairs(p.slots) do out[slot] = p.state end
      end
    end
  end
  return out
end

---Raises if devices would have nothing of their own: no sample of a batch, or no part of a layer.
local function check_use(run, axes, along_tp, experts)
  local samples, devices = run.data.train.size, axes.dp * axes.shard * axes.ep
  if math.type(samples) == "integer" and samples < devices then
    local names = axes.ep > 1 and "dp, shard and ep" or "dp and shard"
    pl.error("mesh", ("a batch of %d samples leaves some of the %d devices along %s without one"):format(samples, devices, names),
      "use a larger batch, which is that of all devices, or a smaller mesh")
  end
  if axes.cp > 1 then loader.check_sequences(run.data.train, axes.cp) end
  if axes.ep > 1 and not next(experts) then
    pl.error("mesh", ("ep=%d divides no layer of the model: it has no experts"):format(axes.ep),
      "use nn.MoE, or nn.TransformerBlock with `experts`, or dp")
  end
  if axes.tp == 1 then return end
  for _, cut in pairs(along_tp) do
    if cut then return end
  end
  pl.error("mesh", ("tp=%d divides no layer of the model"):format(axes.tp),
    "name the layers: recipe.sharding = { [\"1\"] = \"column\", [\"3\"] = \"row\" }, or use dp")
end

---Raises if shards would differ in size.
---@param run perilune.Run
local function check_shards(run)
  local shards, samples = native.shards(), run.data.train.size
  if shards and math.type(samples) == "integer" and samples % shards ~= 0 then
    local near = (samples // shards + 1) * shards
    pl.error("recipe.strict_shards", ("%d shards do not divide a batch of %d samples"):format(shards, samples),
      ("use a batch of %d, which is that of all devices, or fewer shards"):format(near))
  end
end

---Places all States of a run.
---@param stage_of table<any, integer> the pipeline stage of weights, by State and by path
---@param devices integer[] of the stages, in their order
local function place_states(run, axes, weights, along_tp, experts, stage_of, devices)
  local of_state, is_expert, owner, is_table = {}, {}, owners(run), tables_of(run.model)
  for _, entry in ipairs(weights) do
    of_state[entry.state] = along_tp[entry.path] or nil
    is_expert[entry.state] = experts[entry.path]
  end
  -- Devices along `shard` share States; without that axis those along `dp` do. So do those along `ep`, but for States of experts.
  local axis = axes.shard > 1 and "shard" or "dp"
  local largest = 0
  for _, entry in ipairs(weights) do largest = math.max(largest, numel(entry.state.shape)) end
  for _, entry in ipairs(run:states()) do
    local state, shape, taken = entry.state, entry.state.shape, {}
    local dims = {} ---@type table<string, integer|table>
    local function share(name)
      local dim = axes[name] > 1 and shared_dim(shape, axes[name], taken) --[[@as integer?]]
      if dim then dims[name], taken[dim] = dim, (taken[dim] or 1) * axes[name] end
    end
    local weight = owner[state] or state
    local of_average = entry.path:match "^ema%.(.*)$"
    local cut = of_state[weight] or along_tp[of_average]
    if cut and #weight.shape == #shape then
      local size, sections = shape[cut.dim + 1], cut.sections
      local units = sections and sections[1] + sections[2] + sections[3] or 1
      if size % (units * axes.tp) ~= 0 then
        pl.error("mesh", ("tp=%d does not divide dim %d of %s, which has %d elements"):format(axes.tp, cut.dim, entry.path, size // units),
          "choose another tp, or keep the layer whole: recipe.sharding = { [\"...\"] = \"whole\" }")
      end
      dims.tp, taken[cut.dim] = sections and { cut.dim, sections = sections } or cut.dim, axes.tp
    end
    local of_experts = (is_expert[weight] or experts[of_average]) and #weight.shape == #shape
    if of_experts then
      if shape[1] % axes.ep ~= 0 then
        pl.error("mesh", ("ep=%d does not divide the %d experts of %s"):format(axes.ep, shape[1], entry.path),
          "choose an ep that divides them, or another number of experts")
      end
      -- Rows go to the devices of their experts; what is shared beyond that is another dim.
      dims.ep, taken[0] = axes.ep > 1 and 0 or nil, axes.ep
    end
    if is_shared(entry.path, axes.zero, is_table[state]) and numel(shape) * SMALL >= largest then
      share(axis)
      if not of_experts then share "ep" end
    end
    local home = stage_of[weight] or stage_of[of_average]
    native.place_state(state, dims, home, home and devices[home + 1])
  end
end

---Places the States of a run on the mesh of its device.
---@param run perilune.Run
function mesh.place(run)
  check_shards(run)
  local axes = native.mesh() ---@type perilune.Mesh?
  if not axes then return end
  local weights = tree.states(run.model)
  local along_tp, experts = cuts_of_weights(run, weights)
  if axes.tp == 1 then along_tp = {} end
  check_use(run, axes, along_tp, experts)
  if axes.pp > 1 then
    local devices = stages.set_schedule(run, axes.pp)
    -- The recording that is cut computes initial values, of which no device may have all.
    place_states(run, axes, weights, along_tp, experts, stages.spread(weights, #devices), devices)
    place_states(run, axes, weights, along_tp, experts, stages.cut(run, #devices, weights), devices)
  else
    place_states(run, axes, weights, along_tp, experts, {}, {})
  end
end

return mesh
