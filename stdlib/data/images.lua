-- data/images.lua: a folder of images as a dataset: FOLDER/CLASS/**/*.{jpg,jpeg,png}, x (B, 3, P, P) u8 and y (B) i64.
--
--   local set = data.images("train", { pixels = 224, crop = "random" })
--   return { train = set:shuffle(1):map(flipped):batch(256), valid = data.images("val", { pixels = 224, classes = set.classes }):batch(256) }
--
-- Ids are the places of the class folders in sorted order. Only the list of files is held: images are decoded, cropped and scaled
-- when a batch is made, by threads that work two batches ahead (runtime/data/src/images). Order, crops and bilinear scaling with
-- antialias are those of torchvision's ImageFolder, RandomResizedCrop, Resize and CenterCrop; EXIF's orientation is ignored as there.
-- A random crop is a function of (the seed of shuffle, the sample's number in the stream), so a run that is resumed sees the same.

local pl = require "perilune"
local check = require "perilune.check"
local native = require "perilune.data.native"
local set = require "perilune.data.set"

---What only one kind of crop has.
local own = { scale = "random", ratio = "random", resize = "center" }

---A range { low, high }.
local function range(op, name, value)
  if #value ~= 2 or type(value[1]) ~= "number" or type(value[2]) ~= "number" then
    pl.error(op, ("%s is not two numbers"):format(name), ("the least and the most: %s = { 0.5, 1 }"):format(name))
  end
  return value[1], value[2]
end

---The images of a folder that has a folder for each class.
---  crop = "center": the shorter side becomes `resize` (256/224 of pixels), and the middle is taken.
---  crop = "random": a part of `scale` of the area ({ 0.08, 1 }) and of a `ratio` of width to height ({ 3/4, 4/3 }) is scaled to fit.
---`classes` fixes names and ids, for a folder beside another one; `threads` is as many as there are processors.
---@param path string beside the recipe, or absolute
---@param opts {pixels: integer, crop?: "center"|"random", resize?: integer, scale?: number[], ratio?: number[], classes?: string[], threads?: integer}
---@return perilune.Set
local function images(path, opts)
  local op = "data.images"
  if type(path) ~= "string" then pl.error(op, "the path is " .. check.show(path)) end
  local o = check.options(op, opts, { crop = "center" },
    { pixels = "number", resize = "number", scale = "table", ratio = "table", classes = "table", threads = "number" })
  check.required(op, o, { "pixels" })
  check.whole(op, "pixels", o.pixels)
  check.word(op, "crop", o.crop, { "center", "random" })
  for _, name in ipairs { "ratio", "resize", "scale" } do
    if o[name] ~= nil and o.crop ~= own[name] then
      pl.error(op, ("'%s' says nothing with crop = \"%s\""):format(name, o.crop), ("it belongs to crop = \"%s\""):format(own[name]))
    end
  end
  for i, name in ipairs(o.classes or {}) do
    if type(name) ~= "string" then pl.error(op, ("class %d is %s"):format(i, check.show(name)), "classes are names: { \"cat\", \"dog\" }") end
  end
  if o.threads then check.whole(op, "threads", o.threads) end
  local form = { pixels = o.pixels, threads = o.threads }
  if o.crop == "random" then
    form.scale_low, form.scale_high = range(op, "scale", o.scale or { 0.08, 1 })
    form.ratio_low, form.ratio_high = range(op, "ratio", o.ratio or { 3 / 4, 4 / 3 })
  else
    form.resize = check.whole(op, "resize", o.resize or o.pixels * 256 // 224)
  end
  local folder, place = native.images(path, o.classes), pl.native.place()

  local function reader(seed)
    local options = { seed = o.crop == "random" and (seed or 0) or nil }
    for key, value in pairs(form) do options[key] = value end
    local inner = folder:reader(options)
    return {
      batch = function(rows, first)
        -- A loop of the library asks for batches: a file that does not decode is a matter of the line that names the folder.
        local before = pl.native.at(place)
        local _back <close> = setmetatable({}, { __close = function() pl.native.at(before) end })
        local x, y = inner:batch(rows, first)
        return { x = x, y = y }
      end,
      expect = function(rows, first) inner:expect(rows, first) end,
    }
  end
  local function file(i)
    if i >= folder:size() then pl.error("set:path", ("there is no image %d"):format(i), ("there are %d, from 0"):format(folder:size())) end
    return folder:path(i)
  end
  reader() -- raises here what is wrong with the numbers
  return set.new({ what = "images", reader = reader, path = file }, folder:size(), { classes = folder:classes() })
end

return { images = images }
