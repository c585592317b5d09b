-- train/log.lua: logs values beside the metrics of a run: figures, texts, images and histograms.
--
--   function recipe.on_eval(run, event)
--     run:log { gap = event.loss - best, sample = run:generate "The moon", weights = train.histogram(run.model.head.weight) }
--   end
--
-- The driver of the run writes them: to metrics.jsonl, the folder media, TensorBoard, and the sinks.

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local check = require "perilune.check"
local tree = require "perilune.tree"

local log = {}

local MAX_TEXT = 1 << 20

---@class perilune.LoggedImage
---@field image perilune.Tensor u8 (H, W, C)

---@class perilune.LoggedHistogram
---@field values perilune.Tensor
---@field bins integer

local image_meta = { __name = "perilune.LoggedImage" }
local histogram_meta = { __name = "perilune.LoggedHistogram" }

---Marks a tensor as an image for run:log. Floats are clamped to [0, 1] and scaled; u8 values stay as they are.
---A batch is laid out as a grid, row by row.
---@param x perilune.Tensor (C, H, W), (H, W) for grey, or a batch (N, C, H, W); C is 1, 3 or 4
---@param opts {columns: integer?}? columns: of the grid of a batch; by default the root of its size, rounded up
---@return perilune.LoggedImage
function log.image(x, opts)
  local op = "train.image"
  if not pl.is_tensor(x) then pl.error(op, "the image is " .. check.show(x)) end
  local o = check.options(op, opts, {}, { columns = "number" })
  local shape = ("{%s}"):format(table.concat(x.shape, ", "))
  if x:dim() == 2 then x = x:unsqueeze(0) end
  if x:dim() == 3 then x = x:unsqueeze(0) end
  local C = x:dim() == 4 and x:size(1) or 0 --[[@as integer]]
  if not (C == 1 or C == 3 or C == 4) or x:numel() == 0 then
    pl.error(op, "the image has shape " .. shape, "it must be (H, W), (C, H, W) or (N, C, H, W) with 1, 3 or 4 channels")
  end
  if x.dtype ~= "u8" then x = (x:detach():to("f32"):clamp(0, 1) * 255):round():to("u8") end
  local N, H, W = x:size(0), x:size(2), x:size(3)
  local columns = o.columns and math.min(check.whole(op, "columns", o.columns), N) or math.ceil(math.sqrt(N))
  local rows = (N + columns - 1) // columns
  if rows * columns > N then x = pl.cat({ x, pl.zeros({ rows * columns - N, C, H, W }, { dtype = "u8" }) }, 0) end
  -- (rows, columns, C, H, W) to (rows, H, columns, W, C)
  local grid = x:reshape { rows, columns, C, H, W }:permute(0, 3, 1, 4, 2):reshape { rows * H, columns * W, C }
  return setmetatable({ image = grid }, image_meta)
end

---Marks a tensor as a histogram for run:log: its finite values are counted in bins of equal width.
---@param x perilune.Tensor of any shape
---@param opts {bins: integer?}? bins: how many, at most 4,096
---@return perilune.LoggedHistogram
function log.histogram(x, opts)
  local op = "train.histogram"
  if not pl.is_tensor(x) then pl.error(op, "the values are " .. check.show(x)) end
  local o = check.options(op, opts, { bins = 64 })
  local bins = check.whole(op, "bins", o.bins)
  if bins > 4096 then pl.error(op, ("bins is %d"):format(bins), "4096 is the most") end
  return setmetatable({ values = x:detach(), bins = bins }, histogram_meta)
end

---Raises unless a name can be that of a curve.
local function check_name(op, name)
  if type(name) ~= "string" then pl.error(op, "a value is named " .. check.show(name), "values are named: run:log { gap = 0.1 }") end
  if #name > 200 or not name:find "^[%w_][%w_./ -]*$" then
    pl.error(op, ("a value is named '%s'"):format(name), "a name has letters, digits, _ . / - and spaces, at most 200, and begins with a letter or digit")
  end
end

---Queues one value.
local function put(op, step, name, value)
  local meta = type(value) == "table" and getmetatable(value)
  if meta == image_meta then
    native.log_image(step, name, value.image)
  elseif meta == histogram_meta then
    native.log_histogram(step, name, value.values, value.bins)
  elseif type(value) == "string" and #value > MAX_TEXT then
    pl.error(op, ("'%s' is a text of %d bytes, more than 1 MiB"):format(name, #value), "write long texts to a file in run.dir")
  elseif type(value) == "number" or type(value) == "string" then
    native.log_value(step, name, value)
  elseif pl.is_tensor(value) and value:numel() == 1 then
    native.log_value(step, name, value:detach())
  elseif pl.is_tensor(value) then
    pl.error(op, ("'%s' is a tensor of shape {%s}"):format(name, table.concat(value.shape, ", ")),
      "log a scalar tensor, train.image(x) or train.histogram(x)")
  else
    pl.error(op, ("'%s' is %s"):format(name, check.show(value)), "log numbers, texts, scalar tensors, train.image(x) or train.histogram(x)")
  end
end

---Logs named values of a step.
---@param op string for errors
---@param step integer
---@param values table<string, any>
function log.write(op, step, values)
  if type(values) ~= "table" or getmetatable(values) then
    pl.error(op, "its argument is " .. check.show(values), "pass a table: run:log { gap = 0.1 }")
  end
  for _, name in ipairs(tree.names(values)) do
    check_name(op, name)
    put(op, step, name, values[name])
  end
end

---@class (partial) perilune.Run
local Run = {}

---Logs values beside the metrics of the run: numbers and scalar tensors as curves, strings as texts, train.image(x) and train.histogram(x).
---They go to metrics.jsonl, to TensorBoard and to the sinks; images also to the folder media of the run directory. A run that
---no command drives, as at the prompt, checks the values and keeps none.
---@param values table<string, number|string|perilune.Tensor|perilune.LoggedImage|perilune.LoggedHistogram>
---@param step integer? steps done when they were true; by default the step that on_step or on_eval is called about, or run.count
function Run:log(values, step)
  local op = "run:log"
  if step == nil then step = native.observed_step() or self.count end
  log.write(op, check.whole(op, "step", step, 0), values)
end

log.methods = Run
return log
