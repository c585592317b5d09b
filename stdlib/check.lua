-- check.lua: validates arguments of the standard library; errors name the line of the recipe.
--
-- `pl.options` (native) fills in defaults and rejects unknown options with a "did you mean"; the default of an option determines
-- its type. This file adds options without a default and options of several types. Ops check shapes and dtypes of tensors.

local pl = require "perilune"

local check = {}

---Returns the kind of a value: "tensor", "state" or its Lua type.
---@param value any
---@return string
function check.kind(value)
  if pl.is_state(value) then return "state" end
  if pl.is_tensor(value) then return "tensor" end
  return type(value)
end

---Formats a value for an error message.
---@param value any
---@return string
function check.show(value)
  if type(value) == "string" then return "'" .. value .. "'" end
  if type(value) == "number" or type(value) == "boolean" or value == nil then return tostring(value) end
  return "a " .. check.kind(value)
end

---Whether `value` is one of `kinds`, such as "number|function|table|tensor".
---A State is also a tensor, and a callable table also a function.
---@param value any
---@param kinds string
---@return boolean
function check.is(value, kinds)
  local kind = check.kind(value)
  local meta = kind == "table" and getmetatable(value)
  for want in kinds:gmatch "%a+" do
    if kind == want or (want == "tensor" and kind == "state") then return true end
    if want == "function" and type(meta) == "table" and meta.__call then return true end
  end
  return false
end

---Returns the options with defaults filled in, as a new table. Raises for unknown options and wrong types.
---@param op string the function's name, for errors
---@param given table?
---@param defaults table<string, any>
---@param loose table<string, string>? kinds of the options without a default or of several types, such as { clip_norm = "number" }
---@return any options
function check.options(op, given, defaults, loose)
  if not loose then return pl.options(op, given, defaults) end
  if given ~= nil and type(given) ~= "table" then return pl.options(op, given --[[@as any]], defaults) end
  -- Pass a loose option as its own default, so that pl.options accepts its type and knows its name.
  local full = {}
  for k, v in pairs(defaults) do full[k] = v end
  for k in pairs(loose) do
    local v = given and given[k]
    full[k] = v ~= nil and v or false
  end
  local out = pl.options(op, given, full)
  for k, kinds in pairs(loose) do
    local v = given and given[k]
    if v ~= nil and not check.is(v, kinds) then
      pl.error(op, ("option '%s' is %s"):format(k, check.show(v)), "it must be a " .. (kinds:gsub("|", " or a ")))
    end
    out[k] = v
  end
  return out
end

---Raises unless every option in `names` is given.
---@param op string
---@param options table
---@param names string[]
function check.required(op, options, names)
  for _, name in ipairs(names) do
    if options[name] == nil then
      pl.error(op, ("option '%s' is missing"):format(name), ("it has no default: %s { %s = ..., ... }"):format(op, name))
    end
  end
end

---Returns `value` as an integer; raises unless it is a whole number >= `min` (1 by default; false: any).
---@param op string
---@param name string the argument's name
---@param value any
---@param min integer|false?
---@return integer
function check.whole(op, name, value, min)
  if min == nil then min = 1 end
  local whole = type(value) == "number" and math.tointeger(value)
  if not whole or (min and whole < min) then
    local hint
    if type(value) == "number" and not whole then hint = "in Lua, / gives a fraction where // gives a whole number" end
    if type(value) == "table" then hint = "pass sizes as separate arguments; only the trailing options are a table" end
    local rule = min and (" of at least %d"):format(min) or ""
    pl.error(op, ("%s is %s, but must be a whole number%s"):format(name, check.show(value), rule), hint)
  end
  return whole --[[@as integer]]
end

---Returns `value`; raises unless it is a number in [low, high].
---@param op string
---@param name string
---@param value any
---@param low number
---@param high number
---@return number
function check.between(op, name, value, low, high)
  if type(value) ~= "number" or not (value >= low and value <= high) then
    pl.error(op, ("%s is %s, but must be a number from %g to %g"):format(name, check.show(value), low, high))
  end
  return value
end

---Returns `value`; raises unless it is one of `words`.
---@param op string
---@param name string
---@param value any
---@param words string[]
---@return string
function check.word(op, name, value, words)
  for _, word in ipairs(words) do
    if value == word then return word end
  end
  pl.error(op, ("%s is %s"):format(name, check.show(value)), "it must be one of '" .. table.concat(words, "', '") .. "'")
  return value
end

---Expands a size given once or per dim to a list: 3 -> { 3, 3 } for two dims.
---@param op string
---@param name string
---@param value integer|integer[]
---@param dims integer
---@param min integer?
---@return integer[]
function check.sizes(op, name, value, dims, min)
  local out = {}
  if type(value) == "table" then
    if #value ~= dims then
      pl.error(op, ("%s has %d numbers, but there are %d dims"):format(name, #value, dims), "give one number for all dims, or one each")
    end
    for i = 1, dims do out[i] = check.whole(op, name, value[i], min) end
  else
    for i = 1, dims do out[i] = check.whole(op, name, value, min) end
  end
  return out
end

return check
