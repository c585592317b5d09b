-- kernel.lua: elementwise functions of one's own, written as one expression. (From CUDA source: source_kernel.lua.)
--
--   local swish = pl.kernel { name = "swish", inputs = "x", scalars = "beta", expr = "x / (1 + exp(-beta * x))" }
--   local y = swish(x, 1.5)
--
-- The expression is read once and recorded at each call as the ops it is made of, so it fuses with its neighbours, runs on
-- every device, broadcasts, follows the dtype rules and has gradients like anything else. `backward` replaces the
-- derived gradient, where a better one is known. Scalars are run-time numbers: a new value compiles nothing.
--
-- Grammar, loosest first: c ? a : b | or || | and && | == != < <= > >= | + - | * / % | - ! | ^ (power, to the right) |
-- numbers, names, f(a, b), ( ).

local pl = require "perilune"
local check = require "perilune.check"

-- Functions of an expression by their number of arguments; a name is the op's, or stands for it.
local unary, binary = {}, {}
for word in ([[exp log log1p expm1 sqrt rsqrt sin cos tan tanh sigmoid erf abs sign floor ceil round relu
               reciprocal isnan isinf silu gelu softplus]]):gmatch "%S+" do
  unary[word] = word
end
unary.fabs = "abs"
for word in ("pow maximum minimum"):gmatch "%S+" do binary[word] = word end
binary.min, binary.max, binary.fmin, binary.fmax = "minimum", "maximum", "minimum", "maximum"

