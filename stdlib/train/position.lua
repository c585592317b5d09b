-- train/position.lua: computes which samples of the training data each step takes.
--
-- A step takes `accumulate` batches of the loader's stream of samples, from where the step before it ended. An edit of the batch size
-- or of `accumulate` begins a segment: its first step, and the first sample that no step before it has taken. So an edit neither
-- repeats nor skips a sample, and the samples of every step are a function of the list of segments, which checkpoints store.
--
-- A recipe's own loader, which has batch_at(k) and no stream, gets the number of the micro-batch in the run.

---@type string, table the name of this module, and what only the library may call
local _, native = ...
local check = require "perilune.check"

---@class perilune.train.Segment
---@field step integer steps done when it begins
---@field sample integer the first sample of the stream that it takes
---@field size integer samples in a batch
---@field accumulate integer batches in a step

local position = {}

---Whether the batches of a loader can be counted from any sample.
local function has_stream(loader)
  return type(loader.span) == "function" and math.type(loader.size) == "integer"
end

---The segment that contains the step after `count` others.
---@param run perilune.Run
---@param count integer
---@return perilune.train.Segment
local function segment_at(run, count)
  local list = run.segments
  for i = #list, 2, -1 do
    if list[i].step <= count then return list[i] end
  end
  return list[1] --[[@as perilune.train.Segment]]
end

---Begins the first segment of a run.
---@param run perilune.Run
function position.start(run)
  run.segments = { { step = 0, sample = 0, size = run.data.train.size, accumulate = run.accumulate } }
end

---Returns the first sample of the stream that the step after `count` others takes.
---@param run perilune.Run
---@param count integer
---@return integer
function position.sample(run, count)
  local s = segment_at(run, count)
  return (run.data.train:span((count - s.step) * s.accumulate, s.sample, s.size))
end

local batch_meta = { __index = function(batch, key) native.missed(batch, key) end }

---Lets an error about a field that a batch does not have list those that it has. The field stays nil: recipes ask for optional ones.
---@param batch table
---@param samples integer
---@return table batch
---@return integer samples
function position.named(batch, samples)
  if type(batch) == "table" and getmetatable(batch) == nil then setmetatable(batch, batch_meta) end
  return batch, samples
end

---Makes micro-batch `i`, counted from 0, of the step at the run's position.
---@param run perilune.Run
---@param i integer
---@return table batch
---@return integer samples
function position.batch(run, i)
  local train = run.data.train
  if not has_stream(train) then return position.named(train:batch_at(run.count * run.accumulate + i)) end
  local s = segment_at(run, run.count)
  return position.named(train:batch_at((run.count - s.step) * run.accumulate + i, s.sample))
end

---Says which samples micro-batch `i`, counted from 0, of the step after `count` others has, for the sample log.
---@param run perilune.Run
---@param count integer
---@param i integer
---@param samples integer
---@return table origins { set =, first =, count = } of records, or { what =, ids = }
function position.origins(run, count, i, samples)
  local train = run.data.train
  local s = segment_at(run, count)
  local k, from, size = (count - s.step) * s.accumulate + i, s.sample, s.size ---@type integer, integer?, integer?
  if not has_stream(train) then
    k, from, size = count * run.accumulate + i, nil, nil
  elseif train.records then
    local first, n = train:span(k, from, size)
    return { set = train.records, first = first, count = n }
  end
  if type(train.ids_at) == "function" then
    local what, ids = train:ids_at(k, from, size)
    if what and ids then return { what = what, ids = ids } end
  end
  -- A loader that does not number its samples: their places in the stream.
  local ids = {}
  for j = 1, samples do ids[j] = k * samples + j - 1 end
  return { what = "samples", ids = ids }
end

---Lists the samples of the step after `count` others, by their numbers in the source.
---@param run perilune.Run
---@param count integer
---@return string? what unit of the numbers; nil if the loader does not number its samples
---@return integer[]? ids
function position.samples(run, count)
  local train, all, what = run.data.train, {}, nil
  if type(train.ids_at) ~= "function" then return nil end
  local s, streams = segment_at(run, count), has_stream(train)
  local accumulate = streams and s.accumulate or run.accumulate
  for i = 0, accumulate - 1 do
    local name, ids
    if streams then
      name, ids = train:ids_at((count - s.step) * accumulate + i, s.sample, s.size)
    else
      name, ids = train:ids_at(count * accumulate + i)
    end
    if not name or not ids then return nil end
    what = name
    table.move(ids, 1, #ids, #all + 1, all)
  end
  return what, all
end

---Adds the run's position in the data to its cursor: the next sample, its epoch and its number there, and the segments as text,
---four numbers each.
---@param run perilune.Run
---@param cursor table
function position.save(run, cursor)
  local train = run.data.train
  if not has_stream(train) then return end
  local s, words = segment_at(run, run.count), {}
  local sample = train:span((run.count - s.step) * s.accumulate, s.sample)
  cursor.sample, cursor.epoch, cursor.index = sample, sample // train.n, sample % train.n
  for _, segment in ipairs(run.segments) do
    if segment.step <= run.count then
      words[#words + 1] = ("%d %d %d %d"):format(segment.step, segment.sample, segment.size, segment.accumulate)
    end
  end
  cursor.segments = table.concat(words, "; ")
end

---Takes the position of a cursor; a changed batch size or `accumulate` begins a segment at its next sample.
---@param run perilune.Run
---@param cursor table
function position.load(run, cursor)
  position.start(run)
  -- A checkpoint of a version that stored none, or of another kind of loader.
  if cursor.segments == nil or not has_stream(run.data.train) then return end
  local op, list = "run:seek", {}
  for text in tostring(cursor.segments):gmatch "[^;]+" do
    local step, sample, size, accumulate = text:match "^%s*(%d+) (%d+) (%d+) (%d+)$"
    list[#list + 1] = {
      step = check.whole(op, "the step of a segment", math.tointeger(step), 0),
      sample = check.whole(op, "the sample of a segment", math.tointeger(sample), 0),
      size = check.whole(op, "the batch size of a segment", math.tointeger(size)),
      accumulate = check.whole(op, "the batches of a segment", math.tointeger(accumulate)),
    }
  end
  local last = list[#list] ---@type perilune.train.Segment?
  local first = run.segments[1] --[[@as perilune.train.Segment]]
  if not last then return end
  run.segments = list
  if last.size ~= first.size or last.accumulate ~= first.accumulate then
    local sample = check.whole(op, "sample", cursor.sample, 0)
    -- An edit right after another one replaces its segment, of which no step was taken.
    if last.step == run.count then list[#list] = nil end
    list[#list + 1] = { step = run.count, sample = sample, size = first.size, accumulate = first.accumulate }
  end
end

return position
