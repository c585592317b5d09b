-- prompt.lua: implements the commands :grad, :plan and :summary of `perilune repl`.
--
-- Each function takes the globals of the prompt, then the values of the expressions after the command, and returns text.

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local check = require "perilune.check"
local tree = require "perilune.tree"
local is_module = require("perilune.nn.module").is_module

local prompt = {}

---Aligns rows in columns: the first to the left, the others to the right.
---@param rows string[][]
---@return string
local function columns(rows)
  local widths = {} ---@type integer[]
  for _, row in ipairs(rows) do
    for i, cell in ipairs(row) do widths[i] = math.max(widths[i] or 0, utf8.len(cell) or #cell) end
  end
  local lines = {}
  for k, row in ipairs(rows) do
    local cells = {}
    for i, cell in ipairs(row) do
      local width = widths[i] --[[@as integer]]
      local pad = (" "):rep(width - (utf8.len(cell) or #cell))
      cells[i] = i == 1 and cell .. pad or pad .. cell
    end
    lines[k] = (table.concat(cells, "  "):gsub("%s+$", ""))
  end
  return table.concat(lines, "\n")
end

local function shape_of(x) return "{" .. table.concat(x.shape, ", ") .. "}" end

---Lists named States: those of the model of the run, then those of the modules and States among the globals.
---@param env table
---@return perilune.Entry[]
local function names_of(env)
  local entries = {} ---@type perilune.Entry[]
  local run = rawget(env, "run")
  if run then
    for _, entry in ipairs(tree.states(run.model)) do entries[#entries + 1] = entry end
  end
  for _, name in ipairs(tree.names(env)) do
    local value = rawget(env, name)
    if name ~= "pl" and name ~= "run" and (pl.is_state(value) or is_module(value)) then
      for _, entry in ipairs(tree.states({ [name] = value })) do entries[#entries + 1] = entry end
    end
  end
  return entries
end

local function name_of(entries, state)
  for _, entry in ipairs(entries) do
    if entry.state == state then return entry.path end -- raw equality: the same State
  end
  return "State " .. shape_of(state)
end

local function short(n)
  if n ~= n or n == math.huge or n == -math.huge or n == 0 then return tostring(n) end
  local size = math.abs(n)
  return (size >= 1e-3 and size < 1e5) and ("%.4f"):format(n) or ("%.2e"):format(n)
end

---Formats gradients as a table: shape, L2 norm, largest magnitude, norm relative to that of the weight.
local function table_of(entries, list)
  local rows = { { "", "shape", "|g|", "max |g|", "|g|/|w|" } }
  local total = 0.0
  for _, pair in ipairs(list) do
    local state, g = pair[1], pair[2]:to("f32") ---@type perilune.State?, perilune.Tensor
    local norm, most = (g * g):sum():sqrt():item(), g:abs():max():item()
    local w = state and state:detach():to("f32") ---@type perilune.Tensor?
    local weight = w and (w * w):sum():sqrt():item() or 0
    total = total + norm * norm
    rows[#rows + 1] = { pair[3] or name_of(entries, state), shape_of(g), short(norm), short(most),
                        weight > 0 and short(norm / weight) or "-" }
  end
  rows[#rows + 1] = { "all", "", short(math.sqrt(total)), "", "" }
  return columns(rows)
end

---Computes the gradients of a scalar by every trainable State it depends on. Of a State, a module or nil (all States), shows the
---gradients that `backward` accumulated.
---@param env table
---@param x any
---@return string
function prompt.grad(env, x)
  local entries = names_of(env)
  if pl.is_tensor(x) and not pl.is_state(x) then
    if x:numel() ~= 1 then
      pl.error(":grad", ("x has shape %s; only a scalar has gradients"):format(shape_of(x)), ":grad x:sum() or :grad x:mean()")
    end
    local states = native.states_of(x)
    if #states == 0 then pl.error(":grad", "x depends on no trainable State", "a value that was computed in an earlier step has no history") end
    local list = {}
    local grads = { pl.grad(x, states, { allow_unused = true }) }
    for i, state in ipairs(states) do
      if grads[i] then list[#list + 1] = { state, grads[i] } end
    end
    return table_of(entries, list)
  end
  local wanted = entries
  if x ~= nil then
    if not (pl.is_state(x) or type(x) == "table") then
      pl.error(":grad", "x is " .. check.show(x), ":grad loss, :grad model or :grad alone after loss:backward()")
    end
    wanted = pl.is_state(x) and { { path = name_of(entries, x), state = x } } or tree.states(x)
  end
  local list, seen = {}, {}
  for _, entry in ipairs(wanted) do
    local g = entry.state.grad
    local first = true
    for _, state in ipairs(seen) do first = first and state ~= entry.state end
    if g and first then
      list[#list + 1] = { entry.state, g, entry.path }
      seen[#seen + 1] = entry.state
    end
  end
  if #list == 0 then pl.error(":grad", "no State has a gradient", "call loss:backward() first, or :grad loss") end
  return table_of(entries, list)
end

---Formats the plan of the given tensors.
---@param _ table
---@return string
function prompt.plan(_, ...)
  for i = 1, select("#", ...) do
    local x = select(i, ...)
    if not pl.is_tensor(x) and type(x) ~= "table" then pl.error(":plan", "it is " .. check.show(x), "give tensors, as in :plan model(x):mean()") end
  end
  local text = pl.plan(...)
  if text:find("^0 kernels") then text = text .. "  nothing to run: it has been evaluated already\n" end
  return text
end

---Summarizes a model called with the given inputs; by default the model of the run, with a batch.
---@param env table
---@param model any
---@return string
function prompt.summary(env, model, ...)
  local run = rawget(env, "run")
  if model == nil and run then
    local names, batch = {}, run.batch
    for _, name in ipairs(tree.names(batch)) do
      if pl.is_tensor(batch[name]) then names[#names + 1] = name end
    end
    local input = batch.x or batch[names[1]]
    return tostring(pl.summary(run.model, input))
  end
  return tostring(pl.summary(model, ...))
end

return prompt
