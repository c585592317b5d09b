-- data/images.lua: reads images as a dataset with x (B, 3, P, P) u8 and labels, of a folder of classes or of a list.
--
--   local set = data.images("train", { pixels = 224, crop = "random" })                           FOLDER/CLASS/**/*.{jpg,jpeg,png,webp}
--   local set = data.images("train.jsonl", { path = "file", label = "class", pixels = 224 })      a record for each image
--   return { train = set:shuffle(1):map(flipped):batch(256), valid = data.images("val", { pixels = 224, classes = set.classes }):batch(256) }
--
-- A class id is the position of the class in sorted order. Only paths and labels are stored. Threads decode, crop and scale
-- the images of a batch, prefetching two batches (runtime/data/src/images). Order, crops and antialiased bilinear scaling are those
-- of torchvision's ImageFolder, RandomResizedCrop, Resize and CenterCrop; EXIF orientation is ignored as there. A random crop is a
-- function of the shuffle seed and the sample's number in the stream, so a resumed run has the same crops.

local pl = require "perilune"
---@type string, table the name of this module, and what only the library may call
local _, native = ...
local check = require "perilune.check"
local readers = require "perilune.data.native"
local set = require "perilune.data.set"
local sources = require "perilune.data.sources"
local records = require "perilune.data.records"

---Options that belong to one kind of crop.
local own = { scale = "random", ratio = "random", resize = "center" }

---Checks an option of the form { low, high }.
local function range(op, name, value)
  if #value ~= 2 or type(value[1]) ~= "number" or type(value[2]) ~= "number" then
    pl.error(op, ("%s is not two numbers"):format(name), ("give the minimum and the maximum: %s = { 0.5, 1 }"):format(name))
  end
  return value[1], value[2]
end

---Checks the names of classes.
---@param op string
---@param option string
---@param names any
local function class_names(op, option, names)
  local cure = "classes are names in the order of their ids: { \"cat\", \"dog\" }"
  if type(names) ~= "table" or #names == 0 then pl.error(op, ("option '%s' is %s"):format(option, check.show(names)), cure) end
  for i, name in ipairs(names) do
    if type(name) ~= "string" then pl.error(op, ("class %d is %s"):format(i, check.show(name)), cure) end
  end
end

