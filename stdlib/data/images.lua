-- data/images.lua: reads a folder of images as a dataset: FOLDER/CLASS/**/*.{jpg,jpeg,png} to x (B, 3, P, P) u8, y (B) i64.
--
--   local set = data.images("train", { pixels = 224, crop = "random" })
--   return { train = set:shuffle(1):map(flipped):batch(256), valid = data.images("val", { pixels = 224, classes = set.classes }):batch(256) }
--
-- A class id is the position of the class folder in sorted order. Only the list of files is stored. Threads decode, crop and scale
-- the images of a batch, prefetching two batches (runtime/data/src/images). Order, crops and antialiased bilinear scaling are those
-- of torchvision's ImageFolder, RandomResizedCrop, Resize and CenterCrop; EXIF orientation is ignored as there. A random crop is a
-- function of the shuffle seed and the sample's number in the stream, so a resumed run has the same crops.

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local check = require "perilune.check"
local readers = require "perilune.data.native"
local set = require "perilune.data.set"

---Options that belong to one kind of crop.
local own = { scale = "random", ratio = "random", resize = "center" }

---Checks an option of the form { low, high }.
local function range(op, name, value)
  if #value ~= 2 or type(value[1]) ~= "number" or type(value[2]) ~= "number" then
    pl.error(op, ("%s is not two numbers"):format(name), ("give the minimum and the maximum: %s = { 0.5, 1 }"):format(name))
  end
  return value[1], value[2]
end

---Reads the images of a folder that contains one folder for each class.
---  crop = "center": scales the shorter side to `resize` pixels (pixels * 256 / 224) and crops the center.
---  crop = "random": crops a fraction `scale` of the area ({ 0.08, 1 }) of aspect ratio `ratio` ({ 3/4, 4/3 }), and scales it.
---`classes` fixes the names in the order of their ids, as of a training set; `threads` is the number of processors by default.
---@param path string relative to the recipe's folder, or absolute
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
      pl.error(op, ("'%s' has no effect with crop = \"%s\""):format(name, o.crop), ("it belongs to crop = \"%s\""):format(own[name]))
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
  local folder, place = readers.images(path, o.classes), native.place()

  local function reader(seed)
    local options = { seed = o.crop == "random" and (seed or 0) or nil }
    for key, value in pairs(form) do options[key] = value end
    local inner = folder:reader(options)
    return {
      batch = function(rows, first)
        -- Attribute a file that does not decode to the line that names the folder.
        local before = native.at(place)
        local _back <close> = setmetatable({}, { __close = function() native.at(before) end })
        local x, y = inner:batch(rows, first)
        return { x = x, y = y }
      end,
      prefetch = function(rows, first) inner:prefetch(rows, first) end,
    }
  end
  local function file(i)
    if i >= folder:size() then pl.error("set:path", ("there is no image %d"):format(i), ("there are %d, counted from 0"):format(folder:size())) end
    return folder:path(i)
  end
  reader() -- validates the options now
  return set.new({ what = "images", reader = reader, path = file, folder = folder }, folder:size(), { classes = folder:classes() })
end

return { images = images }
