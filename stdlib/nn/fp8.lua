-- nn/fp8.lua: computes the matrix products of a Linear in fp8, with delayed scaling.
--
-- Micikevicius et al., FP8 Formats for Deep Learning (2022). The formats are those of NVIDIA's Transformer Engine: x and w in
-- E4M3, the gradient of y in E5M2. The scale of a tensor derives from its largest magnitudes in previous uses, so quantization
-- needs no extra pass over the tensor. The State `amax` (3, history) of the layer stores them, newest first, in rows for x, w and
-- the gradient. Each use in training (`training`, outside pl.no_grad) shifts a row; evaluation only reads. In the step that made
-- the layer, scales are computed from the tensors themselves; afterwards an empty row means scale 1.
--
-- Accumulation, the bias and its gradient, results and the stored weights stay in 16 or 32 bits.

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local check = require "perilune.check"
local tree = require "perilune.tree"
local is_module = require("perilune.nn.module").is_module

---Alignment of matrix sizes for fp8 tensor cores.
local MULTIPLE = 16

---@type table<string, integer>
local rows = { x = 0, w = 1, grad = 2 }
local formats = { x = "e4m3", w = "e4m3", grad = "e5m2" }
local largest = { e4m3 = 448, e5m2 = 57344 }

---Computes max |x|, or 0 if that is not finite, so that one bad batch does not corrupt the scales of the next ones.
local function amax(x)
  local m = x:abs()
  if m:dim() > 1 then m = m:amax(-1) end -- by rows first, which fuses with the producer of x
  m = m:amax():to("f32")
  return pl.where(m:isfinite(), m, 0)
end

---Computes the quantization scale of x, in the role `name` (x, w, grad) of `layer`.
local function scale_of(layer, name, x)
  local top = layer.amax:select(0, rows[name]):amax()
  if native.mode().step <= layer.born then top = pl.where(top:gt(0), top, amax(x)) end
  return pl.where(top:gt(0), top * (2.0 ^ layer.fp8.margin / largest[formats[name]]), 1)
end

---@type table<integer, { shift: perilune.Tensor, first: perilune.Tensor, row: table<string, perilune.Tensor> }>
local masks = {}

---Returns the masks that shift a history of that length. They are evaluated once and shared: masks recorded in every layer are
---distinct nodes, which made thousands of lines of CUDA text and seconds of compilation.
local function masks_of(history)
  if not masks[history] then
    local column, row = pl.arange(history), pl.arange(3):unsqueeze(1)
    masks[history] = {
      shift = pl.eval(column:eq(column:unsqueeze(1) - 1)),
      first = pl.eval(column:eq(0)),
      row = { x = pl.eval(row:eq(rows.x)), w = pl.eval(row:eq(rows.w)), grad = pl.eval(row:eq(rows.grad)) },
    }
  end
  return masks[history]
end

---Shifts rows of `layer.amax`: inserts `found[name]` in front and drops the oldest value.
local function remember(layer, found)
  local old = layer.amax
  local new, mask = old, masks_of(old:size(1))
  -- The old values one column further, 0 in front.
  local moved = pl.where(mask.shift, old:unsqueeze(1), 0):amax(-1)
  for _, name in ipairs(tree.names(found)) do
    local this = pl.where(mask.first, found[name], moved)
    new = pl.where(mask.row[name], this, new)
  end
  old:assign(new)
end

---Quantizes x to fp8 with its scale.
local function bytes(layer, name, x)
  local scale = scale_of(layer, name, x)
  return { q = pl.quantize_fp8(x, scale, { format = formats[name] }), scale = scale }
end

