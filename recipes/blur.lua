-- recipes/blur.lua: filters an image by convolution: a tensor program without training
--
--   perilune run recipes/blur.lua --set out=blur.png --set image=photo.png --set sigma=3
--
-- Reads a PNG, or draws a test image without one. Writes one PNG of the image, blurred, sharpened and its edges, side by side,
-- in about a second. A script may write only to files that its command names: --set out=FILE allows that file.

local pl = require "perilune"

local p = pl.params { image = "", out = "", sigma = 2.0, amount = 1.0, size = 128 }

-- Draws rings and a checkerboard in colour: (3, size, size) in [0, 1].
local function test_image(size)
  local at = pl.linspace(-1, 1, size)
  local y, x = at:unsqueeze(1), at:unsqueeze(0)
  local rings = ((x * x + y * y) * 40):sin() * 0.5 + 0.5
  local checks = ((x * 4):floor() + (y * 4):floor()) % 2
  local disc = (x * x + y * y):lt(0.6):to("f32")
  return pl.stack({ rings * disc, checks * 0.8 + 0.0 * y, (x * 0.5 + 0.5) * (1 - disc) + 0.3 * disc }, 0)
end

-- Convolves every channel of image (C, H, W) with one kernel (h, w), with zero padding. For an averaging kernel it divides by the
-- filtered mask of the image, so that the padding does not darken the border.
---@return perilune.Tensor
local function filter(image, kernel, average)
  local function apply(x, h, w)
    local rows, columns = kernel:size(0), kernel:size(1)
    local y = pl.conv2d(x:reshape(-1, 1, h, w), kernel:reshape(1, 1, rows, columns), nil, { padding = { rows // 2, columns // 2 } })
    return y:squeeze(1)
  end
  local _, h, w = image:size()
  local y = apply(image, h, w)
  if average then y = y / apply(pl.ones { 1, h, w }, h, w) end
  return y
end

-- Blurs by a separable Gaussian: one filter along each dim.
local function gaussian_blur(image, sigma)
  local radius = math.max(1, math.ceil(3 * sigma))
  local at = pl.arange(-radius, radius + 1):to("f32")
  local bell = (-(at * at) / (2 * sigma * sigma)):exp()
  bell = bell / bell:sum()
  return filter(filter(image, bell:unsqueeze(0), true), bell:unsqueeze(1), true)
end

local function sharpen(image, amount)
  return image + (image - gaussian_blur(image, 1.0)) * amount        -- unsharp masking
end

local function edges(image)
  local grey = image:mean(0, { keepdim = true })
  local across = pl.tensor { { -1.0, 0.0, 1.0 }, { -2.0, 0.0, 2.0 }, { -1.0, 0.0, 1.0 } }   -- Sobel
  local gx, gy = filter(grey, across), filter(grey, across:transpose(0, 1))
  local strength = (gx * gx + gy * gy):sqrt()
  return (strength / strength:max():clamp(1e-6)):expand(image:size(0), -1, -1)
end

local image = p.image ~= "" and pl.data.png(p.image) or test_image(math.tointeger(p.size))
if image:size(0) == 4 then image = image:narrow(0, 0, 3) end         -- the alpha channel is not filtered
local sheet = pl.cat({ image, gaussian_blur(image, p.sigma), sharpen(image, p.amount), edges(image) }, 2)
if p.out ~= "" then pl.data.save_png(p.out, sheet) end
local where = p.out ~= "" and "wrote " .. p.out or "made, not written (--set out=FILE)"
print(("%s: the image, blurred (sigma %g), sharpened, edges; %d x %d pixels"):format(where, p.sigma, sheet:size(2), sheet:size(1)))
