-- bounded.lua: replaces library functions whose C loops cannot be interrupted by versions whose long loops are in Lua.
--
-- The count hook of an interrupt runs between Lua instructions. The remaining C loops are bounded by the size of plain tables and
-- strings, which the memory limit bounds. Loops over a metamethod (`__len`, `__index`) or a numeric range have no such bound.

local native = ...
local getmetatable, type, select, error, rawequal = getmetatable, type, select, error, rawequal
local integer, maxinteger = math.tointeger, math.maxinteger
local c = {
  rep = string.rep, concat = table.concat, insert = table.insert, remove = table.remove, sort = table.sort, move = table.move,
  pcall = pcall, resume = coroutine.resume,
}

---The number of elements above which a loop runs in Lua.
local MANY <const> = 100000
---The bytes above which a string is compared with the remaining memory.
local LARGE <const> = 1048576

local function rep(s, n, sep)
  if (type(s) == "string" or type(s) == "number") and type(n) == "number" and (sep == nil or type(sep) == "string") then
    local each = #(s .. "") + #(sep or "")
    if each == 0 then n = n > 0 and 1 or 0 end -- C would join nothing n times
    local bytes = each * (n + 0.0)
    if bytes > LARGE then native.need("string.rep", bytes) end
  end
  return c.rep(s, n, sep)
end

---Copies the elements i to j of a table with a metatable to a plain table.
local function plain(t, i, j)
  local out, n = {}, 0
  for k = i, j do
    n = n + 1
    out[n] = t[k]
  end
  return out, n
end

local function whole(value, name, position)
  return integer(value) or error(("bad argument #%d to '%s' (an integer expected)"):format(position, name), 3)
end

local function concat(t, sep, i, j)
  if getmetatable(t) == nil then return c.concat(t, sep, i, j) end
  i, j = i == nil and 1 or whole(i, "concat", 3), j == nil and #t or whole(j, "concat", 4)
  local out, n = {}, 0
  for k = i, j do
    local v = t[k]
    if type(v) ~= "string" and type(v) ~= "number" then
      error(("invalid value (%s) at index %d in table for 'concat'"):format(type(v), k), 2)
    end
    n = n + 1
    out[n] = v
  end
  return c.concat(out, sep)
end

local function insert(t, ...)
  if getmetatable(t) == nil then return c.insert(t, ...) end
  local given, n = select("#", ...), #t
  if given == 1 then
    t[n + 1] = (...)
  elseif given == 2 then
    local pos, v = ...
    pos = whole(pos, "insert", 2)
    if pos < 1 or pos > n + 1 then error("bad argument #2 to 'insert' (position out of bounds)", 2) end
    for k = n, pos, -1 do t[k + 1] = t[k] end
    t[pos] = v
  else
    error("wrong number of arguments to 'insert'", 2)
  end
end

local function remove(t, pos)
  if getmetatable(t) == nil then
    if pos == nil then return c.remove(t) end
    return c.remove(t, pos)
  end
  local n = #t
  if pos == nil then
    pos = n
  else
    pos = whole(pos, "remove", 2)
    if n + 1 ~= pos and (pos < 1 or pos > n + 1) then error("bad argument #2 to 'remove' (position out of bounds)", 2) end
  end
  local v = t[pos]
  while pos < n do
    t[pos] = t[pos + 1]
    pos = pos + 1
  end
  t[pos] = nil
  return v
end

local function sort(t, before)
  local as_given = getmetatable(t) == nil
  if as_given and (type(t) ~= "table" or #t < MANY) then
    if before == nil then return c.sort(t) end
    return c.sort(t, before)
  end
  -- Comparisons in Lua, so that a hook runs in a long sort.
  local compare = before and function(a, b) return before(a, b) end or function(a, b) return a < b end
  if as_given then return c.sort(t, compare) end
  local list, n = plain(t, 1, #t)
  c.sort(list, compare)
  for k = 1, n do t[k] = list[k] end
end

local function move(a, from, to, at, b)
  if b == nil then b = a end
  local f, e, t = integer(from), integer(to), integer(at)
  if not (f and e and t) or e < f or (e - f >= 0 and e - f < MANY) then return c.move(a, from, to, at, b) end
  if f <= 0 and e >= maxinteger + f then error("bad argument #3 to 'move' (too many elements to move)", 2) end
  if t > maxinteger - (e - f) then error("bad argument #4 to 'move' (destination wrap around)", 2) end
  if t > e or t <= f or not rawequal(a, b) then
    for k = 0, e - f do b[t + k] = a[f + k] end
  else
    for k = e - f, 0, -1 do b[t + k] = a[f + k] end
  end
  return b
end

---Adds the line to Lua's out-of-memory error, which is a fixed text.
local function explained(ok, e, ...)
  if not ok and e == "not enough memory" then
    return false, select(2, c.pcall(native.exhausted))
  end
  return ok, e, ...
end

local function protected(...)
  return explained(c.pcall(...))
end

local function handled(handler, ok, e, ...)
  if ok then return true, e, ... end
  return false, (select(2, c.pcall(handler, e)))
end

---Calls the handler once the stack is unwound. C calls it inside the error, which may be inside of the hook, where no hook runs and
---a handler's loop has no end. Without the debug library a handler cannot tell the difference.
local function protected_with(f, handler, ...)
  if type(handler) ~= "function" then
    error(("bad argument #2 to 'xpcall' (function expected, got %s)"):format(type(handler)), 2)
  end
  return handled(handler, explained(c.pcall(f, ...)))
end

local function resume(...)
  return explained(c.resume(...))
end

return {
  string = { rep = rep }, table = { concat = concat, insert = insert, remove = remove, sort = sort, move = move },
  coroutine = { resume = resume }, _G = { pcall = protected, xpcall = protected_with },
}
