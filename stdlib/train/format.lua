-- train/format.lua: formats losses and metrics as text.

local pl = require "perilune"
local tree = require "perilune.tree"

local format = {}

---Formats a number with four significant digits.
---@param n number
---@return string
function format.number(n)
  if n ~= n or n == math.huge or n == -math.huge then return tostring(n) end
  if math.type(n) == "integer" then return tostring(n) end
  local size = math.abs(n)
  if size >= 1e5 or (size > 0 and size < 1e-3) then return ("%.2e"):format(n) end
  local text = ("%." .. (size >= 100 and 1 or size >= 10 and 2 or 3) .. "f"):format(n)
  return text
end

---Formats a loss and its metrics, the loss first: `loss 0.412 · accuracy 0.890`. Reads scalar tensors back.
---@param loss number?
---@param metrics table<string, any>
---@return string
function format.metrics(loss, metrics)
  local parts = { loss and "loss " .. format.number(loss) }
  for _, name in ipairs(tree.names(metrics)) do
    local value = metrics[name]
    if pl.is_tensor(value) then value = value:numel() == 1 and value:item() or nil end
    if type(value) == "number" and name ~= "loss" then parts[#parts + 1] = name .. " " .. format.number(value) end
  end
  return table.concat(parts, " · ")
end

return format
