-- metrics.lua: computes metrics of predictions, as tensors.
--
-- Nothing is read back, so a metric in a recipe's loss does not synchronize with the device. Only `Mean:result()` reads, at the
-- end of an evaluation. Dims: C classes, ... any leading dims. Predictions are scores (..., C) with labels (...) i64, except
-- where noted.

local pl = require "perilune"
local check = require "perilune.check"
local combine = require "perilune.train.combine"

local metrics = {}

---Returns the class of the largest score; a tensor of the shape of the labels is returned as it is.
local function labels_of(scores, target)
  if scores:dim() == target:dim() then return scores end
  return scores:argmax(-1)
end

---Computes the mean of a bool tensor where `target` is not `ignore_index`.
local function share(hit, target, ignore_index)
  if not ignore_index then return hit:to("f32"):mean() end
  local counted = target:ne(ignore_index)
  return hit:logical_and(counted):to("f32"):sum() / counted:to("f32"):sum():clamp(1)
end

---Computes the fraction of labels that equal the class of the highest score.
---@param scores perilune.Tensor (..., C), or labels (...)
---@param target perilune.Tensor (...)
---@param opts {ignore_index?: integer}? ignore_index: label to exclude
---@return perilune.Tensor # scalar f32
function metrics.accuracy(scores, target, opts)
  local o = check.options("metrics.accuracy", opts, {}, { ignore_index = "number" })
  return share(labels_of(scores, target):eq(target), target, o.ignore_index)
end

---Computes the fraction of labels among the k highest scores, ties in favor of the label.
---Needs no sort: a label is among the first k if fewer than k scores exceed its own.
---@param scores perilune.Tensor (..., C)
---@param target perilune.Tensor (...)
---@param k integer
---@param opts {ignore_index?: integer}? ignore_index: label to exclude
---@return perilune.Tensor # scalar f32
function metrics.top_k(scores, target, k, opts)
  check.whole("metrics.top_k", "k", k)
  local o = check.options("metrics.top_k", opts, {}, { ignore_index = "number" })
  local index = target
  if o.ignore_index then index = pl.where(target:eq(o.ignore_index), 0, target) end
  local own = scores:gather(-1, index:unsqueeze(-1))
  return share(scores:gt(own):to("f32"):sum(-1):lt(k), target, o.ignore_index)
end

---Counts predictions by label: row = label, column = prediction. A product of one-hot matrices, exact up to 2^24 per cell.
---@param scores perilune.Tensor (..., C), or labels (...)
---@param target perilune.Tensor (...)
---@param classes integer? C; required with labels
---@param opts {ignore_index?: integer}? ignore_index: label to exclude
---@return perilune.Tensor (C, C) f32
function metrics.confusion_matrix(scores, target, classes, opts)
  local ignored = check.options("metrics.confusion_matrix", opts, {}, { ignore_index = "number" }).ignore_index
  if not classes and scores:dim() == target:dim() then
    pl.error("metrics.confusion_matrix", "labels alone do not determine the number of classes", "give it: confusion_matrix(labels, target, 10)")
  end
  local C = classes or scores:size(scores:dim() - 1)
  local predicted = pl.one_hot(labels_of(scores, target):flatten(), C):to("f32")
  target = target:flatten()
  local actual ---@type perilune.Tensor
  if ignored then
    local counts = target:ne(ignored)
    actual = pl.one_hot(pl.where(counts, target, 0), C):to("f32") * counts:unsqueeze(-1)
  else
    actual = pl.one_hot(target, C):to("f32")
  end
  return actual:transpose(0, 1):matmul(predicted)
end

---Computes the F1 score, 2 tp / (2 tp + fp + fn); 0 for a class that neither occurs nor is predicted.
---average: "macro" (mean over classes), "micro", "weighted" (by number of labels) or "none" (one score per class).
---@param scores perilune.Tensor (..., C), or labels (...)
---@param target perilune.Tensor (...)
---@param opts {average?: string, classes?: integer, ignore_index?: integer}? average: "macro", "micro", "weighted" or "none"; classes: their number, required with labels; ignore_index: label to exclude
---@return perilune.Tensor # scalar, or (C) for "none"
function metrics.f1(scores, target, opts)
  local o = check.options("metrics.f1", opts, { average = "macro" }, { classes = "number", ignore_index = "number" })
  check.word("metrics.f1", "average", o.average, { "macro", "micro", "weighted", "none" })
  local matrix = metrics.confusion_matrix(scores, target, o.classes, { ignore_index = o.ignore_index })
  local C = matrix:size(0)
  local hit = (matrix * pl.eye(C)):sum(1)
  local actual, predicted = matrix:sum(1), matrix:sum(0)
  if o.average == "micro" then return hit:sum() * 2 / (actual:sum() + predicted:sum()) end
  local f1 = hit * 2 / (actual + predicted):clamp(1)
  if o.average == "none" then return f1 end
  if o.average == "macro" then return f1:mean() end
  return (f1 * actual):sum() / actual:sum()
