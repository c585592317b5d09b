-- recipes/resnet50.lua: trains or fine-tunes ResNet-50 on images
--
--   perilune run recipes/resnet50.lua --device cuda --precision bf16 --set images=imagenet/train --set valid=imagenet/val
--
-- He et al., Deep Residual Learning for Image Recognition (2015), in version 1.5 as in torchvision: the 3x3 convolution of a
-- bottleneck has the stride. SGD with momentum, cosine schedule, label smoothing, no weight decay of norms and biases, after
-- Goyal et al., Accurate, Large Minibatch SGD (2017).
--
-- `images` and `valid` name folders that contain a folder of JPEG and PNG files for each class. Files are decoded when they are
-- needed, with random crops in training and center crops in evaluation, as in torchvision's references. The number of classes is
-- that of the folders. Or they name .npz (or .safetensors) files with `x` (N, 3, H, W) u8 and class ids `y` (N), which are loaded
-- into memory and not cropped. Images are flipped at random in training. Without `images` the recipe trains on noise, for
-- measurements of speed.
--
-- `weights` names a model.safetensors with torchvision's names to start from; `export` names one to write at the end.
--
-- Dims: B batch, C channels, H height, W width, K classes.

local pl = require "perilune"
local nn, optim, data, init, metrics = pl.nn, pl.optim, pl.data, pl.init, pl.metrics

local sizes = { -- blocks of the four stages, channels of the first stage
  ["50"] = { blocks = { 3, 4, 6, 3 }, width = 64 },
  ["tiny"] = { blocks = { 1, 2, 1, 1 }, width = 8 },
}

local recipe = pl.recipe {
  name = "resnet50",
  description = "ResNet-50 on images",
  params = {
    size = "50",                       -- 50 or tiny
    images = "", valid = "",           -- folders or files of images; noise without them
    weights = "", export = "",         -- model.safetensors to start from, and to write at the end
    classes = 0,                       -- 0: those of the folder, else 1000
    pixels = 224,
    batch = 256, accumulate = 1, steps = 5000, lr = 0.1, warmup = 100, weight_decay = 1e-4, smoothing = 0.1, seed = 1,
  },
}

-- Mean and standard deviation of ImageNet's channels, which torchvision's weights assume.
local MEAN, DEVIATION = { 0.485, 0.456, 0.406 }, { 0.229, 0.224, 0.225 }

local function scaled(batch)
  local mean, deviation = pl.tensor(MEAN):view(3, 1, 1), pl.tensor(DEVIATION):view(3, 1, 1)
  batch.x = (batch.x:to("f32") * (1 / 255) - mean) / deviation
  return batch
end

local function flipped(batch)
  local turn_B111 = pl.rand({ batch.x:size(0), 1, 1, 1 }):lt(0.5)
  batch.x = pl.where(turn_B111, batch.x:flip(-1), batch.x)
  return batch
end

-- Number of classes: that of the folder of `source` (a set or a loader), else `classes`.
local function num_classes(p, source)
  if source and source.classes then return #source.classes end
  return p.classes > 0 and p.classes or 1000
end