local function names_of(table_a, table_b)
  local out = { "where" }
  for _, t in ipairs { table_a, table_b } do
    for name in pairs(t) do out[#out + 1] = name end
  end
  table.sort(out)
  return out
end
local functions = names_of(unary, binary)

---A value that has methods: numbers become scalar tensors.
local function lift(v)
  return type(v) == "number" and pl.full({}, v) or v
end

local compare = { ["=="] = "eq", ["!="] = "ne", ["~="] = "ne", ["<"] = "lt", ["<="] = "le", [">"] = "gt", [">="] = "ge" }

---Evaluators by operator: of tensors and numbers to a tensor or number.
local arithmetic = {
  ["+"] = function(a, b) return a + b end,
  ["-"] = function(a, b) return a - b end,
  ["*"] = function(a, b) return a * b end,
  ["/"] = function(a, b) return a / b end,
  ["%"] = function(a, b) return a % b end,
  ["^"] = function(a, b) return a ^ b end,
  ["&&"] = function(a, b) return lift(a):logical_and(lift(b)) end,
  ["||"] = function(a, b) return lift(a):logical_or(lift(b)) end,
}
for symbol, op in pairs(compare) do
  arithmetic[symbol] = function(a, b) return lift(a)[op](lift(a), b) end
end

local levels = { { "||" }, { "&&" }, { "==", "!=", "~=", "<=", ">=", "<", ">" }, { "+", "-" }, { "*", "/", "%" } }

---Parses an expression over the given names to a function of a table of their values.
---@param op string
---@param text string
---@param known table<string, boolean>
---@return fun(values: table<string, any>): any
local function parse(op, text, known)
  local at = 1

  local function fail(message, hint)
    pl.error(op, ("expr: %s at column %d: %s"):format(message, at, text), hint)
  end
  local function skip() at = text:find("%S", at) or #text + 1 end
  local function take(symbol)
    skip()
    if text:sub(at, at + #symbol - 1) ~= symbol then return false end
    at = at + #symbol
    return true
  end
  local function expect(symbol)
    if not take(symbol) then fail(("expected '%s'"):format(symbol)) end
  end
  local ternary ---@type fun(): function

  local function call(name, start)
    local args = {}
    repeat args[#args + 1] = ternary() until not take ","
    expect ")"
    if name == "where" then
      if #args ~= 3 then at = start; fail "where takes a condition and two values" end
      return function(v) return pl.where(lift(args[1](v)), args[2](v), args[3](v)) end
    end
    local f, count = unary[name], 1
    if not f then f, count = binary[name], 2 end
    if not f then
      at = start
      local near = pl.native.near(name, functions)
      fail(("there is no function '%s'"):format(name), near and ("did you mean %s?"):format(near) or "functions are " .. table.concat(functions, " "))
    end
    if #args ~= count then at = start; fail(("%s takes %d argument%s, not %d"):format(name, count, count == 1 and "" or "s", #args)) end
    if count == 1 then return function(v) return pl[f](lift(args[1](v))) end end
    return function(v) return pl[f](lift(args[1](v)), lift(args[2](v))) end
  end

  local function primary()
    skip()
    local start = at
    local number = text:match("^%d+%.?%d*[eE][+-]?%d+", at) or text:match("^%.%d+[eE][+-]?%d+", at) or text:match("^%d+%.?%d*", at) or text:match("^%.%d+", at)
    if number then
      at = at + #number
      if text:find("^[fF]%f[%W]", at) then at = at + 1 end -- 1.0f, as in C
      if text:find("^[%w_.]", at) then fail(("'%s' is no number"):format(text:match("^[%w_.]+", start))) end
      local value = tonumber(number)
      return function() return value end
    end
    local name = text:match("^[%a_][%w_]*", at)
    if name then
      at = at + #name
      if take "(" then return call(name, start) end
      if not known[name] then
        at = start
        local names = {}
        for k in pairs(known) do names[#names + 1] = k end
        table.sort(names)
        local near = #name > 1 and pl.native.near(name, names)
        fail(("'%s' is neither an input nor a scalar"):format(name), near and ("did you mean %s?"):format(near) or "declared are " .. table.concat(names, ", "))
      end
      return function(v) return v[name] end
    end
    if take "(" then
      local inner = ternary()
      expect ")"
      return inner
    end
    if at > #text then fail "the expression ends too early" end
    fail(("unexpected '%s'"):format(text:sub(at, at)))
  end

  local unary_level ---@type fun(): function
  local function power()
    local base = primary() ---@type any
    if not take "^" then return base end
    local exponent = unary_level() -- to the right, and -x is a fine exponent
    return function(v) return arithmetic["^"](base(v), exponent(v)) end
  end
  function unary_level()
    if take "-" then
      local x = unary_level()
      return function(v) return -x(v) end
    end
    if take "+" then return unary_level() end
    skip()
    if text:sub(at, at) == "!" and text:sub(at + 1, at + 1) ~= "=" then
      at = at + 1
      local x = unary_level()
      return function(v) return lift(x(v)):logical_not() end
    end
    return power()
  end
  local function level(k)
    if not levels[k] then return unary_level() end
    local left = level(k + 1)
    while true do
      local found
      for _, symbol in ipairs(levels[k]) do
        if take(symbol) then found = symbol break end
      end
      if not found then return left end
      local a, b, f = left, level(k + 1), arithmetic[found]
      left = function(v) return f(a(v), b(v)) end
    end
  end
  function ternary()
    local c = level(1)
    if not take "?" then return c end
    local yes = ternary()
    expect ":"
    local no = ternary()
    return function(v) return pl.where(lift(c(v)), yes(v), no(v)) end
  end

  local whole = ternary()
  skip()
  if at <= #text then fail(("unexpected '%s'"):format(text:sub(at, at))) end
  return whole
end

local dtypes = { "f64", "f32", "bf16", "f16", "i64", "i32", "u8", "bool" }

---Names in order from "x, y: bf16", with the dtypes of those that have one.
local function declared(op, what, text, taken)
  if text == nil then return {}, {} end
  if type(text) ~= "string" then pl.error(op, ("%s is %s"):format(what, check.show(text)), ('names in one string: %s = "x, y"'):format(what)) end
  local names, types = {}, {}
  for part in (text .. ","):gmatch "%s*(.-)%s*," do
    local name, dtype = part:match "^([%a_][%w_]*)%s*:%s*(%w+)$"
    name = name or part:match "^[%a_][%w_]*$"
    if not name then pl.error(op, ("%s: '%s' is no name"):format(what, part), "names are letters, digits and _, separated by commas; a dtype may follow: x: bf16") end
    if taken[name] then pl.error(op, ("'%s' is declared twice"):format(name)) end
    if dtype then check.word(op, what .. ": dtype of " .. name, dtype, dtypes) end
    taken[name] = true
    names[#names + 1], types[name] = name, dtype
  end
  return names, types
end

---@class perilune.KernelOptions
---@field name string? for errors
---@field inputs string names of the tensors, in order: "x" or "x, y: bf16"; a dtype is required of the argument
---@field scalars string? names of the numbers that follow them
---@field expr string
---@field backward (fun(grad: perilune.Tensor, ...: any): perilune.Tensor?, ...)? gradients of the inputs from the result's and the same arguments

---@class perilune.SourceKernelOptions
---@field name string the __global__ function in source
---@field inputs string as above
---@field outputs string? names of the results, "y" by default; a dtype may follow, by default that of the first input
---@field scalars string? names of the numbers that follow, passed by value as f32 or the dtype declared
---@field source string CUDA C++
---@field shape (fun(...: any): integer[] ...)? shape of each output from the arguments; by default that of the first input
---@field grid integer|integer[]|(fun(...: any): integer|integer[])? blocks; by default a thread for each element of the first output
---@field block integer|integer[]|(fun(...: any): integer|integer[])? threads of a block, 256 by default
---@field shared integer|(fun(...: any): integer)? bytes of dynamic shared memory
---@field args (fun(...: any): integer ...)? whole numbers passed behind the outputs: sizes and the like
---@field cpu (fun(...: any): perilune.Tensor ...)? computes the same, on the CPU and for pl.kernel_check
---@field backward (fun(grad: perilune.Tensor, ...: any): perilune.Tensor?, ...)? gradients of the inputs from the result's and the same arguments

---A function of tensors from an elementwise expression, or from CUDA source.
---@param given perilune.KernelOptions|perilune.SourceKernelOptions
---@return fun(...: any): perilune.Tensor ...
local function kernel(given)
  local op = "kernel"
  local function kind(key, wanted)
    local v = given[key]
    if v ~= nil and not check.is(v, wanted) then pl.error(op, ("%s is %s"):format(key, check.show(v)), ("it must be a %s"):format(wanted)) end
  end
  if type(given) ~= "table" then pl.error(op, "the argument is " .. check.show(given), 'pl.kernel { inputs = "x", expr = "x * x" }') end
  ---@cast given -nil
  if given["source"] ~= nil then return require("perilune.source_kernel").kernel(given --[[@as perilune.SourceKernelOptions]], declared) end
  ---@cast given perilune.KernelOptions
  if given["expr"] == nil then pl.error(op, "it has neither expr nor source", 'an elementwise one is an expr: expr = "x * x"; any other is CUDA source') end
  check.options(op, given, {}, { name = "string", inputs = "string", scalars = "string", expr = "string", backward = "function" })
  check.required(op, given, { "inputs", "expr" })
  kind("backward", "function")
  local name = given.name or "kernel"
  local taken = {}
  local inputs, types = declared(name, "inputs", given.inputs, taken)
  local scalars = declared(name, "scalars", given.scalars, taken)
  local body = parse(name, given.expr --[[@as string]], taken)
  local usage = ("%s(%s)"):format(name, table.concat(inputs, ", ") .. (#scalars > 0 and ", " .. table.concat(scalars, ", ") or ""))

  local function forward(...)
    if select("#", ...) ~= #inputs + #scalars then
      pl.error(name, ("it takes %d arguments, not %d"):format(#inputs + #scalars, select("#", ...)), usage)
    end
    local values = {}
    for i, input in ipairs(inputs) do
      local v = (select(i, ...))
      if not pl.is_tensor(v) then pl.error(name, ("%s is %s"):format(input, check.show(v)), "it must be a tensor: " .. usage) end
      if types[input] and v.dtype ~= types[input] then
        pl.error(name, ("%s is %s, but declared as %s"):format(input, v.dtype, types[input]), ('convert it: %s:to("%s")'):format(input, types[input]))
      end
      values[input] = v
    end
    for i, scalar in ipairs(scalars) do
      local v = (select(#inputs + i, ...))
      if type(v) ~= "number" and not (pl.is_tensor(v) and #v.shape == 0) then
        pl.error(name, ("%s is %s"):format(scalar, check.show(v)), "it must be a number or a scalar tensor: " .. usage)
      end
      values[scalar] = v
    end
    return lift(body(values))
  end
  if not given.backward then return forward end
  return pl.custom { name = name, forward = forward, backward = given.backward }
end

return kernel
