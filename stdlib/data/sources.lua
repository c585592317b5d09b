-- data/sources.lua: opens files of records, and makes datasets of lists and mixtures. data/records.lua has the stages that follow.

local pl = require "perilune"
local check = require "perilune.check"
local tree = require "perilune.tree"
local native = require "perilune.data.native"
local records = require "perilune.data.records"

local new, of = records.new, records.of

---Makes a dataset of records in memory.
---@param list perilune.Record[]
---@return perilune.Records
local function list(list)
  if type(list) ~= "table" then pl.error("data.list", "it got " .. check.show(list), "give a list of tables: { { text = \"a\" }, { text = \"b\" } }") end
  return new(native.record_list(list))
end

---@param op string
---@param paths any
---@return string[]
local function files(op, paths)
  if type(paths) == "string" then paths = { paths } end
  if type(paths) ~= "table" or #paths == 0 then
    pl.error(op, "the paths are " .. check.show(paths), "name a file, a pattern like \"train-*.jsonl\", or a list of them")
  end
  return paths
end

---Opens files with a JSON object on each line. They are read where a batch needs them: memory grows with 8 bytes a line.
---A line that is no object is an error with its place, or is left out and counted.
---  local chats = data.jsonl("data/train-*.jsonl")
---@param paths string|string[] relative to the recipe's folder, or absolute; the last part may be a pattern, whose files are sorted by name
---@param opts {on_error: ("raise"|"skip")?}? "skip" leaves out malformed lines and prints how many
---@return perilune.Records
local function jsonl(paths, opts)
  local op = "data.jsonl"
  local o = check.options(op, opts, { on_error = "raise" })
  check.word(op, "on_error", o.on_error, { "raise", "skip" })
  local made, skipped = native.record_lines(files(op, paths), "json", o.on_error == "skip")
  if skipped and skipped > 0 then print(("data.jsonl: %d of %d lines are no JSON objects and are left out"):format(skipped, skipped + made:size())) end
  return new(made)
end

---Opens text files as records { text } of their lines; blank lines are none.
---@param paths string|string[] as of data.jsonl
---@return perilune.Records
local function lines(paths)
  return new((native.record_lines(files("data.lines", paths), "text", false)))
end

---@class perilune.LiveMixture
---@field weights fun(step: integer, metrics: table<string, number>): number[] in the order of the datasets
---@field every integer steps between two decisions

---Checks the weights of datasets, which are in the order of `names`.
---@param given any
---@param names string[]
---@return number[]
local function weights_of(given, names)
  local op, kinds, out = "data.mix weights", {}, {}
  for _, name in ipairs(names) do kinds[name] = "number" end
  local found = check.options(op, given, {}, kinds)
  check.required(op, found, names)
  for i, name in ipairs(names) do out[i] = found[name] end
  return out
end

---Mixes datasets by weights: each has its share of any 1,024 records of the stream, in random order. A shuffle of the mixture shuffles them.
---Weights may be a function of the step and of metrics, which a training run asks every `every` steps for the weights of the steps from
---`step` on, 16 steps ahead. `metrics` has the loss and the metrics of the last step and, as "valid/loss", those of the last evaluation that
---`eval_every` asked for; it is empty before the first one.
---  data.mix({ web = web, sft = sft }, function(step) return { web = 1, sft = step > 1000 and 1 or 0 } end)
---@param sets table<string, perilune.Records>
---@param weights table<string, number>|fun(step: integer, metrics: table<string, number>): table<string, number>
---@param opts {seed: integer?, every: integer?}? every: 16 by default
---@return perilune.Records
local function mix(sets, weights, opts)
  local op = "data.mix"
  local o = check.options(op, opts, { seed = 0 }, { every = "number" })
  check.whole(op, "seed", o.seed, 0)
  if type(sets) ~= "table" or next(sets) == nil then pl.error(op, "the datasets are " .. check.show(sets), "name them: data.mix({ web = web, sft = sft }, { web = 1, sft = 0.2 })") end
  local names, live = tree.names(sets), nil ---@type string[], perilune.LiveMixture?
  if type(weights) == "function" then
    local fn = weights
    live = { every = check.whole(op, "every", o.every or 16), weights = function(step, metrics) return weights_of(fn(step, metrics), names) end }
  elseif o.every then
    pl.error(op, "`every` is the number of steps after which a function is asked for weights, and they are numbers", "leave it out, or give function(step, metrics) ... end")
  end
  local first = live and live.weights(1, {}) or weights_of(weights, names)
  local parts, like = {}, nil
  for i, name in ipairs(names) do
    if name:find "[\n;]" then pl.error(op, ("the name %q of a dataset contains a line break or a semicolon"):format(name), "use letters and digits") end
    local set = of(op, sets[name])
    if set.live then pl.error(op, ("'%s' is a mixture whose weights are a function"):format(name), "mix all datasets at once, with one function") end
    parts[i] = { name = name, set = set.native, weight = first[i] }
    like = like or set
  end
  local mixed = new(native.mix(parts, o.seed, live ~= nil), like)
  mixed.live = live
  return mixed
end

return { list = list, mix = mix, jsonl = jsonl, lines = lines }
