-- data/sources.lua: opens files of records, and makes datasets of lists and mixtures. data/records.lua has the stages that follow.

local pl = require "perilune"
local check = require "perilune.check"
local tree = require "perilune.tree"
local native = require "perilune.data.native"
local address = require "perilune.data.address"
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
---@param hash perilune.Hash?
---@return string[]
local function files(op, paths, hash)
  if type(paths) == "string" then paths = { paths } end
  if type(paths) ~= "table" or #paths == 0 then
    pl.error(op, "the paths are " .. check.show(paths), "name a file, a pattern like \"train-*.jsonl\", or a list of them")
  end
  return address.with_hashes(op, paths, hash)
end

---Opens files with a JSON object on each line. They are read where a batch needs them: memory grows with 8 bytes a line.
---A line that is no object is an error with its place, or is left out and counted.
---  local chats = data.jsonl("data/train-*.jsonl")
---@param paths string|string[] relative to the recipe's folder, or absolute; the last part may be a pattern, whose files are sorted by name; or addresses
---@param opts {on_error: ("raise"|"skip")?, hash: perilune.Hash?}? "skip" leaves out malformed lines and prints how many; hash: of the content of addresses
---@return perilune.Records
local function jsonl(paths, opts)
  local op = "data.jsonl"
  local o = check.options(op, opts, { on_error = "raise" }, { hash = "string|table" })
  check.word(op, "on_error", o.on_error, { "raise", "skip" })
  local made, skipped = native.record_lines(files(op, paths, o.hash), "json", o.on_error == "skip")
  if skipped and skipped > 0 then print(("data.jsonl: %d of %d lines are no JSON objects and are left out"):format(skipped, skipped + made:size())) end
  return new(made)
end

---Opens text files as records { text } of their lines; blank lines are none.
---@param paths string|string[] as of data.jsonl
---@param opts {hash: perilune.Hash?}?
---@return perilune.Records
local function lines(paths, opts)
  local o = check.options("data.lines", opts, {}, { hash = "string|table" })
  return new((native.record_lines(files("data.lines", paths, o.hash), "text", false)))
end

---Mixes datasets by weights: each has its share of any 1,024 records of the stream, in random order. A shuffle of the mixture shuffles them.
---@param sets table<string, perilune.Records>
---@param weights table<string, number>
---@param opts {seed: integer?}?
---@return perilune.Records
local function mix(sets, weights, opts)
  local op = "data.mix"
  local o = check.options(op, opts, { seed = 0 })
  check.whole(op, "seed", o.seed, 0)
  if type(sets) ~= "table" or next(sets) == nil then pl.error(op, "the datasets are " .. check.show(sets), "name them: data.mix({ web = web, sft = sft }, { web = 1, sft = 0.2 })") end
  if type(weights) == "function" then
    pl.error(op, "weights that are a function of the step are not supported yet", "give numbers: { web = 1, sft = 0.2 }")
  end
  local kinds = {}
  for name in pairs(sets) do kinds[name] = "number" end
  local found = check.options(op .. " weights", weights --[[@as table]], {}, kinds)
  check.required(op .. " weights", found, tree.names(sets))
  local parts, shuffled = {}, nil
  for _, name in ipairs(tree.names(sets)) do
    local set = of(op, sets[name])
    parts[#parts + 1] = { name = name, set = set.native, weight = found[name] }
    shuffled = shuffled or set
  end
  return new(native.mix(parts, o.seed), shuffled)
end

return { list = list, mix = mix, jsonl = jsonl, lines = lines }
