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

-- The most records of data.generate: numbers of all epochs of a run stay far from overflow.
local MOST <const> = 1 << 48

---Makes a source of `n` records by a function of their numbers, from 0. Nothing is stored: the function runs in parallel workers where a batch
---needs the record, as that of records:map, and must depend on the number alone. Its `math.random` is a function of the seed and the number.
---Each epoch has the same records. `records:origins` names the line of the function and the number.
---  local pairs = data.generate(1000, function(i) return { x = { math.random(), math.random() }, y = i % 2 } end, { seed = 1 })
---@param n integer
---@param fn fun(number: integer): perilune.Record
---@param opts {seed: integer?}? seed: that of math.random
---@return perilune.Records
local function generate(n, fn, opts)
  local op = "data.generate"
  local o = check.options(op, opts, { seed = 0 })
  check.whole(op, "seed", o.seed, 0)
  if type(fn) ~= "function" then pl.error(op, "the function is " .. check.show(fn), "give function(i) return { x = ... } end") end
  check.between(op, "n", check.whole(op, "n", n), 1, MOST)
  return new(native.generate(n, fn, o.seed))
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

---Opens files some of whose records may be left out, and prints how many are.
---@param op string
---@param paths string[]
---@param options table
---@param what string the kind of a record that is left out
---@return perilune.Records
local function opened(op, paths, options, what)
  local made, skipped = native.record_file(op, paths, options)
  if skipped and skipped > 0 then print(("%s: %d of %d %s and are left out"):format(op, skipped, skipped + made:size(), what)) end
  return new(made)
end

---Opens files with a JSON object on each line. They are read where a batch needs them: memory grows with 8 bytes a line.
---A line that is no object is an error with its place, or is left out and counted.
---Files may be compressed (gzip, zstd): their text is written to the program's cache folder once.
---  local chats = data.jsonl("data/train-*.jsonl")
---@param paths string|string[] relative to the recipe's folder, or absolute; the last part may be a pattern, whose files are sorted by name; or addresses
---@param opts {on_error: ("raise"|"skip")?, hash: perilune.Hash?}? on_error: "skip" leaves out malformed lines and prints how many; hash: of the content of addresses
---@return perilune.Records
local function jsonl(paths, opts)
  local op = "data.jsonl"
  local o = check.options(op, opts, { on_error = "raise" }, { hash = "string|table" })
  check.word(op, "on_error", o.on_error, { "raise", "skip" })
  return opened(op, files(op, paths, o.hash), { skip = o.on_error == "skip" }, "lines are no JSON objects")
end

---Opens text files as records { text } of their lines; blank lines are none.
---@param paths string|string[] as of data.jsonl
---@param opts {hash: perilune.Hash?}? hash: of the content of addresses
---@return perilune.Records
local function lines(paths, opts)
  local op = "data.lines"
  local o = check.options(op, opts, {}, { hash = "string|table" })
  return new((native.record_file(op, files(op, paths, o.hash), {})))
end

---The name of a file in lower case.
---@param path any
---@return string
local function name_of(path)
  return address.name(tostring(path)):lower()
end

---Checks a list of names, such as { "question", "answer" }.
---@param op string
---@param name string the option
---@param list any
local function names(op, name, list)
  if list == nil then return end
  local cure = ("name them: { %s = { \"text\" } }"):format(name)
  if #list == 0 then pl.error(op, ("option '%s' names nothing"):format(name), cure) end
  for _, one in ipairs(list) do
    if type(one) ~= "string" then pl.error(op, ("option '%s' has %s; it lists names"):format(name, check.show(one)), cure) end
  end
end

---Opens files of columns.
---@param op string
---@param paths any
---@param opts table?
local function columnar(op, paths, opts)
  local o = check.options(op, opts, {}, { columns = "table", hash = "string|table" })
  names(op, "columns", o.columns)
  return new((native.record_file(op, files(op, paths, o.hash), o)))
end

---Opens Parquet files, as Hugging Face datasets and pyarrow write them. Only the columns that are used are decoded, a row group at a time.
---Dates, times and timestamps are ISO 8601 text, decimals the nearest float, durations integers in the unit of the file.
---  local web = data.parquet("data/train-*.parquet", { columns = { "text" } })
---@param paths string|string[] as of data.jsonl
---@param opts {columns: string[]?, hash: perilune.Hash?}? columns: the fields of a record, all columns of the first file without it; hash: of the content of addresses
---@return perilune.Records
local function parquet(paths, opts)
  return columnar("data.parquet", paths, opts)
end

---Opens Arrow IPC files and streams, such as the cache files of Hugging Face datasets. A record batch is read at a time. Values are those of
---data.parquet.
---@param paths string|string[] as of data.jsonl
---@param opts {columns: string[]?, hash: perilune.Hash?}? columns: the fields of a record, all columns of the first file without it; hash: of the content of addresses
---@return perilune.Records
local function arrow(paths, opts)
  return columnar("data.arrow", paths, opts)
end

