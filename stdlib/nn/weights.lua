-- nn/weights.lua: loads and saves weights under the names of other programs.
--
-- A rule maps a path in the model to a name in the file. `#` stands for an index, which counts from 1 in Lua lists and from 0 in
-- the file. A rule whose sides name a module applies to the States below it (weight, bias):
--
--   { "blocks.#.norm1", "transformer.h.#.ln_1" }
--   { "blocks.#.mlp.up", "transformer.h.#.mlp.c_fc", transpose = true }                     the file stores (in, out)
--   { "blocks.#.attn.qkv", { "layers.#.q_proj", "layers.#.k_proj" }, sizes = { 64, 16 } }   concatenated along dim 0
--   { "wte", "transformer.wte", rows = 50257 }                                              the model has more rows: zeros
--
-- Without rules the names are the paths. File formats are those of `pl.load` and `pl.save`; of a sharded model, its index.

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local check = require "perilune.check"
local fp8 = require "perilune.nn.fp8"
local tree = require "perilune.tree"

---@class perilune.NameRule
---@field [1] string path in the model
---@field [2] string|string[] name in the file, or names of the parts along dim 0
---@field transpose boolean? whether matrices are transposed in the file
---@field sizes integer[]? sizes of the parts along dim 0
---@field rows integer? number of rows in the file, if the model has more

local function literal(text) return (text:gsub("%p", "%%%0")) end

---Finds the rule of a path and the file names it gives: { names =, rule = }, or nil.
local function find(rules, path)
  for _, rule in ipairs(rules) do
    local pattern = "^" .. literal(rule[1]):gsub("%%#", "(%%d+)") .. "(.*)$"
    local a, b = path:match(pattern)
    local number, rest = b and a, b or a
    if rest and (rest == "" or rest:sub(1, 1) == ".") then
      local names = {}
      for i, name in ipairs(type(rule[2]) == "table" and rule[2] or { rule[2] }) do
        names[i] = name:gsub("#", number and ("%d"):format(tonumber(number) --[[@as integer]] - 1) or "#") .. rest
      end
      return { names = names, rule = rule }
    end
  end
end

---Pairs each State of the model with the names of its parts in the file.
local function plan(op, model, rules)
  local out, passing = {}, fp8.histories(model)
  for _, entry in ipairs(tree.states(model)) do
    if passing[entry.state] then goto continue end
    local found = rules and find(rules, entry.path) or { names = { entry.path }, rule = {} }
    if rules then
      if not found.rule[1] then pl.error(op, ("no rule names '%s'"):format(entry.path), "add { \"" .. entry.path .. "\", \"its name in the file\" }") end
    end
    local sizes = found.rule.sizes
    if #found.names > 1 and (not sizes or #sizes ~= #found.names) then
      pl.error(op, ("the rule for '%s' names %d parts, but has %d sizes"):format(entry.path, #found.names, sizes and #sizes or 0))
    end
    out[#out + 1] = { path = entry.path, state = entry.state, names = found.names, rule = found.rule }
    ::continue::
  end
  return out
end

local function shown(shape) return "{" .. table.concat(shape, ", ") .. "}" end

---Builds the value of a State from its parts in a file.
local function assemble(op, path, p, parts)
  local rule, want = p.rule, p.state.shape
  for i, part in ipairs(parts) do
    if rule.transpose and part:dim() == 2 then parts[i] = part:transpose(0, 1) end
  end
  local x = #parts == 1 and parts[1] or pl.cat(parts, 0)
  local rows = want[1]
  if rule.rows and x:dim() == #want and x:size(0) < rows then
    local rest = table.move(want, 1, #want, 1, {})
    rest[1] = rows - x:size(0)
    x = pl.cat({ x, pl.zeros(rest, { dtype = x.dtype }) }, 0)
  end
  if shown(x.shape) ~= shown(want) then
    pl.error(op, ("'%s' in %s has shape %s, but '%s' of the model has %s"):format(table.concat(p.names, "' + '"), path, shown(x.shape), p.path, shown(want)),
      "the file belongs to a model of another size")
  end
  return x:to(p.state.dtype)
end

---Loads every State of a model from a file. Raises if the file lacks a weight, has an unused name, or has another shape.
---@param model perilune.Module
---@param path string
---@param rules perilune.NameRule[]? name mapping, see the head of this file
---@param opts {ignore?: string[], prefix?: string}? ignore: Lua patterns of unused names; prefix: of the names in `rules`, which the file may omit
local function load_weights(model, path, rules, opts)
  local op = "nn.load_weights"
  local o = check.options(op, opts, { ignore = {} }, { prefix = "string" })
  local file, taken = pl.load(path), {}
  if pl.is_tensor(file) then pl.error(op, path .. " contains one tensor without a name", "named weights are in .safetensors or .npz files") end
  local names = tree.names(file)
  local function get(name, of)
    local short = o.prefix and name:sub(1, #o.prefix) == o.prefix and name:sub(#o.prefix + 1) or nil
    local key = file[name] == nil and short or name
    if file[key] == nil then
      local near = native.near(name, names)
      pl.error(op, ("%s has no '%s', which '%s' of the model needs"):format(path, name, of), near and ("did you mean '%s'?"):format(near) or nil)
    end
    taken[key] = true
    return file[key]
  end
  local values = {}
  for i, p in ipairs(plan(op, model, rules)) do
    local parts = {}
    for k, name in ipairs(p.names) do parts[k] = get(name, p.path) end
    values[i] = { state = p.state, value = assemble(op, path, p, parts) }
  end
  for _, name in ipairs(names) do
    local ignored = taken[name]
    for _, pattern in ipairs(o.ignore) do ignored = ignored or name:find(pattern) ~= nil end
    if not ignored then pl.error(op, ("the model has no '%s', which is in %s"):format(name, path), "the file belongs to another model, or name it in `ignore`") end
  end
  pl.no_grad(function()
    for _, v in ipairs(values) do v.state:assign(v.value) end
  end)
end

---Saves every State of a model under the names of the rules.
---@param model perilune.Module
---@param path string a .safetensors or .npz file
---@param rules perilune.NameRule[]? name mapping, see the head of this file
---@param opts {dtype?: perilune.DType}? dtype: in the file, that of the State by default
local function save_weights(model, path, rules, opts)
  local op = "nn.save_weights"
  local o = check.options(op, opts, {}, { dtype = "string" })
  local out = {}
  for _, p in ipairs(plan(op, model, rules)) do
    local x = p.state:detach()
    if p.rule.rows then x = x:narrow(0, 0, p.rule.rows) end
    if o.dtype then x = x:to(o.dtype) end
    local parts = #p.names == 1 and { x } or { x:split(p.rule.sizes, 0) }
    for k, part in ipairs(parts) do
      if p.rule.transpose and part:dim() == 2 then part = part:transpose(0, 1) end
      if out[p.names[k]] then pl.error(op, ("two weights have the name '%s'"):format(p.names[k]), "every rule must give distinct names") end
      out[p.names[k]] = part:contiguous()
    end
  end
  pl.save(path, out)
end

---Raises if `save_weights` could not write to `path`, so that a recipe which exports at its end fails at its start.
---@param path string a .safetensors or .npz file
local function check_export(path)
  native.check_save("nn.check_export", path)
end

return { load_weights = load_weights, save_weights = save_weights, check_export = check_export }
