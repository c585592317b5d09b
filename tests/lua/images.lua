-- Tests folders of images: contents of batches, views, errors. Decoding and scaling are tested in runtime/data/src/images.

local pl = require "perilune"
local data = pl.data
local t = require "support"
local describe, it, expect = t.describe, t.it, t.expect

local FOLDER = "../golden/images/folder"

local function opened(changes)
  local opts = { pixels = 12, crop = "random" }
  for key, value in pairs(changes or {}) do opts[key] = value end
  return data.images(FOLDER, opts)
end

local function tree_names(batch)
  local names = {}
  for name in pairs(batch) do names[#names + 1] = name end
  table.sort(names)
  return names
end

---Loads all batches of two epochs and describes each.
local function batches(loader, from, to)
  local out = {}
  for k = from or 0, to or 2 * loader:batches() - 1 do
    local batch, count = loader:batch_at(k)
    out[#out + 1] = { x = batch.x:tolist(), y = batch.y:tolist(), count = count }
  end
  return out
end

describe("a folder of images", function()
  it("says its classes and size", function()
    local set = opened()
    expect(set.classes):to_equal { "boat", "car", "dog" }
    expect(set:size()):to_be(19)
    expect(set:path(0)):to_contain "boat/full.JPG"
    expect(set:path(18)):to_contain "dog/rgba.png"
    expect(function() set:path(19) end):to_raise "there is no image 19"
    expect(function() data.tensors({ x = pl.zeros { 3 } }):path(0) end):to_raise "are not files"
  end)

  it("gives x (B, 3, P, P) u8 and class ids", function()
    local batch, count = opened({ crop = "center" }):batch(19):batch_at(0)
    expect(batch.x.shape):to_equal { 19, 3, 12, 12 }
    expect({ batch.x.dtype, batch.y.dtype, count }):to_equal { "u8", "i64", 19 }
    expect(batch.y):to_equal { 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2 }
    local grey = batch.x[6]
    expect(grey[0]:tolist()):to_equal(grey[1]:tolist())
    expect(batch.x:to("f32"):std():item() > 20):to_be_true()
  end)

  it("goes through in order once, its last batch smaller", function()
    local loader = opened():batch(8)
    expect(loader:batches()):to_be(3)
    local batch, count = loader:batch_at(2)
    expect({ batch.x:size(0), count }):to_equal { 3, 3 }
    expect(batches(loader, 3, 4)):to_equal(batches(loader, 0, 1))
  end)

  it("shuffles each epoch anew, with other crops", function()
    local loader = opened():shuffle(5):batch(19)
    local one, two = loader:batch_at(0), loader:batch_at(1)
    local rows = loader.ids(0, 19)
    table.sort(rows)
    for i = 1, 19 do expect(rows[i]):to_be(i - 1) end
    expect(pl.tensor(loader.ids(0, 19)):eq(pl.tensor(loader.ids(19, 19))):all():item()):to_be(false)
    -- The same image has another crop in the second epoch.
    local first = loader.ids(0, 1)[1]
    local again
    for i, row in ipairs(loader.ids(19, 19)) do if row == first then again = i - 1 end end
    expect(one.y[0]:item()):to_be(two.y[again]:item())
    expect(one.x[0]:eq(two.x[again]):all():item()):to_be(false)
  end)

  it("gives batch k from k alone: in any order, resumed, and with any number of threads", function()
    local all = batches(opened():shuffle(7):batch(5))
    for _, threads in ipairs { 1, 4 } do
      local loader = opened({ threads = threads }):shuffle(7):batch(5)
      for _, k in ipairs { 3, 4, 0, 7, 6, 5, 1 } do
        expect(batches(loader, k, k)[1].x):to_equal(all[k + 1].x)
        expect(batches(loader, k, k)[1].y):to_equal(all[k + 1].y)
      end
    end
    local other = batches(opened():shuffle(8):batch(5), 0, 0)
    expect(pl.tensor(other[1].x):eq(pl.tensor(all[1].x)):all():item()):to_be(false)
  end)

  it("splits and maps like any set", function()
    local set = opened()
    local train, valid = set:split("train", 0.8, 1), set:split("valid", 0.2, 1)
    expect({ train:size(), valid:size() }):to_equal { 15, 4 }
    expect(train.classes):to_equal(set.classes)
    local seen = {}
    for _, part in ipairs { train, valid } do
      for _, row in ipairs(part:batch(19).ids(0, part:size())) do
        expect(seen[row]):to_be(nil)
        seen[row] = true
      end
    end
    local loader = train:shuffle(1):map(function(b) return { x = b.x:to("f32") / 255, label = b.y } end):batch(4, { drop_last = true })
    local batch = loader:batch_at(2)
    expect({ batch.x.dtype, batch.label.dtype, loader:samples() }):to_equal { "f32", "i64", 12 }
    expect(loader:ids_at(0)):to_be "images"
    expect(loader.classes):to_equal(set.classes)
  end)

  it("takes the classes of another folder", function()
    local set = opened { classes = { "dog", "fish", "car", "boat" } }
    expect(set.classes):to_equal { "dog", "fish", "car", "boat" }
    expect(set:batch(19):batch_at(0).y):to_equal { 3, 3, 3, 3, 3, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0 }
    expect(function() opened { classes = { "boat", "dogs", "car" } } end):to_raise "class 'dog': is none of the 3 classes asked for"
  end)

  it("refuses what makes no sense, at the recipe's line", function()
    expect(function() opened { pixel = 3 } end):to_raise "pixels"
    expect(function() data.images(FOLDER) end):to_raise "option 'pixels' is missing"
    expect(function() data.images(FOLDER, { pixels = 8, crop = "centre" }) end):to_raise "centre"
    expect(function() data.images(FOLDER, { pixels = 8, scale = { 0.5, 1 } }) end):to_raise "crop = \"random\""
    expect(function() opened { resize = 14 } end):to_raise "crop = \"center\""
    expect(function() opened { scale = { 0.5, 2 } } end):to_raise "scale"
    expect(function() opened { scale = { 0.5 } } end):to_raise "two numbers"
    expect(function() data.images(FOLDER, { pixels = 8, resize = 4 }) end):to_raise "resize"
    expect(function() opened { pixels = 0 } end):to_raise "pixels"
    expect(function() opened { classes = { "boat", true } } end):to_raise "class 2 is true"
    expect(function() opened { threads = 1 << 20 } end):to_raise "threads"
    expect(function() data.images("no such folder", { pixels = 8 }) end):to_raise "there is no folder \"no such folder\""
    expect(function() data.images("files/cars.csv", { pixels = 8 }) end):to_raise "is a file"
    expect(function() data.images("files", { pixels = 8 }) end):to_raise "no class folders"
    expect(function() data.images(8, { pixels = 8 }) end):to_raise "images.lua:"
  end)
end)

describe("a list of images", function()
  local LIST = "files/pictures.jsonl"
  local function listed(changes)
    local opts = { pixels = 12, crop = "random", path = "file", label = "class" }
    for key, value in pairs(changes or {}) do opts[key] = value end
    return data.images(LIST, opts)
  end

  it("gives the batches of the folder in its order", function()
    local folder, list = opened(), listed()
    expect(list:size()):to_be(folder:size())
    expect(list.classes):to_equal(folder.classes)
    expect(list:path(6)):to_contain "car/grey.jpg"
    for _, views in ipairs { { folder, list }, { folder:shuffle(3), list:shuffle(3) }, { folder:split("train", 0.5, 1), list:split("train", 0.5, 1) } } do
      expect(batches(views[2]:batch(4))):to_equal(batches(views[1]:batch(4)))
    end
    local a, b = folder:shuffle(2):batch(5, { ids = true }):batch_at(4), list:shuffle(2):batch(5, { ids = true }):batch_at(4)
    expect({ b.id:tolist(), b.visit:tolist() }):to_equal { a.id:tolist(), a.visit:tolist() }
    -- A loader that starts later, or has other threads, gives the same.
    expect(batches(listed({ threads = 1 }):shuffle(3):batch(4), 7, 8)):to_equal(batches(list:shuffle(3):batch(4), 7, 8))
  end)

  it("takes records, and several labels of every kind", function()
    local records = data.jsonl(LIST):filter(function(r) return r.class ~= "car" end)
    local set = data.images(records, { pixels = 8, path = "file", label = { "class", "width", "ratio", "tags", "box", "whole" } })
    expect(set.classes):to_equal { class = { "boat", "dog" }, tags = { "png", "small", "tall" } }
    local batch = set:batch(13):batch_at(0)
    expect({ batch.class.dtype, batch.width.dtype, batch.ratio.dtype, batch.tags.dtype, batch.box.dtype, batch.whole.dtype }):to_equal { "i64", "i64", "f32", "f32", "i64", "bool" }
    expect(batch.class):to_equal { 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1 }
    expect(batch.tags.shape):to_equal { 13, 3 }
    expect(batch.box.shape):to_equal { 13, 2, 2 }
    for i = 0, 12 do
      local r = records:get(i)
      expect(batch.width[i]:item()):to_be(r.width)
      expect(batch.ratio[i]:item()):to_be_near(r.ratio)
      expect(batch.box[i]):to_equal(r.box)
      expect(batch.whole[i]:item()):to_be(r.whole)
      local has = {}
      for _, tag in ipairs(r.tags) do has[tag] = 1 end
      expect(batch.tags[i]):to_equal { has.png or 0, has.small or 0, has.tall or 0 }
    end
    local some = data.list { { at = "dog/grey.png" }, { at = "boat/plain.jpg" } }
    local alone = data.images(some, { pixels = 8, path = "at", folder = FOLDER })
    expect(alone.classes):to_be(nil)
    expect(tree_names(alone:batch(2):batch_at(0))):to_equal { "x" }
    expect(data.images(data.table "files/pictures.csv", { pixels = 8, path = "file", label = "class" }).classes):to_equal { "boat", "dog" }
  end)

  it("fixes the ids of classes", function()
    local set = listed { classes = { "dog", "fish", "car", "boat" } }
    expect(set:batch(19):batch_at(0).y):to_equal { 3, 3, 3, 3, 3, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0 }
    expect(function() listed { classes = { "boat", "dogs", "car" } } end):to_raise "pictures.jsonl:12: the class 'dog' is none of the 3 classes"
    local both = listed { label = { "class", "tags" }, classes = { tags = { "tall", "png", "small", "new" } } }
    expect(both.classes):to_equal { class = { "boat", "car", "dog" }, tags = { "tall", "png", "small", "new" } }
  end)

  it("refuses what makes no sense, at the recipe's line", function()
    expect(function() data.images(LIST, { pixels = 8, label = "class" }) end):to_raise "option 'label' belongs to a list"
    expect(function() data.images(data.jsonl(LIST), { pixels = 8 }) end):to_raise "option 'path' is missing"
    expect(function() data.images(data.tensors { x = pl.ones { 2 } }, { pixels = 8 }) end):to_raise "the source is a table"
    expect(function() listed { path = "flie" } end):to_raise "did you mean 'file'?"
    expect(function() listed { path = "width" } end):to_raise "pictures.jsonl:1: the path of the image, 'width', is an integer"
    expect(function() listed { label = "clas" } end):to_raise "did you mean 'class'?"
    expect(function() listed { label = 7 } end):to_raise "label"
    expect(function() listed { label = {} } end):to_raise "option 'label' is a table"
    expect(function() listed { label = { "class", "class" } } end):to_raise "'class' twice"
    expect(function() listed { label = { "x" } } end):to_raise "x are the pixels"
    expect(function() listed { label = { "class" }, classes = { "boat" } } end):to_raise "there are several labels"
    expect(function() listed { label = { "class" }, classes = { clas = { "boat" } } } end):to_raise "clas"
    expect(function() listed { label = { "class", "width" }, classes = { width = { "a" } } } end):to_raise "there are 1 classes"
    expect(function() listed { folder = "nowhere" } end):to_raise "there is no folder \"nowhere\""
    expect(function() listed { folder = "." } end):to_raise "pictures.jsonl:1: there is no image"
    expect(function() data.images(data.jsonl(LIST):shuffle(1), { pixels = 8, path = "file" }) end):to_raise "shuffle the images"
    expect(function() listed { paht = 1 } end):to_raise "path"
  end)
end)
