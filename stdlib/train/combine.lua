-- train/combine.lua: combines metrics over batches: means by default, a function of means (`metrics.new`), or a function of all samples.
--
-- A metric with a rule is a tensor, its value on one batch. The rule is kept beside the tensor, so that the metric can be printed and
-- computed with like any other; what is computed from it is a plain tensor, of which the loop takes the mean.

local pl = require "perilune"
local check = require "perilune.check"
local tree = require "perilune.tree"

local combine = {}

---@class perilune.train.Rule
---@field names string[] of what is averaged over batches
---@field one boolean whether `finish` takes one mean instead of a table
---@field joined boolean? whether the parts are joined along dim 0 instead of averaged
---@field finish fun(mean: any): perilune.Tensor

---@class perilune.train.Parts: perilune.train.Rule
---@field parts table<string, perilune.Tensor> on one batch, by name

local rules = setmetatable({}, { __mode = "k" }) ---@type table<perilune.Tensor, perilune.train.Parts>

-- The key of the only part, which no name of a part equals.
local ONLY = ""

-- What is between the name of a metric and that of a part, which is averaged or joined.
local AVERAGED <const>, JOINED <const> = "\0", "\0\0"

---@param finish fun(mean: any): perilune.Tensor
---@param mean any
---@return perilune.Tensor
local function finished(finish, mean)
  local value = finish(mean)
  if not pl.is_tensor(value) or value:numel() ~= 1 then
    local got = pl.is_tensor(value) and ("a tensor of shape {%s}"):format(table.concat(value.shape, ", ")) or check.show(value)
    pl.error("metrics.new", "finish returned " .. got, "return a scalar tensor", finish)
  end
  return value
end

---Makes a metric from what is averaged over batches, and the function of the averages.
---@param mean any a scalar tensor or a table of them by name
---@param finish fun(mean: any): perilune.Tensor
---@return perilune.Tensor value the metric of this batch
function combine.new(mean, finish)
  local one = pl.is_tensor(mean)
  local value = finished(finish, mean)
  local parts = one and { [ONLY] = mean } or mean
  rules[value] = { parts = parts, names = tree.names(parts), one = one, finish = finish }
  return value
end

---Makes a metric from tensors (samples, ...), which are joined over batches, and the function of all of them.
---@param parts table<string, perilune.Tensor>
---@param finish fun(parts: table<string, perilune.Tensor>): perilune.Tensor
---@return perilune.Tensor value the metric of this batch
function combine.join_samples(parts, finish)
  local value = finished(finish, parts)
  rules[value] = { parts = parts, names = tree.names(parts), one = false, joined = true, finish = finish }
  return value
end

---Whether the parts of this name are joined.
---@param name string of what `split` returned
---@return boolean
function combine.is_joined(name)
  return name:find(JOINED, 1, true) ~= nil
end

---Replaces metrics that have a rule by the parts that are averaged or joined for them.
---@param values table<string, any>
---@param known table<string, perilune.train.Rule> receives the rules, by name
---@return table<string, any>
function combine.split(values, known)
  local out = {}
  for _, name in ipairs(tree.names(values)) do
    local value = values[name]
    local rule = pl.is_tensor(value) and rules[value] or nil
    if rule then
      -- Without the parts, which would stay in memory until the next batch.
      known[name] = { names = rule.names, one = rule.one, joined = rule.joined, finish = rule.finish }
      for part, mean in pairs(rule.parts) do out[name .. (rule.joined and JOINED or AVERAGED) .. part] = mean end
    else
      out[name] = value
    end
  end
  return out
end

---Replaces the means of parts, and parts that were joined, by the metrics that they are parts of, in place.
---@param means table<string, any> tensors, numbers or, of parts that are joined, lists of tensors
---@param known table<string, perilune.train.Rule>
---@return table<string, any> means numbers where the means were numbers
function combine.join(means, known)
  for _, name in ipairs(tree.names(known)) do
    local rule, parts, numbers, missing = known[name], {}, false, false
    for _, part in ipairs(rule.names) do
      local key = name .. (rule.joined and JOINED or AVERAGED) .. part
      local mean = means[key]
      means[key] = nil
      if mean == nil then
        missing = true
      elseif rule.joined then
        numbers = numbers or mean.numbers or false
        parts[part] = pl.cat(mean, 0)
      else
        numbers = numbers or not pl.is_tensor(mean)
        parts[part] = pl.is_tensor(mean) and mean or pl.tensor(mean + 0.0)
      end
    end
    -- Batches of weight 0 alone have no means.
    if not missing then
      local value = finished(rule.finish, rule.one and parts[ONLY] or parts)
      means[name] = numbers and value:item() or value
    end
  end
  return means
end

return combine