---Returns the columns of labels of a list: a field is the column y, several fields are columns of their own names.
---@param op string
---@param label any
---@param classes any
---@return {column: string, field: string, classes: string[]?}[]
local function columns(op, label, classes)
  if label == nil then
    if classes then pl.error(op, "option 'classes' is given, and no label", "name the field of the labels: label = \"class\"") end
    return {}
  elseif type(label) == "string" then
    if classes then class_names(op, "classes", classes) end
    return { { column = "y", field = label, classes = classes } }
  elseif type(label) ~= "table" or #label == 0 then
    pl.error(op, "option 'label' is " .. check.show(label), "name a field, label = \"class\", or several: label = { \"breed\", \"age\" }")
  end
  local out, known, kinds = {}, {}, {}
  for _, name in ipairs(label) do
    if type(name) ~= "string" then pl.error(op, "option 'label' has " .. check.show(name), "name fields by strings") end
    if name == "x" or known[name] then
      pl.error(op, ("option 'label' has '%s'%s"):format(name, known[name] and " twice" or ", and x are the pixels"), "rename the field: list:rename { x = \"left\" }")
    end
    known[name], kinds[name] = true, "table"
    out[#out + 1] = { column = name, field = name }
  end
  if classes and #classes > 0 then
    pl.error(op, "option 'classes' is a list, and there are several labels", ("name the classes of each: classes = { %s = { \"a\", \"b\" } }"):format(label[1]))
  end
  local given = check.options(op .. " classes", classes, {}, kinds)
  for _, one in ipairs(out) do
    one.classes = given[one.column]
    if one.classes then class_names(op, "classes." .. one.column, one.classes) end
  end
  return out
end

---Opens a folder of classes or a list of images.
---@param op string
---@param source any
---@param o any the options
---@return perilune.NativeImages
local function open(op, source, o)
  if type(source) == "string" and not o.path then
    for _, name in ipairs { "label", "folder" } do
      if o[name] ~= nil then
        pl.error(op, ("option '%s' belongs to a list, and %s is opened as a folder of classes"):format(name, check.show(source)),
          "name the field that has the paths of the images: path = \"file\"")
      end
    end
    if o.classes then class_names(op, "classes", o.classes) end
    return readers.images(source, o.classes)
  end
  if type(source) ~= "string" and not records.is(source) then
    pl.error(op, "the source is " .. check.show(source), "give a folder, a file of records, or records: data.images(data.jsonl \"train.jsonl\", { path = \"file\", label = \"class\", pixels = 64 })")
  end
  if not o.path then pl.error(op, "option 'path' is missing", "name the field that has the paths of the images: path = \"file\"") end
  local labels = columns(op, o.label, o.classes)
  local list = type(source) == "string" and sources.records(source) or source ---@type perilune.Records
  if list.live then pl.error(op, "the list is a mixture whose weights are a function", "open the images of each dataset") end
  return readers.image_list(list.native, { path = o.path, labels = labels, folder = o.folder, threads = o.threads })
end

---Reads images: those of a folder that contains one folder for each class, or those that the records of a list name.
---  crop = "center": scales the shorter side to `resize` pixels (pixels * 256 / 224) and crops the center.
---  crop = "random": crops a fraction `scale` of the area ({ 0.08, 1 }) of aspect ratio `ratio` ({ 3/4, 4/3 }), and scales it.
---`classes` fixes the names in the order of their ids, as of a training set; `threads` is the number of processors by default.
---A list is a dataset of records, or a file of them (data.records). Its field `path` is the file of an image, from the folder of the list
---or from `folder`; its field `label` becomes y: integers i64, numbers f32, booleans, lists of them of one length, the name of a class its id,
---a list of names of classes (B, classes) f32 of zeros and ones. `label = { "breed", "age" }` makes a column of each field.
---  data.images("train.csv", { path = "file", label = "breed", pixels = 224 })
---@param source string|perilune.Records a folder or a file of records, relative to the recipe's folder or absolute; or records
---@param opts {pixels: integer, crop?: "center"|"random", resize?: integer, scale?: number[], ratio?: number[], classes?: string[]|table<string, string[]>, threads?: integer, path?: string, label?: string|string[], folder?: string} pixels: width and height of the result; crop: "center" or "random"; resize: pixels of the shorter side before a center crop, 256 / 224 of `pixels` by default; scale: fractions of the area for a random crop, { 0.08, 1 } by default; ratio: of width to height for a random crop, { 3/4, 4/3 } by default; classes: names in the order of their ids, as of a training set; threads: that decode, one per processor by default; path: field of a list that names the file; label: field of a list, or fields, with the labels; folder: where the files of a list are, its own by default
---@return perilune.Set
local function images(source, opts)
  local op = "data.images"
  local o = check.options(op, opts, { crop = "center" },
    { pixels = "number", resize = "number", scale = "table", ratio = "table", classes = "table", threads = "number", path = "string",
      label = "string|table", folder = "string" })
  check.required(op, o, { "pixels" })
  check.whole(op, "pixels", o.pixels)
  check.word(op, "crop", o.crop, { "center", "random" })
  for _, name in ipairs { "ratio", "resize", "scale" } do
    if o[name] ~= nil and o.crop ~= own[name] then
      pl.error(op, ("'%s' has no effect with crop = \"%s\""):format(name, o.crop), ("it belongs to crop = \"%s\""):format(own[name]))
    end
  end
  if o.threads then check.whole(op, "threads", o.threads) end
  local form = { pixels = o.pixels, threads = o.threads }
  if o.crop == "random" then
    form.scale_low, form.scale_high = range(op, "scale", o.scale or { 0.08, 1 })
    form.ratio_low, form.ratio_high = range(op, "ratio", o.ratio or { 3 / 4, 4 / 3 })
  else
    form.resize = check.whole(op, "resize", o.resize or o.pixels * 256 // 224)
  end
  local files, place = open(op, source, o), native.place()
  local labels, classes = files:labels(), nil ---@type string[], (string[]|table<string, string[]>)?
  if type(o.label) == "table" then
    local all = {}
    for _, name in ipairs(labels) do all[name] = files:classes(name) end
    classes = all
  elseif labels[1] then
    classes = files:classes(labels[1])
  end

  local function reader(seed)
    local options = { seed = o.crop == "random" and (seed or 0) or nil }
    for key, value in pairs(form) do options[key] = value end
    local inner = files:reader(options)
    return {
      batch = function(rows, first)
        -- Attribute a file that does not decode to the line that names the folder.
        local before = native.at(place)
        local _back <close> = setmetatable({}, { __close = function() native.at(before) end })
        local tensors = { inner:batch(rows, first) }
        local batch = { x = tensors[1] }
        for i, name in ipairs(labels) do batch[name] = tensors[i + 1] end
        return batch
      end,
      prefetch = function(rows, first) inner:prefetch(rows, first) end,
    }
  end
  local function file(i)
    if i >= files:size() then pl.error("set:path", ("there is no image %d"):format(i), ("there are %d, counted from 0"):format(files:size())) end
    return files:path(i)
  end
  reader() -- validates the options now
  return set.new({ what = "images", reader = reader, path = file, files = files }, files:size(), { classes = classes })
end

return { images = images }
