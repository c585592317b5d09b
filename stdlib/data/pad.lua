-- data/pad.lua: pads sequences to a few bucket lengths.
--
--   local x, lengths = data.pad({ { 5, 7, 2 }, { 9 } }, { from = 32, to = 1024 })     -- {2, 32} i64, {2} i64
--
-- Every shape needs its own plan. So lengths are rounded up to buckets: from * 1, 1.5, 2, 3, 4, 6, 8 and so on, two per octave.
-- At most a third of a row is then padding. There are 11 buckets from 32 to 1024.

local pl = require "perilune"
local check = require "perilune.check"

---Rounds a length up to its bucket. Raises if `n` exceeds `to`.
---@param n integer
---@param opts {from?: integer, to?: integer}? from: shortest bucket, even; to: longest bucket
---@return integer
local function bucket(n, opts)
  local op = "data.bucket"
  local o = check.options(op, opts, { from = 32 }, { to = "number" })
  check.whole(op, "the length", n, 0)
  check.whole(op, "from", o.from)
  if o.from % 2 == 1 then pl.error(op, ("from is %d"):format(o.from), "it must be even: the next length is one and a half times as long") end
  if o.to then
    check.whole(op, "to", o.to)
    if o.to < o.from then pl.error(op, ("to is %d, below from = %d"):format(o.to, o.from)) end
    if n > o.to then pl.error(op, ("a sequence has %d elements, and the longest length is %d"):format(n, o.to), "truncate it, or increase `to`") end
  end
  local length = o.from
  while length < n do
    local half = length + length // 2
    length = n <= half and half or length * 2
  end
  return o.to and math.min(length, o.to) --[[@as integer]] or length
end

---Pads a batch of sequences to one tensor; L is the bucket of the longest.
---@param sequences integer[][]|number[][]
---@param opts {from?: integer, to?: integer, value?: number, dtype?: perilune.DType}? from: shortest bucket, even; to: longest bucket; value: of the padding; dtype: of the result, i64 by default
---@return perilune.Tensor padded (B, L)
---@return perilune.Tensor lengths (B) i64
local function pad(sequences, opts)
  local op = "data.pad"
  local o = check.options(op, opts, { from = 32, value = 0, dtype = "i64" }, { to = "number" })
  if type(sequences) ~= "table" or #sequences == 0 then
    pl.error(op, "the sequences are " .. check.show(sequences), "a list of lists of numbers: { { 5, 7 }, { 9 } }")
  end
  ---@cast sequences number[][]
  local longest, lengths = 0, {}
  for i, s in ipairs(sequences) do
    if type(s) ~= "table" then pl.error(op, ("sequence %d is %s"):format(i, check.show(s)), "it must be a list of numbers") end
    lengths[i] = #s
    longest = math.max(longest, #s)
  end
  local length = bucket(longest, { from = o.from, to = o.to })
  local rows = {}
  for i, s in ipairs(sequences) do
    local row = table.move(s, 1, #s, 1, {})
    for k = #s + 1, length do row[k] = o.value end
    rows[i] = row
  end
  return pl.tensor(rows, { dtype = o.dtype }), pl.tensor(lengths, { dtype = "i64" })
end

return { bucket = bucket, pad = pad }
