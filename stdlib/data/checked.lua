-- data/checked.lua: reads rows and token ids of tensors in pieces of one size, for checks of data before the first step.
--
-- Pieces of one size have one plan. They are evaluated outside of a step, and change neither States nor random numbers of a run.

local pl = require "perilune"
local tree = require "perilune.tree"

---@class perilune.CheckedCorpus the part of a corpus behind a loader
---@field tokens perilune.NativeTokens? ids that the host holds
---@field copy (fun(first: integer): perilune.Tensor)? of ids on the device: the `piece` tokens from a token of the part on
---@field piece integer? tokens of a copy
---@field low integer first token of the part in the corpus
---@field high integer end of the part, exclusive
---@field vocabulary integer? ids are below it, where that is known
---@field vocab any? of a text of characters: what decodes ids

---@class perilune.CheckedRows the rows of tensors behind a loader
---@field n integer rows of the view
---@field index integer[]? the rows of the view, as rows of the source; all when absent
---@field names string[] the columns
---@field numbers integer numbers in a row of all columns
---@field read fun(rows: integer[]): perilune.Tensor[] copies rows of the source: a tensor of each column

-- Tokens of a copy: 512 KiB of i64.
local PIECE <const> = 1 << 16

---Evaluates the tensors that a function returns.
---@param fn fun(): perilune.Tensor[]
---@return perilune.Tensor[]
local function evaluated(fn)
  return pl.switches({ report_misses = false }, pl.no_grad, function()
    local list = fn()
    pl.eval(table.unpack(list))
    return list
  end)
end

---Describes a part of a corpus.
---@param text perilune.Corpus
---@param low integer
---@param high integer
---@param vocabulary integer?
---@param vocab any?
---@return perilune.CheckedCorpus
local function corpus(text, low, high, vocabulary, vocab)
  local out = { tokens = text.native, low = low, high = high, vocabulary = vocabulary or vocab and vocab:size(), vocab = vocab }
  if not text.native then
    out.piece = math.min(PIECE, high - low)
    local reader = text.reader(low, high, out.piece)
    function out.copy(first)
      return evaluated(function() return { reader.batch({ first }, first) } end)[1] --[[@as perilune.Tensor]]
    end
  end
  return out
end

---Describes the rows of a set in memory, before its maps.
---@param set perilune.Set
---@param reader perilune.BatchReader
---@return perilune.CheckedRows?
local function rows(set, reader)
  if not set.columns then return nil end
  local names, numbers = tree.names(set.columns), 0
  for _, name in ipairs(names) do
    local t = set.columns[name] --[[@as perilune.Tensor]]
    numbers = numbers + t:numel() // math.max(t:size(0), 1)
  end
  local function read(list)
    return evaluated(function()
      local batch, out = reader.batch(list, 0), {}
      for i, name in ipairs(names) do out[i] = batch[name] end
      return out
    end)
  end
  return { n = set.n, index = set.index, names = names, numbers = numbers, read = read }
end

return { corpus = corpus, rows = rows }
