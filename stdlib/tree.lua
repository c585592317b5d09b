-- tree.lua: traverses nested tables and names the States in them by their paths.
--
-- A path is the keys from the root, joined by dots: `blocks.3.attn.wq.weight`; list indices count from 1. Checkpoints and
-- optimizers identify States by these names, so the order is fixed: whole-number keys first, in numeric order, then names in
-- natural order (`block9` before `block10`). A table or State that is reachable twice (tied weights) counts once, under its
-- first path. Functions, numbers, strings and plain tensors are skipped.

local pl = require "perilune"

local tree = {}

---Splits a name into texts and numbers, so that "block10" sorts after "block9".
local function pieces(name)
  local out = {}
  for text, digits in name:gmatch "(%D*)(%d*)" do
    out[#out + 1] = text
    out[#out + 1] = tonumber(digits) or -1
  end
  return out
end

---Compares two keys in natural order.
---@param a string|integer
---@param b string|integer
---@return boolean
function tree.before(a, b)
  local num_a, num_b = type(a) == "number", type(b) == "number"
  if num_a ~= num_b then return num_a end
  if num_a then return a < b end
  local p, q = pieces(a), pieces(b)
  for i = 1, math.min(#p, #q) do
    if p[i] ~= q[i] then return p[i] < q[i] end
  end
  if #p ~= #q then return #p < #q end
  return a < b -- "a01" and "a1" have equal pieces: compare bytes
end

---Lists the keys of tables and States in `t`, in order.
---@param t table
---@return (string|integer)[]
function tree.keys(t)
  local keys = {}
  for k, v in pairs(t) do
    local named = type(k) == "string" or math.type(k) == "integer"
    if named and (type(v) == "table" or pl.is_state(v)) then keys[#keys + 1] = k end
  end
  table.sort(keys, tree.before)
  return keys
end

---Lists the names in `t`, in order. Code that records ops iterates in this order, never by `pairs`, whose order differs between
---processes: every process must record the same graph.
---@param t table<string, any>
---@return string[]
function tree.names(t)
  local names = {}
  for k in pairs(t) do names[#names + 1] = k end
  table.sort(names, tree.before)
  return names
end

---Joins a path and a key.
---@param path string
---@param key string|integer
---@return string
function tree.join(path, key)
  return path == "" and tostring(key) or path .. "." .. key
end

---Levels of tables in tables. A path has a key a level, so deep nesting costs the square of its depth.
local DEEPEST <const> = 200

---Raises for tables that are nested too deep to name what they hold.
---@param path string of a table
---@param depth integer tables above it
function tree.check_depth(path, depth)
  if depth < DEEPEST then return end
  pl.error("tree", ("tables are nested more than %d deep below '%s'"):format(DEEPEST, path:sub(1, 60)),
    "keep layers in a list: blocks[i], not block.next.next")
end

---Calls `visit(path, value)` for `root` and every table and State below it, in pre-order.
---@param root any
---@param visit fun(path: string, value: any)
function tree.walk(root, visit)
  local seen = {}
  local function go(path, value, depth)
    if seen[value] then return end
    seen[value] = true
    visit(path, value)
    if pl.is_state(value) then return end
    tree.check_depth(path, depth)
    for _, k in ipairs(tree.keys(value)) do go(tree.join(path, k), value[k], depth + 1) end
  end
  go("", root, 0)
end

---@class perilune.Entry
---@field path string
---@field state perilune.State

---Lists all States below `root`, in path order.
---@param root any
---@return perilune.Entry[]
function tree.states(root)
  local out = {}
  tree.walk(root, function(path, value)
    if pl.is_state(value) then out[#out + 1] = { path = path, state = value } end
  end)
  return out
end

return tree