end

---Makes a metric that is a function of means over batches, for what has no mean of its own: perplexity, a root, a ratio.
---Evaluations and accumulating steps average `mean` over their batches, by weight, and call `finish` once on the result:
---  metrics.new { mean = loss, finish = function(m) return m:exp() end }
---  metrics.new { mean = { hit = hit, all = all }, finish = function(m) return m.hit / m.all end }
---@param of {mean: perilune.Tensor|table<string, perilune.Tensor>, finish: fun(mean: any): perilune.Tensor} mean: what is averaged, a tensor or several by name; finish: makes the metric of the means
---@return perilune.Tensor # scalar: the metric of this batch; what is computed from it is averaged like any tensor
function metrics.new(of)
  local o = check.options("metrics.new", of, {}, { mean = "tensor|table", finish = "function" })
  check.required("metrics.new", o, { "mean", "finish" })
  local function scalar(value, name)
    if pl.is_tensor(value) and value:numel() == 1 then return end
    local got = pl.is_tensor(value) and ("a tensor of shape {%s}"):format(table.concat(value.shape, ", ")) or check.show(value)
    pl.error("metrics.new", ("%s is %s"):format(name, got), "give a scalar tensor, the mean over the batch, or a table of them by name")
  end
  if not pl.is_tensor(o.mean) and next(o.mean) ~= nil then
    for name, value in pairs(o.mean) do
      if type(name) ~= "string" then pl.error("metrics.new", ("mean has the key %s"):format(check.show(name)), "name the means: mean = { hit = hit }") end
      scalar(value, "mean." .. name)
    end
  else
    scalar(o.mean, "mean")
  end
  return combine.new(o.mean, o.finish)
end

---Computes the perplexity: exp of a mean cross-entropy in nats. Over batches it is exp of the mean over all of them.
---@param loss perilune.Tensor
---@return perilune.Tensor
function metrics.perplexity(loss)
  return combine.new(loss, function(mean) return mean:exp() end)
end

---Computes the area under the ROC curve of joined scores and labels (N), by Mann-Whitney's statistic in whole numbers: the number of pairs of
---a positive and a negative sample in the right order, where a pair of equal scores is half of one.
local function area(parts)
  local scores, labels = parts.scores, parts.labels
  local sorted, order = scores:sort(0)
  local label = labels:index_select(0, order)
  local hit, miss = label:eq(1):to("i64"), label:eq(0):to("i64")
  -- Equal scores are a group: its number counts those that differ from the one before.
  local n = sorted:size(0)
  local group = sorted:narrow(0, 1, n - 1):ne(sorted:narrow(0, 0, n - 1)):to("i64"):cumsum(0)
  group = pl.cat({ pl.zeros({ 1 }, { dtype = "i64" }), group }, 0)
  local none = pl.zeros({ n }, { dtype = "i64" })
  local hits, misses = none:scatter_add(0, group, hit), none:scatter_add(0, group, miss)
  local below = misses:cumsum(0) - misses
  local pairs_twice = (hits * (below * 2 + misses)):sum()
  local possible = hit:sum() * miss:sum() * 2 --[[@as perilune.Tensor]]
  local value = pairs_twice:to("f64") / possible:to("f64")
  return pl.where(scores:isnan():any(), 0 / 0, value):to("f32")
end

---Computes the area under the ROC curve: the probability that a positive sample has a higher score than a negative one, ties as half
---(Mann-Whitney). Over batches it is that of all their samples, not a mean. NaN without a positive or a negative label, or with a score
---that is NaN. Costs a sort; counts are whole numbers, exact up to 2^31 samples.
---@param scores perilune.Tensor (...) any increasing function of the probability, such as a logit
---@param target perilune.Tensor (...) 1 (or true) for positive, 0 for negative; samples with other labels do not count
---@return perilune.Tensor # scalar f32
function metrics.auc(scores, target)
  local op = "metrics.auc"
  for name, x in pairs { scores = scores, target = target } do
    if not pl.is_tensor(x) then pl.error(op, ("the %s are %s"):format(name == "scores" and name or "labels", check.show(x)), "give tensors: metrics.auc(scores, labels)") end
  end
  local a, b = table.concat(scores.shape, ", "), table.concat(target.shape, ", ")
  if a ~= b then
    pl.error(op, ("scores of shape {%s} and labels of shape {%s} differ"):format(a, b), "give one score a sample: of logits (B, 1) logits:squeeze(-1), of (B, 2) their difference")
  end
  if scores:numel() == 0 then pl.error(op, "there are no samples", "give at least one") end
  local labels = target.dtype == "bool" and target:to("i64") or target
  return combine.join_samples({ scores = scores:detach():flatten(), labels = labels:detach():flatten() }, area)
