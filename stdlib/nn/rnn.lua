-- nn/rnn.lua: defines recurrent layers: RNN, LSTM and GRU with PyTorch's names, shapes and gate order.
--
-- One GEMM projects the inputs of all positions; a Lua loop then records one cell for each position, so every sequence length
-- needs its own plan. As in PyTorch, x is (T, B, in) unless `batch_first = true`.
-- LSTM: Hochreiter and Schmidhuber (1997), gates i f g o. GRU: Cho et al. (2014), gates r z n.

local pl = require "perilune"
local check = require "perilune.check"
local init = require "perilune.initializers"
local nn = require "perilune.nn.module"

-- A cell: (projected input (B, gates * hidden), state, recurrent weight, recurrent bias) -> new state. state.h is the output.
local cells = {}

function cells.RNN(self, x, s, w, b)
  local sum = x + pl.linear(s.h, w, b)
  return { h = self.nonlinearity == "relu" and sum:relu() or sum:tanh() }
end

function cells.LSTM(_, x, s, w, b)
  local i, f, g, o = (x + pl.linear(s.h, w, b)):chunk(4, -1)
  local c = f:sigmoid() * s.c + i:sigmoid() * g:tanh()
  return { h = o:sigmoid() * c:tanh(), c = c }
end

function cells.GRU(_, x, s, w, b)
  local xr, xz, xn = x:chunk(3, -1)
  local hr, hz, hn = pl.linear(s.h, w, b):chunk(3, -1)
  local z = (xz + hz):sigmoid()
  local n = (xn + (xr + hr):sigmoid() * hn):tanh()
  return { h = (1 - z) * n + z * s.h }
end

local num_gates = { RNN = 1, LSTM = 4, GRU = 3 }

---Runs one layer in one direction over x (T, B, in). Returns the outputs (T, B, hidden) and the last state.
---@param self perilune.Module
---@param x_TBI perilune.Tensor
---@param state table<string, perilune.Tensor>
---@param suffix string
---@param backwards boolean
---@return perilune.Tensor
---@return table<string, perilune.Tensor>
local function run_layer(self, x_TBI, state, suffix, backwards)
  local T = x_TBI:size(0)
  local projected = pl.linear(x_TBI, self["weight_ih" .. suffix], self["bias_ih" .. suffix])
  local w, b, cell = self["weight_hh" .. suffix], self["bias_hh" .. suffix], cells[self.kind]
  local outputs = {}
  for k = 1, T do
    local t = backwards and T - k or k - 1
    state = cell(self, projected:select(0, t), state, w, b)
    outputs[t + 1] = state.h
  end
  return pl.stack(outputs, 0), state
end

local function forward(self, x, h, c)
  local op = "nn." .. self.kind
  if x:dim() ~= 3 or x:size(2) ~= self.in_dim then
    pl.error(op, ("x has shape {%s}"):format(table.concat(x.shape, ", ")),
      ("it must be (%s, %d)"):format(self.batch_first and "B, T" or "T, B", self.in_dim))
  end
  if self.batch_first then x = x:transpose(0, 1) end
  local B, directions = x:size(1), self.bidirectional and 2 or 1
  local last_h, last_c = {}, {}
  for layer = 0, self.layers - 1 do
    local outputs = {}
    for direction = 1, directions do
      local at = layer * directions + direction - 1
      local state = { h = h and h:select(0, at) or pl.zeros({ B, self.hidden }) }
      if self.kind == "LSTM" then state.c = c and c:select(0, at) or pl.zeros({ B, self.hidden }) end
      local suffix = "_l" .. layer .. (direction == 2 and "_reverse" or "")
      outputs[direction], state = run_layer(self, x, state, suffix, direction == 2)
      last_h[at + 1], last_c[at + 1] = state.h, state.c
    end
    x = directions == 2 and pl.cat(outputs, -1) or outputs[1] --[[@as perilune.Tensor]]
    if self.training and self.dropout > 0 and layer < self.layers - 1 then x = pl.dropout(x, self.dropout) end
  end
  if self.batch_first then x = x:transpose(0, 1) end
  if self.kind == "LSTM" then return x, pl.stack(last_h, 0), pl.stack(last_c, 0) end
  return x, pl.stack(last_h, 0)
end

---@class perilune.RNNOptions
---@field layers integer? stacked on each other
---@field bias boolean? whether biases are added
---@field batch_first boolean? whether x is (B, T, in) instead of (T, B, in)
---@field bidirectional boolean? whether each layer reads in both directions
---@field dropout number? between layers, in training
---@field nonlinearity "tanh"|"relu"? of nn.RNN

local function recurrent(kind, in_dim, hidden, opts)
  local op = "nn." .. kind
  check.whole(op, "in_dim", in_dim)
  check.whole(op, "hidden", hidden)
  local defaults = { layers = 1, bias = true, batch_first = false, bidirectional = false, dropout = 0.0 }
  if kind == "RNN" then defaults.nonlinearity = "tanh" end
  local o = check.options(op, opts, defaults)
  check.whole(op, "layers", o.layers)
  if kind == "RNN" then check.word(op, "nonlinearity", o.nonlinearity, { "tanh", "relu" }) end
  local self = {
    kind = kind, info = ("%d -> %d, %d layers%s"):format(in_dim, hidden, o.layers, o.bidirectional and ", both ways" or ""), forward = forward,
    in_dim = in_dim, hidden = hidden, layers = o.layers, batch_first = o.batch_first, bidirectional = o.bidirectional,
    dropout = check.between(op, "dropout", o.dropout, 0, 1), nonlinearity = o.nonlinearity,
  }
  local rows, bound = num_gates[kind] * hidden, 1 / math.sqrt(hidden)
  local function weight(shape) return pl.state(init.uniform(shape, { a = -bound, b = bound })) end
  for layer = 0, o.layers - 1 do
    for direction = 1, o.bidirectional and 2 or 1 do
      local suffix = "_l" .. layer .. (direction == 2 and "_reverse" or "")
      local inputs = layer == 0 and in_dim or hidden * (o.bidirectional and 2 or 1)
      self["weight_ih" .. suffix] = weight { rows, inputs }
      self["weight_hh" .. suffix] = weight { rows, hidden }
      if o.bias then
        self["bias_ih" .. suffix] = weight { rows }
        self["bias_hh" .. suffix] = weight { rows }
      end
    end
  end
  return nn.module(self)
end

---Makes an Elman RNN: rnn(x, h0?) -> outputs (T, B, hidden * directions), last h (layers * directions, B, hidden).
---@param in_dim integer
---@param hidden integer
---@param opts perilune.RNNOptions?
---@return perilune.Module
local function RNN(in_dim, hidden, opts) return recurrent("RNN", in_dim, hidden, opts) end

---Makes an LSTM: lstm(x, h0?, c0?) -> outputs, last h, last c; shapes as in nn.RNN.
---@param in_dim integer
---@param hidden integer
---@param opts perilune.RNNOptions?
---@return perilune.Module
local function LSTM(in_dim, hidden, opts) return recurrent("LSTM", in_dim, hidden, opts) end

---Makes a GRU: gru(x, h0?) -> outputs, last h; shapes as in nn.RNN.
---@param in_dim integer
---@param hidden integer
---@param opts perilune.RNNOptions?
---@return perilune.Module
local function GRU(in_dim, hidden, opts) return recurrent("GRU", in_dim, hidden, opts) end

return { RNN = RNN, LSTM = LSTM, GRU = GRU }
