-- data/arrays.lua: reads IDX arrays (MNIST and its successors) and WAV sounds as tensors.

local pl = require "perilune"
local check = require "perilune.check"
local address = require "perilune.data.address"
local native = require "perilune.data.native"
local set = require "perilune.data.set"

local arrays = {}

local function check_path(op, path)
  if type(path) ~= "string" then pl.error(op, "the path is " .. check.show(path)) end
end

---Returns the rate of a sound in samples a second.
---@param op string
---@param rate any
---@return integer
local function rate_of(op, rate)
  check.whole(op, "rate", rate)
  return check.between(op, "rate", rate, 1, 1000000) --[[@as integer]]
end

---Reads an IDX file, plain or gzip: u8 as it is, i8, i16 and i32 as i32, f32, f64.
---  local x = data.idx("train-images-idx3-ubyte.gz"):unsqueeze(1)   -- (60000, 1, 28, 28) u8
---`max_bytes` limits its plain bytes: 4 GiB by default, of a compressed file 100 times its size, or 32 MiB if that is more.
---@param path string relative to the recipe's folder, or absolute; or an address
---@param opts {max_bytes?: integer, hash?: perilune.Hash}? max_bytes: limit of its plain bytes; hash: of the content of an address
---@return perilune.Tensor
function arrays.idx(path, opts)
  local op = "data.idx"
  check_path(op, path)
  local o = check.options(op, opts, {}, { max_bytes = "number", hash = "string|table" })
  if o.max_bytes then check.whole(op, "max_bytes", o.max_bytes) end
  return native.idx(address.with_hash(op, path, o.hash), o.max_bytes)
end

---Reads a WAV file: its samples from -1 to 1, channels averaged. A file of another rate is an error: it is not resampled.
---@param path string relative to the recipe's folder, or absolute; or an address
---@param opts {rate: integer, hash?: perilune.Hash} rate: samples a second; hash: of the content of an address
---@return perilune.Tensor (N) f32
function arrays.wav(path, opts)
  local op = "data.wav"
  check_path(op, path)
  local o = check.options(op, opts, {}, { rate = "number", hash = "string|table" })
  check.required(op, o, { "rate" })
  return native.wav(address.with_hash(op, path, o.hash), rate_of(op, o.rate))
end

---Reads the WAV files of a folder that contains one folder for each class, FOLDER/CLASS/*.wav, into memory: x (N, rate * seconds) f32 and
---y (N) i64. A longer file is cut, a shorter one padded with zeros. Class ids are positions in the sorted names; `classes` fixes them.
---@param path string relative to the recipe's folder, or absolute
---@param opts {rate: integer, seconds: number, classes?: string[]} rate: samples a second; seconds: length to which sounds are cut or padded; classes: names in the order of their ids, as of a training set
---@return perilune.Set
function arrays.sounds(path, opts)
  local op = "data.sounds"
  check_path(op, path)
  local o = check.options(op, opts, {}, { rate = "number", seconds = "number", classes = "table" })
  check.required(op, o, { "rate", "seconds" })
  local rate = rate_of(op, o.rate)
  local samples = math.floor(check.between(op, "seconds", o.seconds, 0, 3600) * rate + 0.5)
  if samples < 1 then pl.error(op, ("seconds is %g"):format(o.seconds), ("it must give at least one sample at %d Hz"):format(rate)) end
  for i, name in ipairs(o.classes or {}) do
    if type(name) ~= "string" then pl.error(op, ("class %d is %s"):format(i, check.show(name)), "classes are names: { \"yes\", \"no\" }") end
  end
  local x, y, classes = native.sounds(path, o.classes, rate, samples)
  return set.named(set.tensors({ x = x, y = y }), classes)
end

return arrays