end

---@param op string
---@param prediction perilune.Tensor
---@param target perilune.Tensor
---@return perilune.Tensor
local function residual(op, prediction, target)
  local a, b = table.concat(prediction.shape, ", "), table.concat(target.shape, ", ")
  if a ~= b then
    pl.error(op, ("shapes {%s} and {%s} differ"):format(a, b),
      "(B, 1) and (B) would broadcast to (B, B); use squeeze(-1)")
  end
  return prediction - target
end

---Computes the mean squared error.
---@param prediction perilune.Tensor
---@param target perilune.Tensor
---@return perilune.Tensor
function metrics.mse(prediction, target)
  return (residual("metrics.mse", prediction, target) ^ 2):mean()
end

---Computes the root mean squared error. Over batches it is the root of the mean over all of them.
---@param prediction perilune.Tensor
---@param target perilune.Tensor
---@return perilune.Tensor
function metrics.rmse(prediction, target)
  return combine.new((residual("metrics.rmse", prediction, target) ^ 2):mean(), function(mean) return mean:sqrt() end)
end

---Computes the mean absolute error.
---@param prediction perilune.Tensor
---@param target perilune.Tensor
---@return perilune.Tensor
function metrics.mae(prediction, target)
  return residual("metrics.mae", prediction, target):abs():mean()
end

---Computes R^2, the fraction of the variance of the target that is explained: 1 is perfect, 0 is as good as the mean.
---Its mean over batches is not that of the split: evaluate in one batch.
---@param prediction perilune.Tensor
---@param target perilune.Tensor
---@return perilune.Tensor
function metrics.r2(prediction, target)
  local left = (residual("metrics.r2", prediction, target) ^ 2):sum()
  return 1 - left / ((target - target:mean()) ^ 2):sum()
end

---Computes count / seconds of plain numbers; 0 if no time has passed.
---@param count number
---@param seconds number
---@return number
function metrics.throughput(count, seconds)
  return seconds > 0 and count / seconds or 0
end

---@class perilune.Mean
---@field rules table<string, perilune.train.Rule> of metrics that are functions of means
---@field joined table<string, table> parts that are joined over batches, lists of tensors
---@field parts {values: table<string, perilune.Tensor|number>, count: number|perilune.Tensor}[]
local Mean = {}
local mean_meta = { __index = Mean }

---Makes an accumulator of means over batches of different sizes:
---  local mean = metrics.Mean(); mean:add({ loss = loss }, 64); mean:result().loss
---@return perilune.Mean
function metrics.Mean()
  return setmetatable({ parts = {}, joined = {}, rules = {} }, mean_meta)
end

---Adds a batch: numbers or evaluated scalar tensors by name, and the number of samples that they are means over.
---Metrics such as perplexity, which are functions of means, are combined as such, and those of all samples, such as auc, too.
---@param values table<string, perilune.Tensor|number>
---@param count number|perilune.Tensor
function Mean:add(values, count)
  local averaged = combine.split(values, self.rules)
  for name, value in pairs(averaged) do
    if combine.is_joined(name) then
      -- The result is a number, as that of means.
      local list = self.joined[name] or { numbers = true }
      list[#list + 1] = value
      self.joined[name], averaged[name] = list, nil
    end
  end
  self.parts[#self.parts + 1] = { values = averaged, count = count }
end

---@param value perilune.Tensor|number
---@return number
local function number(value)
  if type(value) == "number" then return value end
  return value:item()
end

---Computes the means as plain numbers, and the number of samples. Reads all tensors back.
---@return table<string, number>
---@return number count
function Mean:result()
  local sums, counts, total = {}, {}, 0.0
  for _, part in ipairs(self.parts) do
    local n = number(part.count)
    total = total + n
    for name, value in pairs(part.values) do
      if n > 0 then
        sums[name] = (sums[name] or 0) + number(value) * n
        counts[name] = (counts[name] or 0) + n
      end
    end
  end
  for name, sum in pairs(sums) do sums[name] = sum / counts[name] end
  for name, list in pairs(self.joined) do sums[name] = list end
  return combine.join(sums, self.rules), total
end

return metrics
