-- kernel/expr.lua: compiles elementwise kernels from one expression.
--
-- The expression is parsed once. Each call records the ops it consists of, so it fuses with its neighbours, runs on every
-- device, broadcasts, follows the dtype rules and has gradients. `backward` replaces the derived gradient.
--
-- Grammar, by increasing precedence: c ? a : b | or || | and && | == != < <= > >= | + - | * / % | - ! | ^ (power,
-- right-associative) | numbers, names, f(a, b), ( ).

local pl = require "perilune"
local check = require "perilune.check"
local signature = require "perilune.kernel.signature"

-- Functions of an expression, by their number of arguments: name -> op.
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

---Converts a number to a scalar tensor, which has methods.
local function lift(v)
  return type(v) == "number" and pl.full({}, v) or v
end

local compare = { ["=="] = "eq", ["!="] = "ne", ["~="] = "ne", ["<"] = "lt", ["<="] = "le", [">"] = "gt", [">="] = "ge" }

---Evaluators of the operators, over tensors and numbers.
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

---Parses an expression by recursive descent, to a function of a table of values by name.
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
      if text:find("^[%w_.]", at) then fail(("'%s' is not a number"):format(text:match("^[%w_.]+", start))) end
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
    local exponent = unary_level() -- right-associative; an exponent may have a sign
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

---Makes a kernel from the options of pl.kernel with `expr`.
---@param given perilune.KernelOptions
---@return fun(...: any): perilune.Tensor
local function kernel(given)
  local op = "kernel"
  check.options(op, given, {}, { name = "string", inputs = "string", scalars = "string", expr = "string", backward = "function" })
  check.required(op, given, { "inputs", "expr" })
  local name = given.name or "kernel"
  local sig = signature.new(name, given, false)
  local body = parse(name, given.expr, sig.names)

  local function forward(...)
    local arguments, values = sig:check(...), {}
    for i, input in ipairs(sig.inputs) do values[input] = arguments[i] end
    for i, scalar in ipairs(sig.scalars) do values[scalar] = arguments[#sig.inputs + i] end
    return lift(body(values))
  end
  if not given.backward then return forward end
  return pl.custom { name = name, forward = forward, backward = given.backward }
end

return { kernel = kernel }
