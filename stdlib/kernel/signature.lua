-- kernel/signature.lua: parses the declared names of a kernel and checks the arguments of its calls.

local pl = require "perilune"
local check = require "perilune.check"

---@class perilune.KernelSignature
---@field name string
---@field inputs string[]
---@field outputs string[]
---@field scalars string[]
---@field dtypes table<string, string> declared dtype by name
---@field names table<string, boolean> every declared name
---@field usage string such as "swish(x, beta)", for errors
local Signature = {}
local meta = { __index = Signature }

local signature = {}

---Dtypes that inputs and outputs may have.
signature.dtypes = { "f64", "f32", "bf16", "f16", "i64", "i32", "u8", "bool" }

---Parses "x, y: bf16" to the names in order; adds them and their dtypes to the signature.
local function declare(self, what, text)
  if text == nil then return {} end
  local op = self.name
  if type(text) ~= "string" then pl.error(op, ("%s is %s"):format(what, check.show(text)), ('names in one string: %s = "x, y"'):format(what)) end
  local names = {}
  for part in (text .. ","):gmatch "%s*(.-)%s*," do
    local name, dtype = part:match "^([%a_][%w_]*)%s*:%s*(%w+)$"
    name = name or part:match "^[%a_][%w_]*$"
    if not name then pl.error(op, ("%s: '%s' is not a name"):format(what, part), "names are letters, digits and _, separated by commas; a dtype may follow: x: bf16") end
    if self.names[name] then pl.error(op, ("'%s' is declared twice"):format(name)) end
    if dtype then check.word(op, what .. ": dtype of " .. name, dtype, signature.dtypes) end
    self.names[name] = true
    names[#names + 1], self.dtypes[name] = name, dtype
  end
  return names
end

---Parses the declarations of a kernel.
---@param name string the kernel's name, for errors
---@param given {inputs: string, outputs: string?, scalars: string?}
---@param has_outputs boolean whether outputs are named; by default one, "y", or "out" if an input is called y
---@return perilune.KernelSignature
function signature.new(name, given, has_outputs)
  local self = setmetatable({ name = name, dtypes = {}, names = {}, outputs = {} }, meta)
  self.inputs = declare(self, "inputs", given.inputs)
  if has_outputs then self.outputs = declare(self, "outputs", given.outputs or (self.names.y and "out" or "y")) end
  self.scalars = declare(self, "scalars", given.scalars)
  local scalars = #self.scalars > 0 and ", " .. table.concat(self.scalars, ", ") or ""
  self.usage = ("%s(%s)"):format(name, table.concat(self.inputs, ", ") .. scalars)
  return self
end

---Checks a call: a tensor of the declared dtype for each input, then a number or scalar tensor for each scalar.
---@param ... any
---@return any[] arguments as given
function Signature:check(...)
  local name, inputs, scalars, usage = self.name, self.inputs, self.scalars, self.usage
  if select("#", ...) ~= #inputs + #scalars then
    pl.error(name, ("it takes %d arguments, not %d"):format(#inputs + #scalars, select("#", ...)), usage)
  end
  for i, input in ipairs(inputs) do
    local v, dtype = (select(i, ...)), self.dtypes[input]
    if not pl.is_tensor(v) then pl.error(name, ("%s is %s"):format(input, check.show(v)), "it must be a tensor: " .. usage) end
    if dtype and v.dtype ~= dtype then
      pl.error(name, ("%s is %s, but declared as %s"):format(input, v.dtype, dtype), ('convert it: %s:to("%s")'):format(input, dtype))
    end
  end
  for i, scalar in ipairs(scalars) do
    local v = (select(#inputs + i, ...))
    if type(v) ~= "number" and not (pl.is_tensor(v) and #v.shape == 0) then
      pl.error(name, ("%s is %s"):format(scalar, check.show(v)), "it must be a number or a scalar tensor: " .. usage)
    end
  end
  return { ... }
end

return signature
