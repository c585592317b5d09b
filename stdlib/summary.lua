-- summary.lua: summarizes a model layer by layer: output shapes, parameters, FLOP, bytes of outputs.
--
-- The model is called once and recorded, not executed, so it may be larger than the memory. FLOP are those of the plan of the layer
-- alone; bytes are those of its outputs, which a backward pass may have to store. A layer that is called twice counts twice, its
-- parameters once.

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local check = require "perilune.check"
local tree = require "perilune.tree"
local nn_module = require "perilune.nn.module"

---@class perilune.SummaryRow
---@field path string "" is the model itself
---@field kind string
---@field depth integer
---@field shape integer[]? of the first output
---@field parameters integer
---@field flops integer
---@field bytes integer of the outputs
---@field calls integer

---@class perilune.Summary
---@field rows perilune.SummaryRow[]
---@field parameters integer
---@field flops integer
---@field bytes integer of the outputs of all layers without sub-modules

local sizes = { f64 = 8, i64 = 8, f32 = 4, i32 = 4, bf16 = 2, f16 = 2, u8 = 1, bool = 1 }

local function scaled(n, unit)
  for _, s in ipairs { { 1e12, "T" }, { 1e9, "G" }, { 1e6, "M" }, { 1e3, "k" } } do
    if n >= s[1] then return ("%.1f %s%s"):format(n / s[1], s[2], unit) end
  end
  return ("%d %s"):format(n, unit)
end

local meta = {}
function meta.__tostring(summary)
  local rows = { { "layer", "output", "parameters", "FLOP", "activations" } }
  for _, row in ipairs(summary.rows) do
    local name = row.path:match "[^.]+$"
    rows[#rows + 1] = {
      ("  "):rep(row.depth) .. (name and name .. ": " or "") .. row.kind .. (row.calls > 1 and (" x %d"):format(row.calls) or ""),
      row.shape and "{" .. table.concat(row.shape, ", ") .. "}" or "-",
      row.parameters > 0 and nn_module.grouped(row.parameters) or "-",
      row.calls > 0 and scaled(row.flops, "FLOP") or "not called", row.calls > 0 and scaled(row.bytes, "B") or "",
    }
  end
  rows[#rows + 1] = { "all", "", nn_module.grouped(summary.parameters), scaled(summary.flops, "FLOP"), scaled(summary.bytes, "B") }
  local widths = {} ---@type integer[]
  for _, row in ipairs(rows) do
    for i, cell in ipairs(row) do widths[i] = math.max(widths[i] or 0, utf8.len(cell) or #cell) end
  end
  local lines = {}
  for k, row in ipairs(rows) do
    local line = ""
    for i, cell in ipairs(row) do
      local width = widths[i] --[[@as integer]]
      local pad = (" "):rep(width - (utf8.len(cell) or #cell))
      line = line .. (i <= 2 and cell .. pad or pad .. cell) .. "  "
    end
    lines[k] = (line:gsub("%s+$", ""))
  end
  return table.concat(lines, "\n")
end

local function tensors_of(...)
  local out = {}
  for i = 1, select("#", ...) do
    local value = select(i, ...)
    if pl.is_tensor(value) then
      out[#out + 1] = value
    elseif type(value) == "table" then
      for _, k in ipairs(tree.names(value)) do
        if pl.is_tensor(value[k]) then out[#out + 1] = value[k] end
      end
    end
  end
  return out
end

---Summarizes a model layer by layer: output shapes, parameters, FLOP, bytes of outputs.
---Nothing is executed and no random number is consumed. Prints as a table; `rows` contains the numbers.
---@param model perilune.Module
---@param ... any inputs of the model
---@return perilune.Summary
return function(model, ...)
  if not nn_module.is_module(model) then
    pl.error("summary", "argument 1 is " .. check.show(model), "give a module and its input: pl.summary(model, x)")
  end
  if select("#", ...) == 0 then pl.error("summary", "there is no input", "pl.summary(model, x), where x is what model(x) takes") end
  local rows, by_module = {}, {} ---@type perilune.SummaryRow[]
  local below = {} -- whether a module has sub-modules
  tree.walk(model, function(path, value)
    if not nn_module.is_module(value) then return end
    local depth = 0
    for parent, row in pairs(by_module) do
      if row.path == "" or path:sub(1, #row.path + 1) == row.path .. "." then
        depth = math.max(depth, row.depth + 1)
        below[parent] = true
      end
    end
    local row = { path = path, kind = value.kind or "module", depth = depth, parameters = value:num_parameters(), flops = 0, bytes = 0,
                  calls = 0 }
    rows[#rows + 1], by_module[value] = row, row
  end)
  local inputs = table.pack(...)
  -- Evaluation mode: layers assign no State and draw no random numbers.
  local modes = {}
  for module in pairs(by_module) do modes[module] = { rawget(module, "training") } end
  local restore <close> = setmetatable({}, { __close = function()
    for module, mode in pairs(modes) do module.training = mode[1] end
  end })
  for module in pairs(by_module) do module.training = false end

  local function around(module, call)
    local row = by_module[module]
    if not row then return call() end
    local from = native.mark()
    local out = table.pack(call())
    local outputs = tensors_of(table.unpack(out, 1, out.n))
    row.calls = row.calls + 1
    if outputs[1] then
      row.shape = row.shape or outputs[1].shape
      row.flops = row.flops + native.cost(from, outputs).flops
      for _, x in ipairs(outputs) do row.bytes = row.bytes + x:numel() * sizes[x.dtype] end
    end
    return table.unpack(out, 1, out.n)
  end
  local function body() return model(table.unpack(inputs, 1, inputs.n)) end
  native.aside(function() pl.no_grad(function() nn_module.watch(around, body) end) end)
  local total = { rows = rows, parameters = model:num_parameters(), flops = by_module[model].flops, bytes = 0 }
  for module, row in pairs(by_module) do
    if not below[module] then total.bytes = total.bytes + row.bytes end
  end
  return setmetatable(total, meta)
end
