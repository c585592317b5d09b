-- Tests augmentations against torchvision (tests/golden/augment/make.py), draws against NumPy, and their distributions.

local pl = require "perilune"
local augment, data = pl.augment, pl.data
local t = require "support"
local describe, it, expect = t.describe, t.it, t.expect

local golden = {}
for name, x in pairs(pl.load "../golden/augment/reference.safetensors") do golden[name:gsub("_", " ")] = x end

---Largest difference of two tensors.
local function apart(a, b)
  expect(a.shape):to_equal(b.shape)
  expect(a.dtype):to_be(b.dtype)
  return (a:to("f64") - b:to("f64")):abs():max():item()
end

---Compares a function of images with torchvision's results: 1e-5 for floats, 1 for u8.
local function agrees(name, fn)
  if golden[name .. " f32"] then expect(apart(fn(golden.f32), golden[name .. " f32"]) <= 1e-5):to_be_true() end
  expect(apart(fn(golden.u8), golden[name .. " u8"]) <= 1):to_be_true()
end

---A batch of n images of h x w pixels with the ids 0 to n - 1.
local function batch_of(n, c, h, w, visit)
  local x = (pl.arange(n * c * h * w) % 251):to("u8"):reshape(n, c, h, w)
  return { x = x, id = pl.arange(n), visit = pl.full({ n }, visit or 0) }
end

describe("augmentations with given parameters", function()
  it("agree with torchvision in geometry", function()
    agrees("crop", function(x) return augment.crop(x, -2, 3, { 12, 24 }) end)
    agrees("flip", function(x) return augment.flip(x) end)
    agrees("flip rows", function(x) return augment.flip(x, { axis = "rows" }) end)
    agrees("resize up", function(x) return augment.resize(x, { 31, 40 }) end)
    agrees("resize down", function(x) return augment.resize(x, { 14, 17 }) end)
    agrees("rotate", function(x) return augment.rotate(x, 33) end)
    agrees("affine", function(x) return augment.affine(x, { angle = -20, translate = { 2, -3 }, scale = 1.2, shear = { 11, -7 } }) end)
    agrees("shear", function(x) return augment.affine(x, { shear = { 25, 0 } }) end)
  end)

  it("agree with torchvision in colours", function()
    for _, factor in ipairs { "0.0", "0.6", "1.7" } do
      for _, name in ipairs { "brightness", "contrast", "saturation" } do
        agrees(name .. " " .. factor, function(x) return augment[name](x, tonumber(factor)) end)
      end
    end
    for _, factor in ipairs { "-0.5", "-0.13", "0.0", "0.3" } do
      agrees("hue " .. factor, function(x) return augment.hue(x, tonumber(factor)) end)
    end
    agrees("solarize", function(x) return augment.solarize(x, x.dtype == "u8" and 128 / 255 or 0.5) end)
    for _, bits in ipairs { 1, 4, 8 } do agrees("posterize " .. bits, function(x) return augment.posterize(x, bits) end) end
    local y = augment.normalize(golden.f32, { 0.485, 0.456, 0.406 }, { 0.229, 0.224, 0.225 })
    expect(apart(y, golden["normalize f32"]) <= 1e-5):to_be_true()
  end)

  it("take a number for each image", function()
    local x = golden.f32
    for _, case in ipairs { { "rotate", 20, -75 }, { "brightness", 0.5, 1.5 }, { "contrast", 0.2, 1.4 }, { "saturation", 0, 2 }, { "hue", 0.1, -0.3 } } do
      local name, a, b = table.unpack(case)
      local both = augment[name](x, pl.tensor { a * 1.0, b * 1.0 })
      expect(both:narrow(0, 0, 1)):to_be_near(augment[name](x:narrow(0, 0, 1), a), 1e-5)
      expect(both:narrow(0, 1, 1)):to_be_near(augment[name](x:narrow(0, 1, 1), b), 1e-5)
    end
    expect(augment.crop(x, pl.tensor { 1, 2 }, pl.tensor { 0, 4 }, 3):narrow(0, 1, 1)):to_be_near(x:narrow(0, 1, 1):narrow(2, 2, 3):narrow(3, 4, 3))
  end)

  it("fill what is outside", function()
    local x = pl.full({ 1, 1, 2, 2 }, 9, { dtype = "u8" })
    expect(augment.crop(x, -1, 0, { 2, 3 }, { fill = 4 })):to_equal { { { { 4, 4, 4 }, { 9, 9, 4 } } } }
  end)

  it("refuse what is not a batch of images or a factor", function()
    local x = golden.f32
    expect(function() augment.crop(x[0], 0, 0, 2) end):to_raise "it must be a batch of images"
    expect(function() augment.hue(pl.zeros { 1, 1, 2, 2 }, 0) end):to_raise "three of RGB"
    expect(function() augment.hue(x, 0.7) end):to_raise "from -0.5 to 0.5"
    expect(function() augment.brightness(x, -1) end):to_raise "0 or more"
    expect(function() augment.rotate(x, 0 / 0) end):to_raise "finite number"
    expect(function() augment.rotate(x, pl.zeros { 3 }) end):to_raise "one number for each image"
    expect(function() augment.affine(x, { angel = 3 }) end):to_raise "angle"
    expect(function() augment.affine(x, { scale = 0 }) end):to_raise "above 0"
    expect(function() augment.resize(x, 4) end):to_raise "skips pixels"
    expect(function() augment.normalize(x, { 0 }, { 1 }) end):to_raise "one number for each channel"
    expect(function() augment.normalize(x, { 0, 0, 0 }, { 1, 0, 1 }) end):to_raise "above 0"
    expect(augment.crop(pl.zeros { 0, 3, 4, 4 }, 0, 0, 2).shape):to_equal { 0, 3, 2, 2 }
  end)
end)

