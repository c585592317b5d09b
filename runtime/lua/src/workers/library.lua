-- library.lua: replaces functions of the standard libraries whose results differ between Lua states.
--
-- Lua seeds the hashes of strings for each state, so `next` visits the fields of a table in an order of the state's own, and
-- `table.sort` takes pivots by the clock for tables that are divided badly.

local raw_next, raw_get, getmetatable, type, error, c_sort = next, rawget, getmetatable, type, error, table.sort

---Above this size C may take a pivot by the clock: its parts must be more than 128 times of unequal size.
local PIVOTS <const> = 200

local ranks <const> = { boolean = 1, number = 2, string = 3 }

---Orders keys: booleans, numbers, strings.
local function before(a, b)
  local of_a, of_b = type(a), type(b)
  if of_a ~= of_b then return ranks[of_a] < ranks[of_b] end
  if of_a == "boolean" then return not a and b end
  return a < b
end

local function ordered(key, name)
  if not ranks[type(key)] then
    error(("%s: the table has a %s as a key, and these have no order that is the same in all workers"):format(name, type(key)), 3)
  end
end

---Returns the keys of a table in their order, and their number.
local function keys_of(t)
  local keys, n, last, sorted = {}, 0, 0, true
  for key in raw_next, t do
    ordered(key, "pairs")
    n = n + 1
    keys[n] = key
    -- A list is walked in its order anyway.
    if sorted then
      sorted = type(key) == "number" and key > last
      last = key
    end
  end
  if not sorted then c_sort(keys, before) end
  return keys, n
end

local function sorted_pairs(t)
  local meta = getmetatable(t)
  if meta and meta.__pairs then
    local f, state, first = meta.__pairs(t)
    return f, state, first
  end
  if type(t) ~= "table" then
    error(("bad argument #1 to 'pairs' (table expected, got %s)"):format(t == nil and "no value" or type(t)), 2)
  end
  local keys, n = keys_of(t)
  local i = 0
  return function()
    while i < n do
      i = i + 1
      local value = raw_get(t, keys[i])
      if value ~= nil then return keys[i], value end
    end
  end, t, nil
end

---Finds the next key in time proportional to the size of the table; `pairs` sorts the keys once.
local function sorted_next(t, from)
  local found
  for key in raw_next, t do
    ordered(key, "next")
    if (from == nil or before(from, key)) and (found == nil or before(key, found)) then found = key end
  end
  if found == nil then return nil end
  return found, raw_get(t, found)
end

---Sorts by merging: equal elements keep their order.
local function merge_sort(t, n, less)
  local from, to = t, {}
  local width = 1
  while width < n do
    for low = 1, n, 2 * width do
      local middle, high = low + width, low + 2 * width
      if middle > n + 1 then middle = n + 1 end
      if high > n + 1 then high = n + 1 end
      local a, b = low, middle
      for k = low, high - 1 do
        if a < middle and (b >= high or not less(from[b], from[a])) then
          to[k] = from[a]
          a = a + 1
        else
          to[k] = from[b]
          b = b + 1
        end
      end
    end
    from, to = to, from
    width = 2 * width
  end
  if from ~= t then
    for k = 1, n do t[k] = from[k] end
  end
end

local function sort(t, less)
  if type(t) ~= "table" or getmetatable(t) ~= nil or #t <= PIVOTS or less ~= nil and type(less) ~= "function" then
    if less == nil then return c_sort(t) end
    return c_sort(t, less)
  end
  merge_sort(t, #t, less or function(a, b) return a < b end)
end

return { pairs = sorted_pairs, next = sorted_next, sort = sort }