local product = pl.custom {
  name = "nn.Linear in fp8",
  forward = function(x, w, bias, call)
    local layer = call.layer
    call.x, call.w = bytes(layer, "x", x), bytes(layer, "w", w)
    if call.learns then remember(layer, { x = amax(x), w = amax(w) }) end
    return pl.matmul_fp8(call.x.q, call.w.q, call.x.scale, call.w.scale, bias, { dtype = call.dtype, fast = true })
  end,
  backward = function(grad, _, w, bias, call)
    if native.mode().grad then
      pl.error("nn.Linear", "fp8 has no second derivatives", "make the layer without fp8 to use create_graph")
    end
    local g, x = bytes(call.layer, "grad", grad), call.x
    if call.learns then remember(call.layer, { grad = amax(grad) }) end
    local dx = pl.matmul_fp8(g.q, call.w.q:t(), g.scale, call.w.scale, nil, { format_a = "e5m2", dtype = grad.dtype })
    local dw = pl.matmul_fp8(g.q:t(), x.q:t(), g.scale, x.scale, nil, { format_a = "e5m2", dtype = w.dtype })
    if bias then return dx, dw, grad:sum(0) end
    return dx, dw
  end,
}

---Computes y = x W^T + b in fp8. The result has the dtype of autocast, or else that of x.
---@param self any
---@param x perilune.Tensor
---@return perilune.Tensor
local function linear(self, x)
  local mode = native.mode()
  local shape, dtype = x.shape, mode.autocast or x.dtype
  if shape[#shape] ~= self.in_dim then
    pl.error("nn.Linear", ("x has shape {%s}"):format(table.concat(shape, ", ")), ("its last dim must be %d"):format(self.in_dim))
  end
  if dtype ~= "f32" and dtype ~= "bf16" and dtype ~= "f16" then
    pl.error("nn.Linear", ("x is %s"):format(dtype), "with fp8 it must be f32, bf16 or f16")
  end
  local call = { layer = self, dtype = dtype, learns = self.training and mode.grad }
  local y = product(x:reshape(-1, self.in_dim), self.weight, self.bias, call)
  shape[#shape] = self.out_dim
  return y:reshape(shape)
end

local function fits(layer)
  return layer.in_dim % MULTIPLE == 0 and layer.out_dim % MULTIPLE == 0
end

---Switches a Linear to fp8 and adds its State `amax`. `given` is true or the options.
---@param layer any
---@param given boolean|{history?: integer, margin?: integer}
local function enable(layer, given)
  local op = "nn.Linear"
  if not fits(layer) then
    pl.error(op, ("fp8 needs sizes that are multiples of %d, not %d -> %d"):format(MULTIPLE, layer.in_dim, layer.out_dim),
      "omit fp8 for this layer, or make it wider")
  end
  local o = check.options(op .. " fp8", given ~= true and given --[[@as table]] or nil, { history = 16, margin = 0 })
  check.whole(op .. " fp8", "history", o.history)
  check.whole(op .. " fp8", "margin", o.margin, 0)
  layer.fp8 = { history = o.history, margin = o.margin }
  layer.born = native.mode().step
  masks_of(o.history)   -- before a step, which reading them would split
  layer.amax = pl.state(pl.zeros { 3, o.history }, { trainable = false })
  layer.info = layer.info .. ", fp8"
end

---Switches every Linear of `model` to fp8 whose sizes are multiples of 16, except those made with `fp8 = false`.
---Returns the number of layers in fp8, those switched before included.
---@param model perilune.Module
---@param opts {history?: integer, margin?: integer}? history: uses that the largest magnitude is over; margin: powers of two of room above it
---@return integer
local function use_fp8(model, opts)
  local op = "nn.use_fp8"
  if not is_module(model) then pl.error(op, "the model is " .. check.show(model), "give a module") end
  local count = 0
  tree.walk(model, function(_, value)
    if is_module(value) and value.kind == "Linear" and value.fp8 ~= false and (value.fp8 or fits(value)) then
      if not value.fp8 then enable(value, opts or true) end
      count = count + 1
    end
  end)
  if count == 0 then
    pl.error(op, ("the model has no nn.Linear whose sizes are multiples of %d"):format(MULTIPLE),
      "fp8 is for products of nn.Linear; use bf16 for this model")
  end
  return count
end

---Collects the `amax` States of a model: they are not weights, and files of other programs do not contain them.
---@return table<perilune.State, boolean>
local function histories(model)
  local out = {}
  tree.walk(model, function(_, value)
    if is_module(value) and value.fp8 and value.amax then out[value.amax] = true end
  end)
  return out
end

return { linear = linear, enable = enable, use_fp8 = use_fp8, histories = histories }