describe("draws", function()
  it("are those of an independent implementation", function()
    local cases = golden["draw cases"]:tolist()
    for i, case in ipairs(cases) do
      local d = augment.draws({ id = pl.tensor { case[2] }, visit = pl.tensor { case[3] } }, { seed = case[1] })
      local both = pl.cat({ d:uniform(4), d:uniform(2) }, 1)
      expect(both):to_equal { golden.draws:tolist()[i] }
    end
  end)

  it("depend on the sample alone", function()
    local all = augment.draws({ id = pl.arange(64), visit = pl.zeros({ 64 }, { dtype = "i64" }) }, { seed = 5 }):uniform(3):tolist()
    local some = augment.draws({ id = pl.tensor { 40, 3, 7 }, visit = pl.tensor { 0, 0, 1 } }, { seed = 5 }):uniform(3):tolist()
    expect(some[1]):to_equal(all[41])
    expect(some[2]):to_equal(all[4])
    expect(some[3][1] ~= all[8][1]):to_be_true()
  end)

  it("are uniform, normal and independent", function()
    local n = 1 << 16
    local d = augment.draws({ id = pl.arange(n), visit = pl.ones({ n }, { dtype = "i64" }) }, { seed = 11 })
    local u = d:uniform(2)
    ---Chi-square of counts that are expected to be equal.
    local function chi_square(codes, kinds)
      local counts, sum = pl.zeros({ kinds }, { dtype = "i64" }):scatter_add(0, codes, 1):tolist(), 0
      for _, count in ipairs(counts) do sum = sum + (count - n / kinds) ^ 2 / (n / kinds) end
      return sum
    end
    local cells = (u * 16):floor():to("i64")
    -- The 0.9999 quantiles of chi-square with 15 and 255 degrees of freedom are 44.3 and 347.7.
    expect(chi_square(cells:select(1, 0), 16) < 44.3):to_be_true()
    expect(chi_square(cells:select(1, 0) * 16 + cells:select(1, 1), 256) < 347.7):to_be_true()
    -- Neighbouring samples.
    local first = cells:select(1, 0):reshape(n // 2, 2)
    local pairs_of = (first:select(1, 0) * 16 + first:select(1, 1))
    n = n // 2
    expect(chi_square(pairs_of, 256) < 347.7):to_be_true()
    local z = d:normal(1)
    expect(math.abs(z:mean():item()) < 0.02):to_be_true()
    expect(math.abs(z:std():item() - 1) < 0.02):to_be_true()
  end)

  it("need ids and visits", function()
    expect(function() augment.draws { x = pl.zeros { 2 } } end):to_raise "ids = true"
    expect(function() augment.draws({ id = pl.zeros { 2 }, visit = pl.arange(2) }) end):to_raise "i64"
    expect(function() augment.draws({ id = pl.arange(3), visit = pl.arange(2) }) end):to_raise "3 ids and 2 visits"
    expect(function() augment.draws({ id = pl.arange(2), visit = pl.arange(2) }, { sed = 1 }) end):to_raise "seed"
  end)
end)

describe("a chain of steps", function()
  local steps = { augment.RandomCrop(8, { padding = 2 }), augment.RandomFlip(), augment.RandomRotation(15),
                  augment.ColorJitter { brightness = 0.4, contrast = 0.4, saturation = 0.4, hue = 0.1 } }

  it("gives a sample the same result in any batch and order", function()
    local vary = augment.compose(steps, { seed = 3 })
    local b = batch_of(6, 3, 8, 8)
    local all = vary(b).x
    local ids = pl.tensor { 4, 1 }
    local some = vary({ x = b.x:index_select(0, ids), id = ids, visit = pl.zeros({ 2 }, { dtype = "i64" }) }).x
    expect(some):to_be_near(all:index_select(0, ids), 1e-6)
    local later = vary(batch_of(6, 3, 8, 8, 1)).x
    expect((later - all):abs():max():item() > 0.1):to_be_true()
    expect(b.x.dtype):to_be "u8"
  end)

  it("is one interpolation, one reduction and maps", function()
    local n = 1024
    local vary = augment.compose({ augment.RandomCrop(224, { padding = 8 }), augment.RandomFlip(),
      augment.ColorJitter { brightness = 0.4, contrast = 0.4, saturation = 0.4, hue = 0.1 },
      augment.Normalize({ 0.485, 0.456, 0.406 }, { 0.229, 0.224, 0.225 }) }, { seed = 1 })
    local x = pl.zeros({ n, 3, 224, 224 }, { dtype = "u8" })
    local text = tostring(pl.plan(vary({ x = x, id = pl.arange(n), visit = pl.arange(n) }).x))
    local samples, reductions, maps = 0, 0, 0
    for line in text:gmatch "[^\n]+" do
      -- Kernels over pixels; those of draws and matrices have a few thousand elements. The reduction has a row for each image.
      if line:find "^  affine_sample" then samples = samples + 1
      elseif line:find(" 1x1024x50176 ", 1, true) then reductions = reductions + 1
      elseif line:find " 1x1x%d%d%d%d%d%d%d" then maps = maps + 1 end
    end
    expect({ samples, reductions, maps }):to_equal { 1, 1, 2 }
  end)

  it("crops, flips and rotates as the functions do", function()
    local b = batch_of(5, 1, 6, 7)
    local unit = b.x:to("f32") / 255
    local u = augment.draws(b, { seed = 9 }):uniform(3)
    local vary = augment.compose({ augment.RandomCrop({ 5, 6 }, { padding = 1 }), augment.RandomFlip(0.5) }, { seed = 9 })
    local top, left = (u:select(1, 0) * 4):floor() - 1, (u:select(1, 1) * 4):floor() - 1
    local cropped = augment.crop(unit, top, left, { 5, 6 })
    local flip = u:select(1, 2):lt(0.5):reshape(5, 1, 1, 1)
    expect(vary(b).x):to_be_near(pl.where(flip, cropped:flip(3), cropped), 1e-6)
    local turned = augment.compose({ augment.RandomRotation { 30, 30 } })(b).x
    expect(turned):to_be_near(augment.rotate(unit, -30), 1e-4)
    local center = augment.compose({ augment.CenterCrop(4) })(b).x
    expect(center):to_be_near(augment.crop(unit, 1, 1, 4), 1e-6)
    local same = augment.compose({ augment.RandomAffine() })(b).x
    expect(same):to_be_near(unit, 1e-5)
    local resized = augment.compose({ augment.Resize { 9, 8 } })(b).x
    expect(resized):to_be_near(augment.resize(unit, { 9, 8 }), 1e-5)
    local whole = augment.compose({ augment.RandomResizedCrop({ 6, 7 }, { scale = { 1, 1 }, ratio = { 7 / 6, 7 / 6 } }) })(b).x
    expect(whole):to_be_near(unit, 1e-4)
  end)

  it("draws parameters of the stated distributions", function()
    local n = 4096
    local b = { x = pl.ones { n, 1, 1, 1 } * 0.25, id = pl.arange(n), visit = pl.zeros({ n }, { dtype = "i64" }) }
    local y = augment.compose({ augment.ColorJitter { brightness = 0.5 } }, { seed = 2 })(b).x * 4
    local counts, sum = pl.zeros({ 16 }, { dtype = "i64" }):scatter_add(0, ((y:flatten(0) - 0.5) * 16):floor():to("i64"):clamp(0, 15), 1):tolist(), 0
    for _, count in ipairs(counts) do sum = sum + (count - n / 16) ^ 2 / (n / 16) end
    expect(sum < 44.3):to_be_true()
    local left = pl.tensor({ 1.0, 0.0 }):reshape(1, 1, 1, 2):expand(n, 1, 1, 2)
    local flipped = augment.compose({ augment.RandomFlip(0.25) }, { seed = 4 })({ x = left, id = b.id, visit = b.visit }).x
    -- Five deviations of a binomial distribution.
    expect(math.abs(flipped:narrow(3, 1, 1):mean():item() - 0.25) < 5 * math.sqrt(0.25 * 0.75 / n)):to_be_true()
  end)

  it("is a map of a loader with ids", function()
    local set = data.tensors { x = pl.arange(20):to("u8"):reshape(20, 1, 1, 1) }
    local loader = set:shuffle(1):map(augment.compose({ augment.ColorJitter { brightness = 0.5 } }, { seed = 1 })):batch(8, { ids = true })
    local batch = loader:batch_at(0)
    expect(batch.id):to_equal(loader.ids(0, 8))
    expect(batch.visit):to_equal { 0, 0, 0, 0, 0, 0, 0, 0 }
    expect(loader:batch_at(2).visit):to_equal { 0, 0, 0, 0, 1, 1, 1, 1 }
    expect(loader:batch_at(0).x):to_equal(batch.x:tolist())
    local valid = set:batch(8, { ids = true })
    expect(valid:batch_at(1).id):to_equal { 8, 9, 10, 11, 12, 13, 14, 15 }
    local named = data.tensors { id = pl.arange(4) }
    expect(function() named:batch(2, { ids = true }):batch_at(0) end):to_raise "another name"
    expect(set:batch(8):batch_at(0).id):to_be(nil)
  end)

  it("refuses wrong steps, options and images", function()
    expect(function() augment.compose {} end):to_raise "list of steps"
    expect(function() augment.compose { augment.RandomFlip } end):to_raise "steps are made by functions"
    expect(function() augment.compose({ augment.RandomFlip() }, { sede = 1 }) end):to_raise "seed"
    expect(function() augment.compose { augment.RandomFlip() } { x = pl.zeros { 2, 1, 2, 2 } } end):to_raise "ids = true"
    expect(function() augment.compose { augment.RandomCrop(9) }(batch_of(1, 1, 4, 4)) end):to_raise "larger than the image"
    expect(function() augment.compose { augment.ColorJitter { hue = 0.1 } }(batch_of(1, 1, 4, 4)) end):to_raise "three of RGB"
    expect(function() augment.RandomFlip(2) end):to_raise "from 0 to 1"
    expect(function() augment.RandomRotation { 3, 1 } end):to_raise "the smaller one"
    expect(function() augment.ColorJitter { contrst = 1 } end):to_raise "contrast"
  end)
end)

describe("local changes and mixtures", function()
  local n = 512
  local function ones(h, w, y)
    return { x = pl.ones { n, 1, h, w }, y = y or pl.arange(n) % 3, id = pl.arange(n), visit = pl.zeros({ n }, { dtype = "i64" }) }
  end

  it("blur as torchvision", function()
    agrees("blur", function(x) return augment.blur(x, 5, 1.3) end)
    local both = augment.blur(golden.f32, 5, pl.tensor { 0.5, 1.3 })
    expect(both:narrow(0, 1, 1)):to_be_near(golden["blur f32"]:narrow(0, 1, 1), 1e-5)
    local drawn = augment.compose({ augment.GaussianBlur(5, { 1.3, 1.3 }) })({ x = golden.f32, id = pl.arange(2), visit = pl.arange(2) }).x
    expect(drawn):to_be_near(golden["blur f32"], 1e-5)
    expect(function() augment.blur(golden.f32, 4, 1) end):to_raise "must be odd"
    expect(function() augment.blur(golden.f32, 39, 1) end):to_raise "smaller kernel"
    expect(function() augment.blur(golden.f32, 3, 0) end):to_raise "above 0"
  end)

  it("erase one rectangle of the stated size in the stated share of images", function()
    local x = augment.compose({ augment.RandomErasing(0.25, { scale = { 0.25, 0.25 }, ratio = { 1, 1 } }) }, { seed = 6 })(ones(8, 8)).x
    local erased = (1 - x):sum({ 1, 2, 3 })
    expect(erased:eq(16):logical_or(erased:eq(0)):to("i64"):sum():item()):to_be(n)
    local share = erased:gt(0):to("f32"):mean():item()
    expect(math.abs(share - 0.25) < 5 * math.sqrt(0.25 * 0.75 / n)):to_be_true()
    -- A rectangle: as many rows as columns have erased pixels, and their product is the area.
    local rows, columns = x:amin({ 1, 3 }):eq(0):to("f32"):sum(1), x:amin({ 1, 2 }):eq(0):to("f32"):sum(1)
    expect(rows * columns):to_be_near(erased)
  end)

  it("add noise of the stated deviation, other for each pixel and sample", function()
    local b = ones(16, 16)
    b.x = b.x * 0.5
    local x = augment.compose({ augment.GaussianNoise(0.05) }, { seed = 1 })(b).x - 0.5
    expect(math.abs(x:std():item() - 0.05) < 0.0005):to_be_true()
    expect(math.abs(x:mean():item()) < 0.001):to_be_true()
    expect((x[0] - x[1]):abs():max():item() > 0.01):to_be_true()
  end)

  it("mix images and labels by one share", function()
    local b = ones(2, 2)
    b.x = (pl.arange(n) * 1.0):reshape(n, 1, 1, 1):expand(n, 1, 2, 2) / n
    local out = augment.compose({ augment.MixUp(3, { alpha = 0.4 }) }, { seed = 3 })(b)
    expect(out.y:sum(1)):to_be_near(pl.ones { n }, 1e-6)
    local hot = pl.one_hot(b.y, 3):to("f32")
    local own = b.x:select(1, 0):select(1, 0):select(1, 0)
    local share = (out.x:select(1, 0):select(1, 0):select(1, 0) - own:flip(0)) / (own - own:flip(0))
    expect(out.y):to_be_near(hot * share:unsqueeze(1) + hot:flip(0) * (1 - share:unsqueeze(1)), 1e-3)
    -- Beta(0.4, 0.4) has the mean 1/2 and the variance 1 / (4 * 1.8).
    expect(math.abs(share:mean():item() - 0.5) < 0.08):to_be_true()
    expect(math.abs(share:var():item() - 1 / 7.2) < 0.02):to_be_true()
    expect(pl.cross_entropy(pl.zeros { n, 3 }, out.y)):to_be_near(math.log(3), 1e-5)
  end)

  it("replace a box by that of another image", function()
    local b = ones(8, 8)
    b.x = pl.where(pl.arange(n):lt(n // 2):reshape(n, 1, 1, 1), pl.ones { n, 1, 8, 8 }, 0.0)
    b.y = pl.arange(n):ge(n // 2):to("i64")
    local out = augment.compose({ augment.CutMix(2, { p = 0.5 }) }, { seed = 8 })(b)
    -- Label 0 are images of ones, whose partners are zeros: the probability is the share of pixels.
    expect(out.y:select(1, 0)):to_be_near(out.x:mean({ 1, 2, 3 }), 1e-5)
    local whole = out.y:select(1, 0):eq(1):logical_or(out.y:select(1, 0):eq(0)):to("f32"):mean():item()
    expect(whole > 0.4 and whole < 0.7):to_be_true()
    local both = augment.compose({ augment.MixUp(2), augment.CutMix(2) }, { seed = 8 })(b)
    expect(both.y:sum(1)):to_be_near(pl.ones { n }, 1e-5)
  end)

  it("draw from the beta distribution", function()
    local quantiles = require("perilune.augment.beta").quantiles
    -- scipy.stats.beta.ppf(u, a, a) at u = 1/8, 1/4 and 1/2.
    for a, want in pairs { [0.2] = { 0.00075586, 0.02381472, 0.5 }, [2] = { 0.22106265, 0.32635182, 0.5 }, [1] = { 0.125, 0.25, 0.5 } } do
      local q = quantiles(a)
      expect({ q[65], q[129], q[257] }):to_be_near(want, 1e-5)
      expect({ q[513], q[449] }):to_be_near({ 1, 1 - want[1] }, 1e-5)
    end
  end)

  it("choose ops for each image", function()
    local b = batch_of(64, 3, 8, 8)
    local unit = b.x:to("f32") / 255
    local none = augment.compose({ augment.RandAugment { ops = 1, magnitude = 0 } }, { seed = 1 })(b).x
    -- Posterize to 8 bits and rotation by 0 degrees are the identity; solarize of magnitude 0 inverts what is 1.
    expect(none):to_be_near(unit, 1e-4)
    local some = augment.compose({ augment.RandAugment {} }, { seed = 1 })(b).x
    local changed = (some - unit):abs():amax({ 1, 2, 3 }):gt(1e-3):to("f32"):mean():item()
    expect(changed > 0.8 and changed < 1):to_be_true()
    expect(some:min():item() >= 0 and some:max():item() <= 1):to_be_true()
  end)

  it("refuse wrong labels and options", function()
    expect(function() augment.compose { augment.MixUp(3) } { x = pl.zeros { 2, 1, 2, 2 }, id = pl.arange(2), visit = pl.arange(2) } end):to_raise "no column 'y'"
    expect(function() augment.compose { augment.MixUp(3) }(ones(2, 2, pl.zeros { n })) end):to_raise "class ids"
    expect(function() augment.MixUp(1) end):to_raise "at least 2"
    expect(function() augment.CutMix(3, { alpha = 0 }) end):to_raise "alpha"
    expect(function() augment.RandAugment { magnitude = 31 } end):to_raise "from 0 to 30"
    expect(function() augment.RandomErasing(0.5, { scale = { 0.5 } }) end):to_raise "{ low, high }"
    expect(function() augment.GaussianNoise(-1) end):to_raise "from 0 to 1"
  end)
end)