---Opens CSV and TSV files with a header as records; data.csv makes tensors of them. Cells in quotes may have delimiters and newlines.
---A column has integers if all cells of all files are, numbers if all are, else strings; numbers are written as in JSON, so "007" is a string.
---An empty cell is nil among numbers and "" among strings.
---  local reviews = data.table("data/reviews.csv", { columns = { "text", "stars" } })
---@param paths string|string[] as of data.jsonl
---@param opts {delimiter: string?, columns: string[]?, types: table<string, "integer"|"number"|"string">?, on_error: ("raise"|"skip")?, hash: perilune.Hash?}? delimiter: one character, by default a tab for .tsv and a comma otherwise; columns: the fields of a record, all by default; types: those of columns that are not found by their cells; on_error: "skip" leaves out rows with another number of cells, no UTF-8 text or a cell of another type than given, and prints how many; hash: of the content of addresses
---@return perilune.Records
local function table_(paths, opts)
  local op = "data.table"
  local o = check.options(op, opts, { types = {}, on_error = "raise" }, { delimiter = "string", columns = "table", hash = "string|table" })
  names(op, "columns", o.columns)
  check.word(op, "on_error", o.on_error, { "raise", "skip" })
  local list = files(op, paths, o.hash)
  local first = name_of(list[1])
  local tabs = first:match "%.tsv$" or first:match "%.tsv%.%a+$"
  o.delimiter = o.delimiter or (tabs and "\t" or ",")
  if #o.delimiter ~= 1 or o.delimiter:find "[\"\r\n\128-\255]" then
    pl.error(op, ("option 'delimiter' is %s"):format(check.show(o.delimiter)), "it is one ASCII character: \",\", \";\", \"\\t\", \"|\"")
  end
  for name, kind in pairs(o.types) do
    if type(name) ~= "string" then pl.error(op, "option 'types' is a list", "name the columns: { types = { zip = \"string\" } }") end
    check.word(op, "types." .. name, kind, { "integer", "number", "string" })
  end
  o.skip = o.on_error == "skip"
  return opened(op, list, o, "rows are malformed")
end

---Opens JSON files that are one array of objects, or an object with such an array in a field.
---  local tasks = data.json("data/tasks.json", { field = "train" })
---@param paths string|string[] as of data.jsonl
---@param opts {field: string?, on_error: ("raise"|"skip")?, hash: perilune.Hash?}? field: that which has the array; on_error: "skip" leaves out elements that are no objects, or malformed inside, and prints how many; hash: of the content of addresses
---@return perilune.Records
local function json(paths, opts)
  local op = "data.json"
  local o = check.options(op, opts, { on_error = "raise" }, { field = "string", hash = "string|table" })
  check.word(op, "on_error", o.on_error, { "raise", "skip" })
  o.skip = o.on_error == "skip"
  return opened(op, files(op, paths, o.hash), o, "records are malformed")
end

-- The reader of each ending of files of records.
local endings = { jsonl = jsonl, ndjson = jsonl, json = json, parquet = parquet, arrow = arrow, csv = table_, tsv = table_, txt = lines }

---The ending of a file's name, without that of its compression.
---@param path any
---@return string
local function ending_of(path)
  return name_of(path):gsub("%.gz$", ""):gsub("%.zst$", ""):match "%.(%w+)$" or ""
end

---Whether a file has records by the ending of its name, and is no text.
---@param path any
---@return boolean
local function has_records(path)
  local ending = ending_of(path)
  return endings[ending] ~= nil and ending ~= "txt"
end

---Opens files of records by the ending of their names: .jsonl, .ndjson, .json, .parquet, .arrow, .csv, .tsv or .txt. All but Parquet and Arrow
---files may be compressed: .jsonl.gz, .csv.zst.
---@param paths string|string[] as of data.jsonl; all with one ending
---@param opts table? the options of data.jsonl, data.json, data.parquet, data.arrow or data.table
---@return perilune.Records
local function by_ending(paths, opts)
  local op = "data.records"
  local known = "known are .jsonl, .ndjson, .json, .parquet, .arrow, .csv, .tsv and .txt, also with .gz or .zst behind; other files: data.jsonl(path), data.table(path)"
  ---@param path any
  local function reader_of(path)
    return endings[ending_of(path)] or pl.error(op, ("the ending of %s names no format"):format(check.show(path)), known)
  end
  local list = files(op, paths)
  local reader = reader_of(list[1])
  for _, path in ipairs(list) do
    if reader_of(path) ~= reader then pl.error(op, ("%s and %s have different formats"):format(check.show(list[1]), check.show(path)), "open each by itself and join them with :concat") end
  end
  return (reader --[[@as fun(paths: any, opts: table?): perilune.Records]])(paths, opts)
end

---@class perilune.LiveMixture
---@field weights fun(step: integer, metrics: table<string, number>): number[] one for each dataset, in their order
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
---@param opts {seed: integer?, every: integer?}? seed: of the order; every: steps between two calls of a function of weights
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
    if set.pseudo then pl.error(op, ("'%s' has pseudo-labels"):format(name), "mix the labelled records that data.pseudo gets") end
    parts[i] = { name = name, set = set.native, weight = first[i] }
    like = like or set
  end
  local mixed = new(native.mix(parts, o.seed, live ~= nil), like)
  mixed.live = live
  return mixed
end

return { list = list, generate = generate, mix = mix, jsonl = jsonl, lines = lines, parquet = parquet, arrow = arrow, table = table_, json = json, records = by_ending, files = files, has_records = has_records }
