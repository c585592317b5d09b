-- nn/embedding.lua: looks up rows of a weight matrix by id.

local pl = require "perilune"
local check = require "perilune.check"
local init = require "perilune.initializers"
local module = require("perilune.nn.module").module

local function forward(self, ids)
  return pl.embedding(self.weight, ids)
end

---Looks up ids (...) i64, counted from 0 -> (..., dim). The weight (num, dim) starts normal with `std` (1, as in PyTorch).
---@param num integer number of ids
---@param dim integer
---@param opts {std?: number}? std: of the initial values
---@return perilune.Module
local function Embedding(num, dim, opts)
  check.whole("nn.Embedding", "num", num)
  check.whole("nn.Embedding", "dim", dim)
  local o = check.options("nn.Embedding", opts, { std = 1.0 })
  return module {
    kind = "Embedding", info = ("%d, %d"):format(num, dim), forward = forward,
    num = num, dim = dim, weight = pl.state(init.normal({ num, dim }, { std = o.std })),
  }
end

return { Embedding = Embedding }
