-- data/corpus.lua: stores token ids for windows of a language model: in files, in host memory, or on the device.
--
-- A corpus in files or in host memory is read by threads that gather and prefetch the windows of a batch; only the batch goes to the
-- device. A corpus that is a tensor stays where the tensor is, and the device gathers its windows.

local pl = require "perilune"
local native = require "perilune.data.native"

---@class perilune.Corpus
---@field size integer number of tokens
---@field native perilune.NativeTokens? ids that the host holds; none on the device
---@field ids fun(first: integer, count: integer): perilune.Tensor (count), i32 or i64
---@field reader fun(low: integer, high: integer, span: integer): perilune.CorpusReader reads windows of `span` tokens of the part [low, high)

---@class perilune.CorpusReader
---@field batch fun(starts: integer[], first: integer): perilune.Tensor (#starts, span) i64; starts count from the part's first token
---@field prefetch (fun(starts: integer[], first: integer))? starts to make a batch

---Makes a corpus of ids that the host holds.
---@param tokens perilune.NativeTokens
---@return perilune.Corpus
local function host(tokens)
  local function reader(low, high, span)
    local inner = tokens:reader(low, high, span)
    return {
      batch = function(starts, first) return inner:batch(starts, first):to("i64") end,
      prefetch = function(starts, first) inner:prefetch(starts, first) end,
    }
  end
  return { size = tokens:size(), native = tokens, ids = function(first, count) return tokens:ids(first, count) end, reader = reader }
end

---Makes a corpus of a tensor of ids (N), i32 or i64.
---@param ids perilune.Tensor
---@return perilune.Corpus
local function device(ids)
  local function reader(low, _, span)
    return {
      batch = function(starts)
        local at = (pl.tensor(starts, { dtype = "i64" }) + low):unsqueeze(1) + pl.arange(span)
        local windows = ids:index_select(0, at:flatten()):view(#starts, span)
        return windows.dtype == "i64" and windows or windows:to("i64")
      end,
    }
  end
  return { size = ids:size(0), ids = function(first, count) return ids:narrow(0, first, count) end, reader = reader }
end

---Opens files of token ids, in this order; a path may be a pattern.
---@param paths string[]
---@return perilune.Corpus
local function files(paths)
  return host(native.token_files(paths))
end

return { host = host, device = device, files = files }
