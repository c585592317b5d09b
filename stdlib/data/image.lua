-- data/image.lua: reads and writes PNG files as tensors (C, H, W) in [0, 1]; C is 1 (grey), 3 (RGB) or 4 (RGBA).

local pl = require "perilune"
local check = require "perilune.check"
local address = require "perilune.data.address"
local native = require "perilune.data.native"

local image = {}

---Reads a PNG file.
---@param path string or an address
---@param opts {hash: perilune.Hash?}? hash: of the content of an address
---@return perilune.Tensor (C, H, W) f32 in [0, 1]
function image.png(path, opts)
  if type(path) ~= "string" then pl.error("data.png", "the path is " .. check.show(path)) end
  local o = check.options("data.png", opts, {}, { hash = "string|table" })
  return native.png(address.with_hash("data.png", path, o.hash))
end

---Writes a PNG file. Floats are clamped to [0, 1] and scaled; u8 values are written as they are.
---@param path string
---@param x perilune.Tensor (C, H, W), or (H, W) for grey
function image.save_png(path, x)
  local op = "data.save_png"
  if type(path) ~= "string" then pl.error(op, "the path is " .. check.show(path), "PyTorch's order differs: save_png(path, image)") end
  if not pl.is_tensor(x) then pl.error(op, "the image is " .. check.show(x)) end
  if x:dim() == 2 then x = x:unsqueeze(0) end
  local C = x:dim() == 3 and x:size(0)
  if not (C == 1 or C == 3 or C == 4) then
    pl.error(op, ("the image has shape {%s}"):format(table.concat(x.shape, ", ")), "it must be (C, H, W) with 1, 3 or 4 channels, or (H, W)")
  end
  if x.dtype ~= "u8" then x = (x:to("f32"):clamp(0, 1) * 255):round():to("u8") end
  native.save_png(path, x)
end

return image