local function images(p, path, count, crop, classes)
  if path == "" then
    local x = pl.randint(0, 256, { count, 3, p.pixels, p.pixels }, { dtype = "u8" })
    return data.tensors { x = x, y = pl.randint(0, num_classes(p), { count }) }
  end
  if path:match "%.npz$" or path:match "%.safetensors$" then
    local file = pl.load(path)
    if pl.is_tensor(file) or not file.x or not file.y or file.x:dim() ~= 4 or file.x:size(1) ~= 3 then
      pl.error("resnet50", path .. " does not contain images", "it must contain x (N, 3, H, W) and y (N): numpy.savez(path, x=x, y=y)")
    end
    return data.tensors { x = file.x, y = file.y:to("i64") }
  end
  local set = data.images(path, { pixels = p.pixels, crop = crop, classes = classes })
  if p.classes > 0 and p.classes ~= #set.classes then
    pl.error("resnet50", ("classes is %d, and %s has %d"):format(p.classes, path, #set.classes), "omit `classes`: the folder determines it")
  end
  return set
end

function recipe.data(p)
  local train = images(p, p.images, 4 * p.batch, "random")
  local loaders = { train = train:shuffle(p.seed):map(flipped):map(scaled):batch(p.batch) }
  if p.valid ~= "" or p.images == "" then
    loaders.valid = images(p, p.valid, p.batch, "center", train.classes):map(scaled):batch(p.batch)
  end
  return loaders
end

local function conv(from, to, kernel, stride)
  local c = nn.Conv2d(from, to, kernel, { stride = stride, padding = kernel // 2, bias = false })
  c.weight = pl.state(init.kaiming_normal(c.weight.shape, { mode = "fan_out", nonlinearity = "relu" }))
  return c
end

---@param x perilune.Tensor
---@return perilune.Tensor
local function bottleneck(self, x)
  local y = self.bn1(self.conv1(x)):relu()
  y = self.bn2(self.conv2(y)):relu()
  if self.downsample then x = self.downsample.bn(self.downsample.conv(x)) end
  return x:add(self.bn3(self.conv3(y))):relu()
end

-- x (B, from, H, W) -> (B, 4 * width, H / stride, W / stride).
local function Bottleneck(from, width, stride)
  local reshaped = stride ~= 1 or from ~= 4 * width
  return nn.module {
    conv1 = conv(from, width, 1, 1), bn1 = nn.BatchNorm2d(width),
    conv2 = conv(width, width, 3, stride), bn2 = nn.BatchNorm2d(width),
    conv3 = conv(width, 4 * width, 1, 1), bn3 = nn.BatchNorm2d(4 * width),
    downsample = reshaped and { conv = conv(from, 4 * width, 1, stride), bn = nn.BatchNorm2d(4 * width) } or nil,
    forward = bottleneck,
  }
end

-- Maps paths of the model to torchvision's names.
local function names()
  local out = {}
  for i = 1, 4 do
    local layer = ("layer%d.#"):format(i)
    out[#out + 1] = { layer .. ".downsample.conv", layer .. ".downsample.0" }
    out[#out + 1] = { layer .. ".downsample.bn", layer .. ".downsample.1" }
    out[#out + 1] = { layer, layer }
  end
  for _, name in ipairs { "conv1", "bn1", "fc" } do out[#out + 1] = { name, name } end
  return out
end

function recipe.model(p, loaders)
  local s = sizes[p.size] ---@type {blocks: integer[], width: integer}
  if not s then pl.error("resnet50", ("there is no size '%s'"):format(p.size), "one of 50, tiny") end
  if p.export ~= "" then nn.check_export(p.export) end   -- fail now, not after training
  local m = { conv1 = conv(3, s.width, 7, 2), bn1 = nn.BatchNorm2d(s.width) }
  local from = s.width
  for i, blocks in ipairs(s.blocks) do
    local width, list = s.width << (i - 1), {}
    for k = 1, blocks do
      list[k] = Bottleneck(from, width, k == 1 and i > 1 and 2 or 1)
      from = 4 * width
    end
    m["layer" .. i] = list
  end
  m.fc = nn.Linear(from, num_classes(p, loaders and loaders.train))

  function m:forward(x_BCHW)
    local x = pl.max_pool2d(self.bn1(self.conv1(x_BCHW)):relu(), 3, { stride = 2, padding = 1 })
    for _, layer in ipairs { self.layer1, self.layer2, self.layer3, self.layer4 } do
      for _, block in ipairs(layer) do x = block(x) end
    end
    return self.fc(x:mean({ 2, 3 }))
  end
  local model = nn.module(m)
  if p.weights ~= "" then nn.load_weights(model, p.weights, names(), { ignore = { "num_batches_tracked$" } }) end
  return model
end

function recipe.optimizer(p, model)
  local lr = optim.cosine { peak = p.lr * p.batch * p.accumulate / 256, warmup = p.warmup, steps = p.steps }
  return optim.SGD(optim.decay_matrices(model, p.weight_decay), { lr = lr, momentum = 0.9 })
end

function recipe.loss(model, batch)
  local logits_BK = model(batch.x)
  local loss = pl.cross_entropy(logits_BK, batch.y, { label_smoothing = recipe.params.smoothing })
  return loss, { accuracy = metrics.accuracy(logits_BK, batch.y) }
end

function recipe.evaluate(model, batch)
  local logits_BK = model(batch.x)
  local top5 = metrics.top_k(logits_BK, batch.y, math.min(5, logits_BK:size(1)))
  return pl.cross_entropy(logits_BK, batch.y), { accuracy = metrics.accuracy(logits_BK, batch.y), top5 = top5 }
end

function recipe.finish(run)
  if run.params.export ~= "" then nn.save_weights(run.model, run.params.export, names()) end
end

return recipe
